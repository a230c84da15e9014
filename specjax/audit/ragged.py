"""A small ragged batch, and what must hold for it exactly: rows, ends, laws, counts and log-probabilities.

Prompts of all lengths, laws of all kinds, rows that stop at once, inside a block and at the end of the buffers. Each
check is a p-value that is 1 or 0, so that it stands beside statistical ones; None says that it does not apply.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import checks
from specjax.audit import battery
from specjax.audit.battery import STOP
from specjax.audit.engine import Engine, Trace
from specjax.draft import ModelDrafter
from specjax.language_model import LanguageModel
from specjax.models import tabular
from specjax.result import SampleResult
from specjax.sampler import RoundInfo
from specjax.warp import Warp

GAMMA = 3
TOLERANCE = 1e-4  # of log-probabilities
KEY = 889  # of the ragged batch: under the token rule its longest row reaches the end, others stop inside a block

# A ragged batch for the invariants: prompts of all lengths, laws of all kinds, and stops.
PROMPTS = ((1,), (0, 2, 1, 0), (2, 2, 0, 1, 0, 1, 2), (2, 0), (1, 1, 0, 2, 0), (0, 1, 2, 1, 1, 0))
NEW_TOKENS = (12, 12, 12, 5, 12, 9)
_FIELDS: dict[str, Any] = {  # numpy's: importing this starts no backend
  "temperature": np.array([1.0, 0.7, 1.5, 0.0, 1.0, 1.3], np.float32),
  "top_k": np.array([0, 0, 3, 0, 0, 2], np.int32),
  "top_p": np.array([1.0, 1.0, 1.0, 1.0, 0.8, 1.0], np.float32),
  "min_p": np.array([0.0, 0.1, 0.0, 0.0, 0.0, 0.0], np.float32),
}
MIXED = Warp(**_FIELDS)


@functools.cache
def languages() -> tuple[LanguageModel, LanguageModel]:
  """Target and draft; the target stops about every tenth token, so that rows live through several rounds."""
  target = battery.Language(1).model()
  table = target.params.at[..., STOP].add(-1.5)
  return tabular.from_table(table), battery.Language(2).model()


def _width() -> int:
  return max(map(len, PROMPTS))


def batch(**changes: Any) -> dict[str, Any]:
  """Arguments of a sampler for the ragged batch; the buffers are as short as they may be."""
  target, draft = languages()
  prompts = np.array([[*prompt, *[1] * (_width() - len(prompt))] for prompt in PROMPTS], np.int32)
  return {
    "target": target,
    "drafter": ModelDrafter(draft),
    "prompt_tokens": prompts,
    "prompt_lengths": np.array(list(map(len, PROMPTS)), np.int32),
    "key": jax.random.split(jax.random.key(KEY), len(PROMPTS)),
    "max_new_tokens": np.array(NEW_TOKENS, np.int32),
    "num_draft_tokens": GAMMA,
    "warp": MIXED,
    "eos_id": STOP,
    "max_length": checks.slots(_width(), _width() + max(NEW_TOKENS), GAMMA, 2),
    "prefill_chunk": 2,
  } | changes


ROW_FIELDS = ("prompt_tokens", "prompt_lengths", "key", "max_new_tokens")


def rows_of(request: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
  """The same request for some rows, in this order."""
  index = np.asarray(rows)
  own = {name: request[name][index] for name in ROW_FIELDS}
  return request | own | {"warp": jax.tree.map(lambda x: x[index], request["warp"])}


@functools.lru_cache(maxsize=1)  # several checks read one run
def watched(engine: Engine) -> Trace:
  return engine.trace(**batch())


def _laws_of(model: LanguageModel, result: SampleResult, settings: Warp) -> np.ndarray:
  return np.asarray(tabular.laws(model, jnp.asarray(result.tokens), settings.per_row(len(result.tokens))))


def _same(ours: Any, theirs: Any) -> bool:
  return np.allclose(ours, theirs, rtol=0, atol=TOLERANCE)  # infinities are close to themselves


def _invariant(holds: bool) -> float:
  return 1.0 if holds else 0.0


def greedy(engine: Callable[..., SampleResult]) -> float:
  """At temperature 0 every row is the target's chain of argmaxes."""
  result = engine(**batch(warp=Warp(temperature=0.0).per_row(len(PROMPTS))))
  best = _laws_of(languages()[0], result, Warp()).argmax(-1)
  tokens = np.asarray(result.tokens)
  return _invariant(
    all(
      (tokens[row, start:end] == best[row, start - 1 : end - 1]).all()
      for row, (start, end) in enumerate(_spans(result))
    )
  )


def ends(engine: Callable[..., SampleResult]) -> float:
  """Every row ends with its first stop token or at its limit, not before and not behind."""
  return ends_of(watched(engine).result if isinstance(engine, Engine) else engine(**batch()))


def ends_of(result: SampleResult) -> float:
  """`ends`, of the ragged batch's result."""
  for row, (start, end) in enumerate(_spans(result)):
    tokens = np.asarray(result.tokens)[row, start:end].tolist()
    if STOP in tokens[:-1] or not (tokens[-1:] == [STOP] or len(tokens) == NEW_TOKENS[row]):
      return 0.0
  return 1.0


def _spans(result: SampleResult) -> list[tuple[int, int]]:
  return [(len(prompt), int(end)) for prompt, end in zip(PROMPTS, result.lengths, strict=True)]


def batch_of_one(engine: Callable[..., SampleResult]) -> float:
  """Every row equals its run in a batch of its own."""
  request = batch()
  whole = engine(**request)
  for row, prompt in enumerate(PROMPTS):
    own = rows_of(request, [row]) | {"prompt_tokens": np.array([prompt], np.int32)}  # without padding
    if not _equal_rows(whole, row, engine(**own), 0):
      return 0.0
  return 1.0


def permuted_rows(engine: Callable[..., SampleResult]) -> float:
  """Rows in another order come out in that order, and else the same."""
  order = [3, 0, 5, 1, 2, 4]
  whole, other = engine(**batch()), engine(**rows_of(batch(), order))
  return _invariant(all(_equal_rows(whole, row, other, at) for at, row in enumerate(order)))


def _equal_rows(ours: SampleResult, i: int, theirs: SampleResult, j: int) -> bool:
  end = int(ours.lengths[i])
  return bool(
    end == int(theirs.lengths[j])
    and (ours.tokens[i, :end] == theirs.tokens[j, :end]).all()
    and _same(ours.logprobs[i, :end], theirs.logprobs[j, :end])
    and all(_same(a[i], b[j]) for a, b in zip(vars(ours.stats).values(), vars(theirs.stats).values(), strict=True))
  )


def laws(engine: Engine) -> float | None:
  """In every round, the laws that decided are those of a fresh pass over the text: of the target, and of the draft."""
  return fresh_laws_of(watched(engine), *languages()) if isinstance(engine, Engine) else None


def recurrent_target(engine: Engine) -> float | None:
  """The same for a target whose state has to be rolled back."""
  if not isinstance(engine, Engine):
    return None
  target, draft = languages()
  return fresh_laws_of(engine.trace(**batch(target=tabular.recurrent(target))), target, draft)


def fresh_laws_of(trace: Trace, target: LanguageModel, draft: LanguageModel) -> float:
  """`laws`, of the ragged batch's trace."""
  of_target, of_draft = (_laws_of(model, trace.result, MIXED) for model in (target, draft))
  ends = np.array(list(map(len, PROMPTS)))
  for info in trace.rounds:
    for row, end in enumerate(ends):
      emitted = int(info.num_emitted[row])
      drafted = min(emitted, int(info.num_drafted[row]))
      behind = slice(end - 1, end - 1 + emitted)
      if not _same(info.log_p[row, :emitted], of_target[row, behind]):
        return 0.0
      if not _same(info.log_q[row, :drafted], of_draft[row, behind][:drafted]):
        return 0.0
    ends = ends + info.num_emitted
  return _invariant(bool((ends == trace.result.lengths).all()))


def own_draft(engine: Engine) -> float:
  """A target that drafts for itself: at temperature 0 every round keeps all drafts and adds a token, to the limit."""
  target = battery.Language(1, never=(STOP,)).model()
  rows = len(PROMPTS)
  result = engine(
    **batch(
      target=target,
      drafter=ModelDrafter(target),
      warp=Warp(temperature=0.0).per_row(rows),
      max_new_tokens=np.full(rows, 2 * (GAMMA + 1) + 2, np.int32),  # the last round has room for one draft
    )
  )
  stats = result.stats
  right = {"rounds": 3, "drafted": 2 * GAMMA + 1, "accepted": 2 * GAMMA + 1, "generated": 2 * (GAMMA + 1) + 2}
  return _invariant(all((getattr(stats, name) == value).all() for name, value in right.items()))


def counts(engine: Engine) -> float | None:
  """Every figure of `Stats` is what its definition makes of the rounds."""
  return counts_of(watched(engine)) if isinstance(engine, Engine) else None


def counts_of(trace: Trace) -> float:
  """`counts`, of the ragged batch's trace."""
  told, mine = trace.result.stats, recount(trace.rounds, np.asarray(trace.result.lengths))
  with np.errstate(invalid="ignore"):  # a faulty engine may test no draft of a row: its means are NaN on both sides
    ratios = {
      "acceptance_rate": mine["accepted"].sum() / mine["drafted"].sum(),
      "block_efficiency": mine["generated"].sum() / mine["rounds"].sum(),
      "pooled_alpha": mine["overlap"].sum() / mine["tested"].sum(),
      "alpha": mine["overlap"] / mine["tested"].sum(-1),
    }
    return _invariant(all(_same(getattr(told, name), value) for name, value in (mine | ratios).items()))


def recount(infos: Sequence[RoundInfo], lengths: np.ndarray) -> dict[str, np.ndarray]:
  """The counts of `Stats` for the ragged batch, draft by draft."""
  rows = len(PROMPTS)
  out: dict[str, Any] = {name: np.zeros(rows, np.int64) for name in ("rounds", "drafted", "accepted")}
  out["overlap"] = np.zeros(rows)
  out |= {name: np.zeros((rows, GAMMA), np.int64) for name in ("tested", "accepted_at")}
  out["generated"] = lengths - np.array(list(map(len, PROMPTS)))
  for info, row in itertools.product(infos, range(rows)):
    emitted, drafted, kept = (int(x[row]) for x in (info.num_emitted, info.num_drafted, info.num_accepted))
    if not emitted:
      continue
    out["rounds"][row] += 1
    stopped = STOP in info.tokens[row, : min(emitted, kept)].tolist()  # in an accepted draft: the rest never mattered
    out["drafted"][row] += min(emitted, drafted) if stopped else drafted
    for i in range(min(drafted, emitted)):
      if i > kept:
        break
      out["tested"][row, i] += 1
      out["overlap"][row] += np.minimum(np.exp(info.log_p[row, i]), np.exp(info.log_q[row, i])).sum()
      if i < kept:
        out["accepted"][row] += 1
        out["accepted_at"][row, i] += 1
  return out


def logprobs(engine: Callable[..., SampleResult]) -> float:
  """The log-probability told for every generated token is the warped target's by a fresh pass; 0 elsewhere."""
  return logprobs_of(watched(engine).result if isinstance(engine, Engine) else engine(**batch()))


def logprobs_of(result: SampleResult) -> float:
  """`logprobs`, of the ragged batch's result."""
  of_target = _laws_of(languages()[0], result, MIXED)
  expected = np.zeros_like(result.logprobs)
  for row, (start, end) in enumerate(_spans(result)):
    tokens = np.asarray(result.tokens)[row, start:end]
    expected[row, start:end] = of_target[row, np.arange(start - 1, end - 1), tokens]
  return _invariant(_same(result.logprobs, expected))
