"""From two laws to two texts: how likely the next token differs, and how long two texts stay the same.

The two texts continue one prompt, through two computation graphs. Under temperature 0 a token differs where the argmax
does; under shared Gumbel noise (`verifier="coupled"`, T > 0) where argmax(log p + g) and argmax(log q + g) do, and that
has a closed form. Curves are of S(t), the probability that the first t tokens are the same.

Nothing here runs a model.
"""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.special
import scipy.stats

RESAMPLES = 1000
ROUNDING = 1e-9  # of sums of probabilities


class Shared(NamedTuple):
  """Two laws p and q under the same Gumbel noise.

  differs: float64[...], the probability that they draw different tokens.
  kept: float64[..., V], the probability that q draws v too, given that p has drawn it.
  """

  differs: np.ndarray
  kept: np.ndarray


def shared_noise(log_p: Any, log_q: Any) -> Shared:
  """argmax(log p + g) against argmax(log q + g) with the same g, exactly (Daliri et al., arXiv 2408.07978):

    P(both draw v) = 1 / sum_w max(p(w) / p(v), q(w) / q(v)).

  log_p, log_q: float[..., V]; normalised here, in float64. With the ratios r = q / p in order this takes O(V log V):
  1 / kept(v) = 1 + sum_w p(w) max(r(w) - r(v), 0) / r(v), whose terms don't cancel, so that small differences are as
  exact as large ones. Raises ValueError for shapes that differ and for laws that are none.
  """
  p, q = (_law(name, value) for name, value in (("log_p", log_p), ("log_q", log_q)))
  if p.shape != q.shape:
    raise ValueError(f"log_p has shape {p.shape} and log_q {q.shape}; they must be the same, [..., V].")
  excess = np.empty_like(p)
  for at in np.ndindex(p.shape[:-1]):
    excess[at] = _excess(p[at], q[at])
  lost = np.where(np.isinf(excess), 1.0, excess / (1 + np.where(np.isinf(excess), 0.0, excess)))
  return Shared((p * lost).sum(-1), 1 - lost)


def has_law(logits: np.ndarray) -> np.ndarray:
  """bool[...] of logits[..., V]: whether none is NaN or +inf, and some token is possible."""
  return np.isfinite(logits.max(-1, initial=-np.inf))  # NaN is its own maximum


def _law(name: str, value: Any) -> np.ndarray:
  log_p = np.asarray(value, np.float64)
  if not log_p.ndim or not log_p.size or not has_law(log_p).all():
    raise ValueError(f"{name}, of shape {log_p.shape}, holds no law: it must be [..., V], each with a finite maximum.")
  return scipy.special.softmax(log_p, axis=-1)


def _excess(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  """sum_w p(w) max(r(w) - r(v), 0) / r(v) for every v, r = q / p; inf where q(v) is 0."""
  with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
    ratio = np.where(p > 0, q / p, np.inf)
  order = np.argsort(ratio)
  own = order[: np.searchsorted(ratio[order], np.inf)]  # the others have no p, so that p never draws them
  r = ratio[own]
  above = np.cumsum(p[own][::-1])[::-1]  # mass of p at r(v) and beyond
  steps = np.append(above[1:] * np.diff(r), q[np.isinf(ratio)].sum())
  out = np.zeros_like(p)
  with np.errstate(divide="ignore"):
    out[own] = np.cumsum(steps[::-1])[::-1] / r
  return out


def flip_probability(margins: Any, changes: Any) -> np.ndarray:
  """The probability that another graph prefers the second token, float64[N].

  margins: float[N], the first token's logit less the second's in one graph. changes: float[M], what the margin of a
    position's first two tokens gains in the other graph, at positions that are like these; their distribution stands
    for what is not known of the error. An exact tie that appears is decided by ids, either way.
  """
  margins, changes = np.asarray(margins, np.float64), np.sort(np.asarray(changes, np.float64))
  allowed = margins.ndim == changes.ndim == 1 and changes.size and (margins >= 0).all() and not np.isnan(changes).any()
  if not allowed:
    raise ValueError(
      f"margins {margins.shape} must be float[N], 0 or more, and changes {changes.shape} float[M], one or more; no NaN."
    )
  flipped = np.searchsorted(changes, -margins, side="left")
  tied = np.searchsorted(changes, -margins, side="right") - flipped
  return (flipped + np.where(margins > 0, tied / 2, 0)) / len(changes)  # a tie that stays one is decided as before


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
  """The index of the first token that differs; None where one is a prefix of the other, or both are the same."""
  length = min(len(a), len(b))
  different = np.flatnonzero(np.asarray(a)[:length] != np.asarray(b)[:length])
  return int(different[0]) if different.size else None


@dataclasses.dataclass(frozen=True)
class Curve:
  """S(t), the probability that the first t tokens are the same, t = 0 .. T; S(0) is 1.

  survival, low, high: float64[T+1], the estimate and the bounds of its pointwise interval.
  at_risk: int64[T+1], texts that reach t tokens (measured: the same up to t-1 of them).
  """

  survival: np.ndarray
  low: np.ndarray
  high: np.ndarray
  at_risk: np.ndarray


def _whole(name: str, values: Any) -> np.ndarray:
  array = np.asarray(values)
  if (array.size and not np.issubdtype(array.dtype, np.integer)) or (array < 0).any():
    raise ValueError(f"{name} must be whole numbers of tokens, 0 or more.")
  return array.astype(np.int64)


def _check_level(level: float) -> None:
  if not 0 < level < 1:
    raise ValueError(f"level={level} must be above 0 and below 1.")


def measured(lengths: Any, differences: Sequence[int | None], *, level: float = 0.95) -> Curve:
  """The curve of pairs of texts, by Kaplan and Meier.

  lengths: int[N], tokens of the shorter text of each pair. differences: of `first_difference`, N of them.

  A pair whose text ends (by a stop token or a limit) while it is the same says nothing of what would have come: it is
  censored there. So S(t) is that of a text which goes on, and the share of pairs that are the same to their end is
  larger than S at the longest. Intervals are of log(-log S) by Greenwood's formula; where nothing, or everything, has
  differed so far, they are Clopper's and Pearson's of the texts at risk.
  """
  lengths = _whole("lengths", lengths)
  _check_level(level)
  if lengths.ndim != 1 or not len(lengths) or len(differences) != len(lengths):
    raise ValueError(
      f"lengths {lengths.shape} and {len(differences)} differences must be of the same pairs, one or more."
    )
  for n, at in zip(lengths, differences, strict=True):
    if at is not None and (isinstance(at, bool) or not isinstance(at, numbers.Integral)):
      raise TypeError(f"differences holds {at!r}; they must be whole numbers, or None where no token differs.")
    if at is not None and not 0 <= at < n:
      raise ValueError(f"a difference at token {at} of a pair that has {n}.")
  different = np.array([at is not None for at in differences])
  ends = np.array([n if at is None else at + 1 for n, at in zip(lengths, differences, strict=True)])
  times = np.arange(ends.max() + 1)
  at_risk = (ends[None] >= times[:, None]).sum(1)
  events = (different[None] & (ends[None] == times[:, None])).sum(1)
  survival = np.cumprod(1 - events / at_risk)
  with np.errstate(divide="ignore", invalid="ignore"):
    greenwood = np.cumsum(events / (at_risk * (at_risk - events)))
    log = np.log(survival)
    reach = scipy.stats.norm.ppf((1 + level) / 2) * np.sqrt(greenwood) / np.abs(log)
    low, high = np.exp(log * np.exp(reach)), np.exp(log * np.exp(-reach))
  never, always = survival == 1, survival == 0
  tail = ((1 - level) / 2) ** (1 / at_risk)
  last = tail[np.argmax(always)] if always.any() else 1.0
  return Curve(
    survival=survival,
    low=np.where(never, np.where(times == 0, 1.0, tail), np.where(always, 0.0, low)),
    high=np.minimum.accumulate(np.where(never, 1.0, np.where(always, 1 - last, high))),  # S falls
    at_risk=at_risk,
  )


def predicted(differs: Any, kept: Any, lengths: Any, *, level: float = 0.95) -> Curve:
  """The curve that laws along one text of each pair give:

    S(t) = prod_{s <= t} (1 - h_s),   h_s = sum_n W_n(s-1) differs_n(s) / sum_n W_n(s-1),
    W_n(s) = prod_{u <= s} kept_n(u).

  W_n is the probability that the other text is still the same, given this one; the sums are over texts of s tokens or
  more. So it is the quantity that `measured` estimates, without the draws of the second text.

  differs: float[N, T], the probability that token t differs, given that all before it are the same. kept: float[N, T],
    that the other text has this text's own token t, given that this one has it; `1 - differs` where the text is not
    random. lengths: int[N], tokens of each text; what the arrays hold behind them is not read.
  The interval is that of resampled texts (percentiles of 1,000); NaN for a single one.
  """
  differs, kept, lengths = np.asarray(differs, np.float64), np.asarray(kept, np.float64), _whole("lengths", lengths)
  _check_level(level)
  if differs.ndim != 2 or kept.shape != differs.shape or lengths.shape != differs.shape[:1]:
    raise ValueError(
      f"differs {differs.shape} and kept {kept.shape} must be float[N, T], lengths {lengths.shape} int[N]."
    )
  if lengths.size == 0 or lengths.max() > differs.shape[1] or lengths.min() < 0:
    raise ValueError(f"lengths must be from 0 to {differs.shape[1]}, the length of the arrays, one text or more.")
  longest = int(lengths.max())
  there = np.arange(longest)[None] < lengths[:, None]
  for name, values in (("differs", differs), ("kept", kept)):
    own = values[:, :longest][there]
    if not ((own >= -ROUNDING) & (own <= 1 + ROUNDING)).all():  # NaN is not
      raise ValueError(f"{name} must hold probabilities, 0 to 1, of every token; it has {own.min()} to {own.max()}.")
  before = np.cumprod(np.where(there, kept[:, :longest], 1.0), axis=1)
  before = np.where(there, np.pad(before[:, :-1], ((0, 0), (1, 0)), constant_values=1.0), 0.0)
  lost = np.where(there, before * np.where(there, differs[:, :longest], 0.0), 0.0)

  def survival(weights: np.ndarray) -> np.ndarray:
    """Of weights[..., N]: [..., T+1]; NaN where no text of the weight is that long."""
    remain = weights @ before
    # Where none can be the same any more, the next token differs.
    hazard = np.where(remain > 0, weights @ lost, 1.0) / np.where(remain > 0, remain, 1.0)
    hazard = np.where(weights @ there.astype(np.float64) > 0, hazard, np.nan)
    return np.concatenate([np.ones((*weights.shape[:-1], 1)), np.cumprod(1 - hazard, axis=-1)], axis=-1)

  count = len(lengths)
  drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
  tails = 100 * (1 - level) / 2
  low, high = np.nanpercentile(survival(drawn.astype(np.float64)), [tails, 100 - tails], axis=0)
  if count == 1:  # resampled, it is always the same
    low, high = (np.where(np.arange(longest + 1) == 0, 1.0, np.nan) for _ in range(2))
  return Curve(
    survival=survival(np.ones(count)), low=low, high=high, at_risk=np.append(count, there.sum(0)).astype(np.int64)
  )
