"""The audit: do these tokens come from the target's law, and if not, where do they leave it?

No reference samples are needed: the target's own teacher-forced law says what every score must be on average. What is
tested here is what was drawn; how it came about (acceptance, caches, keys) is guessed from where it went wrong.
"""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax import checks
from specjax.audit import dependence, stats, where
from specjax.audit.report import FAMILIES, LogprobCheck, Report, Support, conclude
from specjax.audit.samples import Samples
from specjax.audit.scores import Moments, Scores, bernoulli, score
from specjax.language_model import LanguageModel
from specjax.warp import DEFAULT_WARP, Warp

DIRECTIONS = ("surprise", "draft", "argmax", "repeat", "copy", "echo", "stop")


def _require_number(name: str, value: Any) -> None:
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise TypeError(f"{name}={value!r} must be a number.")


@dataclasses.dataclass(frozen=True)
class Noise:
  """What the numerics of an engine may do to its law without being called a fault.

  drift: mean of a score off by this many of its standard deviations a token. It is no bound but an allowance (see
    docs/audit.md for what was measured); a law at distance KL nats can't drift by more than sqrt(2 KL) or so.
  logits: by how much two logits may change places; mass: probability by which a top_p may be exceeded.
  outside: share of the tokens that may fall outside a truncated support in these ways; flips: the same for argmax.

  Raises TypeError for what is no number, and ValueError for a negative one, an infinite one, NaN, and a share above 1.
  """

  drift: float
  logits: float
  mass: float
  outside: float
  flips: float

  def __post_init__(self) -> None:
    for name, value in vars(self).items():
      _require_number(f"noise.{name}", value)
      if not 0 <= value < math.inf or (value > 1 and name not in ("drift", "logits")):
        words = "finite and 0 or more" if name in ("drift", "logits") else "a share from 0 to 1"
        raise ValueError(f"noise.{name}={value} must be {words}.")


NOISE = {
  "float32": Noise(drift=0.0, logits=0.01, mass=1e-3, outside=2e-4, flips=5e-4),
  "bfloat16": Noise(drift=0.003, logits=1.0, mass=0.05, outside=0.01, flips=0.05),
}


def audit(
  target: LanguageModel,
  samples: Samples,
  *,
  warp: Warp = DEFAULT_WARP,
  draft: LanguageModel | None = None,
  rule: str | None = None,
  eos_id: int | Sequence[int] | None = None,
  noise: str | Noise = "bfloat16",
  alpha: float = 1e-3,
  power: float = 0.8,
  seed: int = 0,
) -> Report:
  """Tests whether every generated token was drawn from the target's warped law given what came before it.

  target: the model whose law is claimed, in the precision of the reference: float32.
  warp: the law that was asked for; fields are scalars or have an entry a generation.
  draft: the engine's draft model, if it had one; adds the direction in which faults of acceptance move a law.
  rule: "token" says that the engine accepts by token verification with this draft model and that the samples have
    labels: acceptance, accepted and residual tokens are then each held against their own law.
  eos_id: tokens that end a generation; they belong to the samples.
  noise: "float32", "bfloat16" or a `Noise`: what the engine's numerics may do unpunished.
  alpha: probability of calling a fault where there is none. power: of finding the excess stated as detectable.
  seed: of the auxiliary uniforms of the rank test.

  Raises ValueError for ids outside the vocabulary, sequences beyond the target's context, samples without any generated
  token, a draft model with another vocabulary, and a target whose law is NaN.
  """
  stream = Stream(target, draft=draft, rule=rule, eos_id=eos_id, noise=noise, alpha=alpha, power=power, seed=seed)
  return stream.add(samples, warp=warp)[1]


@dataclasses.dataclass(frozen=True)
class Stream:
  """An audit of text that is still being made: every token is scored once, however often one looks.

      stream = Stream(target, eos_id=tokenizer.eos_ids)
      for batch in engine:
        stream, report = stream.add(batch)
        if report.evidence and report.evidence.crossed:
          break

  Fields but the last three are arguments of `audit`. Its report on all samples is that of the last `add`, but for
  rounding. `evidence` may be looked at after every one of them; `ok` keeps its alpha for a number of tokens that was
  chosen beforehand, and not for the first of many looks that finds something.

  samples, scores, warp: what was added so far, and how it was asked for. All parts tell the same things of their
  generations: rows, labels and so on.
  """

  target: LanguageModel
  _: dataclasses.KW_ONLY
  draft: LanguageModel | None = None
  rule: str | None = None
  eos_id: int | Sequence[int] | None = None
  noise: str | Noise = "bfloat16"
  alpha: float = 1e-3
  power: float = 0.8
  seed: int = 0
  samples: Samples | None = None
  scores: Scores | None = None
  warp: Warp | None = None

  def __post_init__(self) -> None:
    check_settings(self.rule, self.noise, self.alpha, self.power, self.seed)

  def add(self, samples: Samples, *, warp: Warp = DEFAULT_WARP) -> tuple["Stream", Report]:
    """The stream with these samples behind the others, and the report on all of them. Raises what `audit` raises."""
    warp, stop_ids = _check(self.target, samples, warp, self.draft, self.rule, self.eos_id)
    noise = check_settings(self.rule, self.noise, self.alpha, self.power, self.seed)
    known, told = 0, None
    if self.samples is not None:
      _require_same_fields(self.samples, samples)
      known = len(self.samples.tokens)
      samples = Samples.concatenate([self.samples, samples])
      warp, told = jax.tree.map(lambda *parts: np.concatenate(parts), self.warp, warp), self.scores
    scores = score(self.target, samples, warp, stop_ids, self.draft, known=known)
    _require_laws(samples, scores, known)
    if told is not None:
      scores = jax.tree.map(lambda *parts: np.concatenate(parts), told, scores)
    stream = dataclasses.replace(self, samples=samples, scores=scores, warp=warp)
    return stream, judge(
      samples, scores, warp=warp, stop_ids=stop_ids, rule=self.rule, noise=noise, alpha=self.alpha, power=self.power,
      seed=self.seed,
    )  # fmt: skip


def judge(
  samples: Samples,
  scores: Scores,
  *,
  warp: Warp,
  stop_ids: np.ndarray,
  rule: str | None,
  noise: Noise,
  alpha: float,
  power: float,
  seed: int,
) -> Report:
  """The report on scores that are at hand already. Main tests and parts of the samples share alpha."""
  inside, greedy = np.isfinite(scores.log_p), bool(scores.single.all())
  moments = {name: scores.moments[name] for name in DIRECTIONS if name in scores.moments} | _dependence(samples, scores)
  moments = {name: Moments(*(x[inside] for x in m)) for name, m in moments.items()}
  partitions = [dataclasses.replace(g, codes=g.codes[inside]) for g in where.groupings(samples)]
  free = moments["argmax"].variance > 0
  tests = [stats.add_up(name, m, noise.drift) for name, m in moments.items() if stats.is_testable(m)]
  rank = stats.uniform_test(scores.above[inside][free], scores.tied[inside][free], seed, noise.drift)
  tests += [] if rank is None else [rank]
  level = alpha / FAMILIES
  tests = stats.with_power(tests, level, power, noise.drift)
  parts = where.parts(partitions, moments, noise.drift)
  signs = {t.name for t in tests if t.adjusted <= level} | {p.score for p in parts if p.adjusted <= level}
  found = {name: m for name, m in moments.items() if name in signs} or (moments if signs else {})  # `rank` has no parts
  return conclude(
    Report(
      ok=None,
      verdict="",
      generations=len(samples.tokens),
      empty=sum(not len(tokens) for tokens in samples.tokens),
      tokens=samples.num_tokens,
      free_tokens=int(free.sum()),
      tests=tuple(tests),
      skipped=tuple(sorted(set(moments) - {t.name for t in tests})),
      temperature_scale=float(moments["surprise"].variance.mean()) if inside.any() else math.nan,
      rule_tests=tuple(_rule_tests(samples, scores, noise, alpha, power)) if rule else (),
      parts=tuple(parts),
      contrast=where.sharpest_contrast(partitions, found, alpha, noise.drift),
      support=_support(samples, scores, noise),
      behind_stop=_behind_stop(samples, stop_ids),
      beyond_limit=_beyond_limit(samples),
      ended_early=_ended_early(samples, stop_ids),
      evidence=stats.evidence(moments, alpha, noise.drift) if inside.any() else None,
      logprobs=_logprobs(samples, scores, noise),
      draft_logprobs_off=_draft_logprobs_off(samples, scores, noise),
      from_text=samples.from_text,
      greedy=greedy,
      alpha=alpha,
      power=power,
      noise=dataclasses.asdict(noise),
    )
  )


def drift(
  target: LanguageModel, engine: LanguageModel, samples: Samples, *, warp: Warp = DEFAULT_WARP
) -> dict[str, float]:
  """What an engine's own numerics does to every score, exactly and without sampling.

  engine: the same model computed as the engine computes it (dtype, kernels). Returns, for each score, the mean over the
  samples' tokens of E_engine f - E_target f, in standard deviations of f: what `Noise.drift` has to allow. A test over
  n tokens moves by this times sqrt(n).
  """
  _require_model("engine", engine)
  warp, stop_ids = _check(target, samples, warp, engine, None, None)
  scores = score(target, samples, warp, stop_ids, engine, expected=True, description="Comparing")
  _require_laws(samples, scores)
  return {
    name: float(m.deviation.sum(dtype=np.float64) / max(np.sqrt(m.variance).sum(dtype=np.float64), 1e-30))
    for name, m in scores.moments.items()
  }


def check_settings(rule: str | None, noise: str | Noise, alpha: float, power: float, seed: int) -> Noise:
  """What can be said of an audit's settings before there is a target."""
  for name, value, high in (("alpha", alpha, 0.5), ("power", power, 1.0)):
    _require_number(name, value)
    if not 0.0 < value <= high or value == 1.0:
      raise ValueError(f"{name}={value} must be a probability above 0 and at most {high:g} (below 1).")
  checks.whole("seed", seed, 0)
  if rule not in (None, "token"):
    raise ValueError(f"rule={rule!r} is unknown; allowed: 'token', or None where acceptance is not to be judged.")
  if isinstance(noise, Noise):
    return noise
  words = f"Known: {', '.join(NOISE)}; or pass a specjax.audit.Noise."
  if not isinstance(noise, str):
    raise TypeError(f"noise={noise!r} is neither a name nor a Noise. {words}")
  if noise not in NOISE:
    raise ValueError(f"noise={noise!r} is unknown. {words}")
  return NOISE[noise]


def _require_model(name: str, value: Any) -> None:
  if not isinstance(value, LanguageModel):
    has_one = isinstance(getattr(value, "model", None), LanguageModel)
    hint = (
      f"pass {name}.model." if has_one else "what drafts without a model, such as n-grams, has no law to compare with."
    )
    raise TypeError(f"{name} must be a specjax.LanguageModel, got {type(value).__name__}: {hint}")


def _check(target, samples, warp, draft, rule, eos_id) -> tuple[Warp, np.ndarray]:
  checks.models(target, None, 0)
  if not isinstance(samples, Samples):
    raise TypeError(f"samples must be specjax.audit.Samples, got {type(samples).__name__}; see Samples.read.")
  if not samples.num_tokens:
    raise ValueError(f"none of the {len(samples.tokens)} generations holds a token: there is nothing to audit.")
  if draft is not None:
    _require_model("draft", draft)
    checks.models(draft, None, 0)
    if not checks.vocabularies_match(draft.num_ids, target.num_ids):
      raise ValueError(f"the draft model has {draft.num_ids} tokens, the target {target.num_ids}.")
  if rule and (draft is None or samples.labels is None):
    raise ValueError("rule='token' needs the draft model and samples with labels.")
  for i, (prompt, tokens) in enumerate(zip(samples.prompts, samples.tokens, strict=True)):
    for what, ids in (("prompts", prompt), ("tokens", tokens)):
      bad = np.flatnonzero((ids < 0) | (ids >= target.num_ids))
      if bad.size:
        raise ValueError(
          f"{what}[{i}][{bad[0]}]={ids[bad[0]]} is outside the target's vocabulary, 0 to {target.num_ids - 1}: "
          "was another tokenizer used?"
        )
    for what, model in (("target", target), ("draft model", draft)):
      limit = None if model is None else model.context_length
      if limit is not None and len(prompt) + len(tokens) > limit:
        raise ValueError(f"generation {i} has {len(prompt) + len(tokens)} tokens, the {what}'s context holds {limit}.")
  stop_ids = np.unique(checks.stop_ids(eos_id, target.num_ids))
  return checks.warp_settings(warp, len(samples.tokens)), stop_ids


def _place(samples: Samples, index: int) -> tuple[int, int]:
  """(generation, position in it) of a token of the samples."""
  ends = np.cumsum(samples.counts)
  generation = int(np.searchsorted(ends, index, side="right"))
  return generation, int(index - (ends[generation] - len(samples.tokens[generation])))


def _require_laws(samples: Samples, scores: Scores, known: int = 0) -> None:
  """known: generations before the first that the scores are of."""
  before = int(samples.counts[:known].sum())
  for what, values in (("target", scores.log_p), ("draft model", scores.log_q)):
    if values is not None and (bad := np.flatnonzero(np.isnan(values))).size:
      generation, position = _place(samples, before + bad[0])
      raise ValueError(
        f"the {what}'s law is NaN at token {position} of generation {generation}, and at {bad.size} tokens in all: "
        "its logits are not finite there."
      )


def _require_same_fields(before: Samples, samples: Samples) -> None:
  for name, value in vars(samples).items():
    if (value is None) != (getattr(before, name) is None):
      has, had = ("no ", "") if value is None else ("", "no ")
      raise ValueError(f"these samples have {has}{name}, and those before had {had}{name}: a stream has one form.")


def _support(samples: Samples, scores: Scores, noise: Noise) -> Support:
  """Tokens of probability 0, those that numerics can't excuse, and whether the excused ones are too many.

  Where a law has one token alone, another one that is as good may take its place: these are counted by themselves.
  """
  outside = np.flatnonzero(np.isneginf(scores.log_p))
  margin, excess = scores.margin[outside], scores.excess[outside]
  beyond = outside[(margin > noise.logits) & (excess > noise.mass)]
  kinds = (scores.single, noise.flips), (~scores.single, noise.outside)
  worst = None
  if beyond.size:
    at = beyond[np.argmax(scores.margin[beyond])]
    worst = (*_place(samples, at), int(np.concatenate(samples.tokens)[at]))
  return Support(
    outside=len(outside),
    beyond=len(beyond),
    largest_margin=float(margin.max(initial=0.0)),
    largest_excess=float(excess[np.isfinite(excess)].max(initial=0.0)),
    p_value=min(
      1.0, 2 * min(stats.too_many(int(kind[outside].sum()), share * float(kind.sum())) for kind, share in kinds)
    ),
    worst=worst,
  )


def _dependence(samples: Samples, scores: Scores) -> dict[str, Moments]:
  """The draft score once more, weighted by what earlier draws tell of one that shares their u."""
  if scores.log_q is None:
    return {}
  with np.errstate(invalid="ignore"):
    leaning = np.nan_to_num(scores.log_q.astype(np.float64) - scores.log_p, nan=0.0)
  weights = {"serial": dependence.serial(samples, leaning), "across": dependence.across(samples, leaning)}
  return {name: stats.weighted(scores.moments["draft"], w) for name, w in weights.items() if w is not None}


def _behind_stop(samples: Samples, stop_ids: np.ndarray) -> int:
  """Generations that go on behind a stop token."""
  return sum(bool(np.isin(tokens[:-1], stop_ids).any()) for tokens in samples.tokens) if stop_ids.size else 0


def _beyond_limit(samples: Samples) -> int:
  """Generations with more tokens than they were allowed."""
  return 0 if samples.max_new_tokens is None else int((samples.counts > samples.max_new_tokens).sum())


def _ended_early(samples: Samples, stop_ids: np.ndarray) -> int:
  """Generations that end before their limit, and with no stop token. Without stop tokens nobody knows."""
  if samples.max_new_tokens is None or not stop_ids.size:
    return 0
  stopped = np.array([bool(np.isin(tokens[-1:], stop_ids).any()) for tokens in samples.tokens])
  return int(((samples.counts < samples.max_new_tokens) & ~stopped).sum())


def _logprobs(samples: Samples, scores: Scores, noise: Noise) -> LogprobCheck | None:
  if samples.logprobs is None:
    return None
  given = np.concatenate(samples.logprobs)
  told = ~np.isnan(given)
  if not told.any():
    return None
  given, tolerance = given[told], max(noise.logits, 1e-3)
  return LogprobCheck(
    off_warped=_off(given, scores.log_p[told], tolerance),
    off_scaled=_off(given, scores.scaled_log_p[told], tolerance),
    off_raw=_off(given, scores.raw_log_p[told], tolerance),
    all_equal=bool(len(given) > 1 and np.ptp(given) == 0),
    tolerance=tolerance,
  )


def _draft_logprobs_off(samples: Samples, scores: Scores, noise: Noise) -> float | None:
  """Share of the draft log-probabilities that are not those of the draft model; None without anything to compare."""
  if samples.draft_logprobs is None or scores.log_q is None:
    return None
  given = np.concatenate(samples.draft_logprobs)
  drafted = ~np.isnan(given)  # NaN says that there was no draft
  return _off(given[drafted], scores.log_q[drafted], max(noise.logits, 1e-3)) if drafted.any() else None


def _off(given: np.ndarray, computed: np.ndarray, tolerance: float) -> float:
  with np.errstate(invalid="ignore"):
    differences = np.abs(given - computed)
  return float(np.mean(~(differences <= tolerance)))  # NaN is off, too


def _rule_tests(samples: Samples, scores: Scores, noise: Noise, alpha: float, power: float) -> list[stats.Test]:
  """Token verification's own laws: draft accepted with probability sum min(p, q); accepted ~ min(p, q); residual."""
  labels = np.concatenate(samples.labels or [])
  assert scores.overlap is not None
  assert scores.accepted is not None
  assert scores.residual is not None
  tested = (labels == "accepted") | (labels == "residual")
  rate = np.clip(scores.overlap[tested].astype(np.float64), 0.0, 1.0)
  variance = rate * (1 - rate)
  laws = {
    "acceptance": bernoulli((labels[tested] == "accepted") - rate, rate, variance),
    # Where a law has no mass but by rounding, it can't be held against anything.
    "accepted": Moments(*(x[(labels == "accepted") & np.isfinite(scores.accepted.variance)] for x in scores.accepted)),
    "residual": Moments(*(x[(labels == "residual") & np.isfinite(scores.residual.variance)] for x in scores.residual)),
  }
  tests = [stats.add_up(name, m, noise.drift) for name, m in laws.items() if stats.is_testable(m)]
  return stats.with_power(tests, alpha, power, noise.drift)
