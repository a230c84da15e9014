"""The checks of a whole sampler, by name: of its laws on tiny languages, of its bare rule, and of a ragged batch.

A check takes an `Engine`, or where it looks at results alone anything that is called like one, and returns a p-value;
None says that it does not apply. A sampler fails a check whose p-value is below LEVEL.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from specjax.audit import battery, ragged, rounds
from specjax.audit.battery import VOCAB
from specjax.audit.engine import Engine
from specjax.audit.exact import Fit, compare, fit
from specjax.audit.ragged import GAMMA
from specjax.audit.rounds import KEPT, Kept, combine
from specjax.draft import ModelDrafter
from specjax.models import tabular
from specjax.result import SampleResult
from specjax.sampler import RoundInfo
from specjax.verify import Verifier

LEVEL = 1e-9
ROWS = 96_000
# Where laws are broad and rounds many, faults that are small elsewhere show.
FOCUS = battery.Scenario("soft", "hot", battery.PROMPTS[1], stops=False)


@functools.cache
def _cases() -> tuple[battery.Scenario, ...]:
  return tuple(battery.scenarios())


@functools.lru_cache(maxsize=1)
def _battery(engine: Callable[..., SampleResult], rows: int) -> tuple[SampleResult, RoundInfo | None]:
  request = battery.arguments(_cases(), num_draft_tokens=GAMMA, rows=rows)
  if not isinstance(engine, Engine):
    return jax.device_get(engine(**request)), None
  trace = engine.trace(**request)
  return trace.result, trace.rounds[0]


def joint_law(engine: Callable[..., SampleResult], rows: int = ROWS) -> float:
  """Whole generations follow the enumerated laws: in the battery's scenarios, and in one of them alone."""
  fits = battery.fits(_battery(engine, rows)[0], _cases())
  return combine([fit.p_value for fit in (*fits.values(), battery.total(fits))] + [focused_law(engine, rows)])


def focused_law(engine: Callable[..., SampleResult], rows: int = ROWS) -> float:
  """`joint_law`, of one scenario alone."""
  # As many as the battery has, so that it is the same program.
  request = battery.arguments([FOCUS] * len(_cases()), num_draft_tokens=GAMMA, rows=rows, seed=1)
  return compare(jax.device_get(engine(**request)), FOCUS.law()).p_value


def declared_law(engine: Engine, rows: int = ROWS) -> float | None:
  """The first round's drafts follow the laws that the drafter declares."""
  if not isinstance(engine, Engine):
    return None
  _, info = _battery(engine, rows)
  assert info is not None
  fits = [declared_fit(jax.tree.map(lambda x, i=i: x[i :: len(_cases())], info)) for i in range(len(_cases()))]
  return combine([fit.p_value for fit in (*fits, functools.reduce(Fit.__add__, fits))])


def declared_fit(info: RoundInfo) -> Fit:
  """The drafts of a round of rows that have the same text, against the declared law of their paths."""
  paths, first, counts = np.unique(info.draft_tokens, axis=0, return_index=True, return_counts=True)
  log_q = np.take_along_axis(np.asarray(info.log_q, np.float64)[first], paths[..., None], axis=-1)
  law = np.exp(log_q[..., 0].sum(-1))
  return fit(np.append(counts, 0), np.append(law, max(0.0, 1 - law.sum())))  # what was never drawn is one outcome


def acceptance(engine: Engine, rows: int = ROWS, kept: Kept | None = None) -> float | None:
  """How often the first round keeps at least i drafts, against the rule's closed form from the models' own laws.

  kept: the closed form; default: that of the rule, or of token verification.
  """
  if not isinstance(engine, Engine):
    return None
  _, info = _battery(engine, rows)
  assert info is not None
  kept = kept or KEPT.get(engine.rule, rounds.kept_by_token)
  p_values = []
  for i, case in enumerate(_cases()):
    accepted = info.num_accepted[i :: len(_cases())]
    for least, expected in enumerate(closed_form(case, kept), start=1):
      expected = min(max(expected, 0.0), 1.0)
      seen = int((accepted >= least).sum())
      p_values.append(float(scipy.stats.binomtest(seen, len(accepted), expected).pvalue))
  return combine(p_values)


@functools.cache
def closed_form(case: battery.Scenario, kept: Kept) -> tuple[float, ...]:
  """The probabilities that the first round keeps at least 1, ..., GAMMA drafts."""
  paths = tabular.sequences(VOCAB, GAMMA)
  text = jnp.concatenate([jnp.tile(jnp.asarray(case.prompt, jnp.int32), (len(paths), 1)), jnp.asarray(paths)], axis=1)
  settings = battery.WARPS[case.warp].per_row(len(paths))
  first = len(case.prompt) - 1
  p, q = (
    np.exp(np.asarray(tabular.laws(model.model(), text, settings), np.float64))[:, first : first + GAMMA]
    for model in case.languages()
  )
  out = []
  for least in range(1, GAMMA + 1):
    every = VOCAB ** (GAMMA - least)  # one path for each beginning
    out.append(sum(kept(p[i, :least], q[i, :least], paths[i, :least].tolist()) for i in range(0, len(paths), every)))
  return tuple(out)


def padded_vocabulary(engine: Callable[..., SampleResult], rows: int = ROWS // 2) -> float:
  """A draft model with more tokens than the target has: the target's law stands."""
  target, prompt, count = tabular.tabular(jax.random.key(7), VOCAB), (2, 0), 3
  result = engine(
    target,
    ModelDrafter(tabular.tabular(jax.random.key(8), 2 * VOCAB)),
    np.resize(np.array(prompt, np.int32), (rows, len(prompt))),
    key=jax.random.key(0),
    max_new_tokens=count,
    num_draft_tokens=2,
    max_length=16,
    prefill_chunk=2,
  )
  return compare(jax.device_get(result), tabular.law(target, prompt, count)).p_value


def of_rule(check: Callable[[Verifier], float]) -> Callable[[Any], float | None]:
  """The check of an engine's bare rule; many engines have the same."""
  known = functools.cache(check)

  def run(engine: Any) -> float | None:
    return known(engine.rule) if isinstance(engine, Engine) else None

  run.__doc__ = check.__doc__
  return run


CHECKS: dict[str, Callable[[Any], float | None]] = {
  "one round": of_rule(rounds.law),
  "rare drafts": of_rule(rounds.rare),
  "empty residual": of_rule(rounds.empty_residual),
  "joint law": joint_law,
  "declared law": declared_law,
  "padded vocabulary": padded_vocabulary,
  "greedy": ragged.greedy,
  "ends": ragged.ends,
  "batch of one": ragged.batch_of_one,
  "permuted rows": ragged.permuted_rows,
  "fresh laws": ragged.laws,
  "recurrent target": ragged.recurrent_target,
  "own draft": ragged.own_draft,
  "acceptance": acceptance,
  "counts": ragged.counts,
  "logprobs": ragged.logprobs,
}
