"""Is an acceptance rule exact? Whole generations on tiny languages, many situations a program, against enumeration.

`check_rule` answers for a rule of your own within a minute. The languages, laws and tests are exact; what is sampled is
`specjax.sample` itself, so a fault of its loop would show here, too. Real models and other engines: `audit`.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array
from jax.typing import ArrayLike

from specjax import checks, sampler, verify
from specjax.audit.exact import Fit, Outcome, compare
from specjax.draft import Context, Drafter, ModelDrafter, NGramDrafter, Proposal
from specjax.draft.base import DraftState
from specjax.language_model import LanguageModel
from specjax.models import tabular
from specjax.result import SampleResult
from specjax.verify import Verifier
from specjax.warp import Warp

VOCAB = 4
STOP = VOCAB - 1  # ends a row; languages of the scenarios without a stop never say it
LENGTH = 4
PROMPTS: tuple[Outcome, ...] = ((1,), (0, 2, 1, 0), (2, 2, 0, 1, 0, 1, 2))
WARPS = {
  "as it is": Warp(),
  "cold": Warp(temperature=0.6),
  "hot": Warp(temperature=1.7),
  "top-k": Warp(top_k=2),
  "top-p": Warp(top_p=0.75),
  "min-p": Warp(min_p=0.3),
  "all": Warp(temperature=1.5, top_k=3, top_p=0.8, min_p=0.15),
  "argmax": Warp(temperature=0.0),
}


@dataclasses.dataclass(frozen=True)
class Language:
  """A random language over VOCAB tokens that never says some of them."""

  seed: int
  spread: float = 1.5
  never: Outcome = ()

  def model(self) -> LanguageModel:
    table = tabular.tabular(jax.random.key(self.seed), VOCAB, spread=self.spread).params
    return tabular.from_table(table.at[..., jnp.asarray(self.never, jnp.int32)].set(-jnp.inf))


# How target and draft may stand to each other.
PAIRS = {
  "soft": (Language(1), Language(2)),
  "q = p": (Language(1), Language(1)),
  "q near zero": (Language(1, spread=9.0), Language(2, spread=9.0)),
  "draft lacks a token": (Language(1), Language(2, never=(1,))),
  "target lacks a token": (Language(1, never=(1,)), Language(2)),
  "disjoint": (Language(1, never=(0,)), Language(2, never=(1, 2, 3))),
}
LOOKED_UP = ("soft", "q near zero", "target lacks a token")  # those whose targets n-grams draft for, too


@dataclasses.dataclass(frozen=True)
class Scenario:
  """One situation: which languages, which law, which prompt, and whether the stop token may appear.

  one_hot: n-gram lookup drafts, in place of the pair's draft language.
  """

  pair: str
  warp: str
  prompt: Outcome
  stops: bool
  one_hot: bool = False

  @property
  def name(self) -> str:
    pair = f"n-gram drafts for {self.pair}" if self.one_hot else self.pair
    return f"{pair}, {self.warp}, prompt of {len(self.prompt)}{', stop' if self.stops else ''}"

  def languages(self) -> tuple[Language, Language]:
    """Target and draft."""
    target, draft = PAIRS[self.pair]
    return dataclasses.replace(target, never=(*target.never, *(() if self.stops else (STOP,)))), draft

  def law(self) -> dict[Outcome, float]:
    """Continuation -> probability."""
    return _law(self)


@functools.cache
def _law(scenario: Scenario) -> dict[Outcome, float]:
  target = scenario.languages()[0].model()
  return tabular.law(target, scenario.prompt, LENGTH, warp=WARPS[scenario.warp], stop_ids=(STOP,))


def scenarios(
  pairs: Sequence[str] = tuple(PAIRS), warps: Sequence[str] = tuple(WARPS), *, one_hot: bool = False
) -> list[Scenario]:
  """Every pair under every warp; prompts of three lengths, with and without stop tokens, are dealt out over them."""
  return [
    Scenario(pair, warp, PROMPTS[(i + j) % len(PROMPTS)], (i + j // 2) % 2 == 0, one_hot)
    for (i, pair), (j, warp) in itertools.product(enumerate(pairs), enumerate(warps))
  ]


ALL = (*scenarios(), *scenarios(LOOKED_UP, one_hot=True))


def arguments(cases: Sequence[Scenario], *, num_draft_tokens: int, rows: int, seed: int = 0) -> dict[str, Any]:
  """What `sample`, or another sampler, is called with: row b of its batch is in scenario `b % len(cases)`."""
  targets, drafts = zip(*([language.model() for language in case.languages()] for case in cases), strict=True)
  model, one_hot = ModelDrafter(tabular.interleave(drafts)), np.array([case.one_hot for case in cases], np.int32)
  rows -= rows % len(cases)
  deal = lambda values: np.resize(np.asarray(values), (rows, *np.shape(values)[1:]))  # noqa: E731
  width = max(len(case.prompt) for case in cases)
  # The padding is a token the languages know: reading it would be a fault that shows.
  prompts = [(*case.prompt, *[1] * (width - len(case.prompt))) for case in cases]
  return {
    "target": tabular.interleave(targets),
    "drafter": InTurn((model, NGramDrafter()), one_hot) if one_hot.any() else model,
    "prompt_tokens": deal(prompts),
    "prompt_lengths": deal([len(case.prompt) for case in cases]),
    "key": jax.random.key(seed),
    "max_new_tokens": LENGTH,
    "num_draft_tokens": num_draft_tokens,
    "warp": jax.tree.map(lambda *values: deal(values), *(WARPS[case.warp] for case in cases)),
    "eos_id": STOP,
    "max_length": 24,
    "prefill_chunk": 2,  # the longer prompts take several passes
  }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InTurn:
  """Several drafters in one program: row b drafts with `drafters[owners[b % len(owners)]]`; owners: int32[N]."""

  drafters: Sequence[Drafter]
  owners: ArrayLike

  def init(self, batch: int, max_length: int) -> list[DraftState]:
    return [drafter.init(batch, max_length) for drafter in self.drafters]

  def prefill(self, state: list[DraftState], tokens: Array, lengths: Array, chunk: int) -> list[DraftState]:
    return [d.prefill(s, tokens, lengths, chunk) for d, s in zip(self.drafters, state, strict=True)]

  def propose(self, state: list[DraftState], context: Context, num_draft_tokens: int) -> Proposal:
    # Clones, as every drafter consumes the row's bits, for its own rows alone.
    contexts = [dataclasses.replace(context, key=jax.random.clone(context.key)) for _ in self.drafters]
    own = [d.propose(s, c, num_draft_tokens) for d, s, c in zip(self.drafters, state, contexts, strict=True)]
    owners = jnp.resize(jnp.asarray(self.owners), context.length.shape)

    def select(first: Array, *rest: Array) -> Array:
      for i, leaf in enumerate(rest, start=1):
        first = jnp.where((owners == i).reshape(-1, *[1] * (leaf.ndim - 1)), leaf, first)
      return first

    chosen = jax.tree.map(select, *(dataclasses.replace(proposal, state=()) for proposal in own))
    return dataclasses.replace(chosen, state=[proposal.state for proposal in own])


def fits(result: SampleResult, cases: Sequence[Scenario]) -> dict[Scenario, Fit]:
  """How well the generations that `arguments` asked for fit each scenario's law."""
  return {case: compare(result, case.law(), rows=slice(i, None, len(cases))) for i, case in enumerate(cases)}


def total(fits: dict[Scenario, Fit]) -> Fit:
  """All scenarios as one test: small faults that they share add up."""
  first, *rest = fits.values()
  return functools.reduce(Fit.__add__, rest, first)


@dataclasses.dataclass(frozen=True)
class RuleReport:
  """What `check_rule` found; `str` of it says so in words.

  fits: for each program ("gamma 1") and scenario.
  level: a p-value below this is a deviation; the report as a whole then errs with at most `false_alarm` probability.
  Distances are total variations, averaged over scenarios.
  """

  name: str
  lossless: bool
  fits: dict[str, dict[Scenario, Fit]]
  level: float
  seconds: float

  @property
  def deviations(self) -> list[tuple[str, Fit]]:
    """Everything whose p-value is below the level, the worst first."""
    found = [
      (f"{program}: {case.name}", each)
      for program, fits in self.fits.items()
      for case, each in fits.items()
      if each.p_value < self.level
    ]
    found += [
      (f"{program}: all together", whole)
      for program, fits in self.fits.items()
      if (whole := total(fits)).p_value < self.level
    ]
    return sorted(found, key=lambda pair: pair[1].p_value)

  @property
  def exact(self) -> bool:
    """No deviation from the target's law was seen."""
    return not self.deviations

  @property
  def false_alarm(self) -> float:
    """Bound on the probability that an exact rule is called inexact (Bonferroni)."""
    return self.level * sum(len(fits) + 1 for fits in self.fits.values())

  def __str__(self) -> str:
    count = sum(each.observations for fits in self.fits.values() for each in fits.values())
    lines = [f"{self.name}: {count:,} generations in {self.seconds:.0f} s"]
    for program, fits in self.fits.items():
      whole = total(fits)
      seen = f"a law {whole.detectable(self.level):.3f} away would have been seen"
      lines.append(f"  {program}: p = {whole.p_value:.2g}, {whole.cells} outcomes; {seen}")
    if self.exact:
      lines.append(f"No deviation from the target's law (false alarms: less than {self.false_alarm:.0e}).")
    else:
      lines.append("It does not sample the target's law:")
      for name, each in self.deviations[:5]:
        outside = f", {each.outside} outcomes that can't happen" if each.outside else ""
        lines.append(f"  {name}: chi-square {each.chi_square:.0f} over {each.cells} outcomes{outside}")
    if self.exact != self.lossless:
      lines.append(f"It declares lossless={self.lossless}: {'keep it so if that is meant' if self.exact else 'wrong'}.")
    return "\n".join(lines)


def check_rule(
  rule: str | Verifier, *, gammas: Sequence[int] = (1, 3), rows: int = 300_000, seed: int = 0, level: float = 1e-9
) -> RuleReport:
  """Tests by enumeration whether an acceptance rule keeps the target's law; `print` the report.

  rule: a name, or a function as `sample(verifier=...)` takes it. gammas: drafts a block, a program each; texts have
  four tokens, so blocks of more than three never fill. rows: generations a program, in 72 situations. Takes less than a
  minute on two cores.

  Raises ValueError for no gamma or one below 1, and for rows below 1; TypeError for what is no whole number.
  """
  checks.count("rows", rows, 1)
  gammas = [checks.count(f"gammas[{i}]", gamma, 1) for i, gamma in enumerate(gammas)]
  if not gammas:
    raise ValueError("gammas is empty: give the number of drafts of one block or more, such as (1, 3).")
  start, checked = time.perf_counter(), verify.get(rule)
  found = {}
  for gamma in tqdm.tqdm(gammas, desc="Checking the rule", leave=False, disable=None):
    request = arguments(ALL, num_draft_tokens=gamma, rows=rows, seed=seed)
    found[f"gamma {gamma}"] = fits(jax.device_get(sampler.sample(**request, verifier=checked)), ALL)
  name = rule if isinstance(rule, str) else getattr(rule, "__name__", repr(rule))
  return RuleReport(name, checked.lossless, found, level, time.perf_counter() - start)
