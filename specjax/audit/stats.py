"""From deviations to evidence: z of a sum of martingale differences, Holm's correction, an e-process, and power.

Plain numpy and scipy over arrays with an entry a token; what the entries mean is for others to know.

With d_t = f_t(x_t) - E_p f_t and v_t = Var_p f_t given the past, sum d_t / sqrt(sum v_t) is asymptotically normal under
the null (martingale central limit theorem). Rare events converge slowly, so p-values come from a Pearson type III law
with the skewness that the exact third moments give (a normal law where it is 0, near a Poisson one for rare events).
Where a few tokens decide, on both sides perhaps, the fourth moments say so, and nothing is tested.

`drift` is the null's tolerance: E d_t may be off by up to drift * sqrt(v_t) a token, on average.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import scipy.stats
from jax.typing import ArrayLike

from specjax.audit.exact import fit, noncentrality
from specjax.audit.scores import Moments

MOST_SKEW = 0.5  # beyond it a sum has too few tokens that matter
MOST_KURTOSIS = 0.06  # beyond that of a Pearson type III law of its skewness: at z = 4.5 it doubles the tail
BETS = (0.03, 0.1, 0.3)
LARGEST_LOSS = 0.5  # of the capital, by one token
BINS = 20
RANK = "rank"  # the name of the test of uniformity
_BLOCK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Test:
  """One score, added up.

  tokens: how many. z: the sum in standard deviations under the null without tolerance, after the skew is accounted for.
  p_value: with the tolerance, two-sided; adjusted: Holm's, over the tests it was made with.
  excess: mean of f(x) - E_p f a token, in the score's units, with interval (low, high) of 95 %.
  scale: root mean variance of the score, in its units. span: the largest max f - min f of any token.
  tv: total variation distance that p and the engine's law have at least, on average over tokens, at 97.5 % confidence:
    a law that is off by TV moves the mean of f by at most span * TV.
  divergence: the same for the chi-square divergence; by Cauchy-Schwarz the mean moves by at most sqrt(variance * chi2).
  detectable: the excess that would be found with the stated power. detectable_exactly: without tolerance.
  """

  name: str
  tokens: int
  z: float
  p_value: float
  excess: float
  low: float
  high: float
  scale: float
  span: float
  tv: float
  divergence: float
  detectable: float = math.nan
  detectable_exactly: float = math.nan
  adjusted: float = math.nan


@dataclasses.dataclass(frozen=True)
class Evidence:
  """Capital of bets against the null, 1 at first; under it, it ever reaches 1 / alpha with probability alpha at most.

  largest, final: log10 of the capital. crossed: tokens after which it reached 1 / alpha; None if it never did.
  tokens, path: log10 capital along the stream, thinned, the largest of each stretch.
  """

  largest: float
  final: float
  crossed: int | None
  tokens: np.ndarray
  path: np.ndarray


def z_and_p(total: ArrayLike, variance: ArrayLike, third: ArrayLike, allowed: ArrayLike = 0.0) -> tuple[Any, Any]:
  """For sums with mean 0 and these moments: z without tolerance and the two-sided p-value with it, elementwise.

  z is the normal quantile of the sum's tail, or total / sqrt(variance) where the tail is below what floats hold.
  """
  total, variance, third = (np.asarray(x, np.float64) for x in (total, variance, third))
  sign, spread = np.where(total < 0, -1.0, 1.0), np.sqrt(variance)
  skew = sign * third / variance**1.5  # of the sum, mirrored so that it lies above 0
  exactly = scipy.stats.pearson3.sf(np.abs(total) / spread, skew)
  tolerant = scipy.stats.pearson3.sf(np.maximum(np.abs(total) - allowed, 0.0) / spread, skew)
  with np.errstate(divide="ignore"):
    z = np.where(exactly > 0, scipy.stats.norm.isf(exactly), np.abs(total) / spread)
  return sign * z, np.minimum(1.0, 2 * tolerant)


def weighted(moments: Moments, weights: np.ndarray) -> Moments:
  """Of the score times weights[n], which the past decides."""
  low, high = weights * moments.low, weights * moments.high
  return Moments(
    deviation=weights * moments.deviation,
    variance=weights**2 * moments.variance,
    third=weights**3 * moments.third,
    fourth=weights**4 * moments.fourth,
    low=np.minimum(low, high),
    high=np.maximum(low, high),
  )


def is_testable(moments: Moments) -> bool:
  """Whether the sum has enough tokens that matter for its law to be known."""
  return bool(known(*(x.sum(dtype=np.float64) for x in (moments.variance, moments.third, moments.fourth))))


def known(variance: Any, third: Any, fourth: Any) -> Any:
  """The same of a sum's cumulants, elementwise."""
  safe = np.where(np.asarray(variance) > 0, variance, 1.0)
  skew, kurtosis = third / safe**1.5, fourth / safe**2
  return (np.asarray(variance) > 0) & (np.abs(skew) <= MOST_SKEW) & (kurtosis - 1.5 * skew**2 <= MOST_KURTOSIS)


def add_up(name: str, moments: Moments, drift: float) -> Test:
  """The test of one score over all tokens given; see `Test`. ValueError unless `is_testable`."""
  if not is_testable(moments):
    raise ValueError(f"{name}: too few tokens, or too little freedom in the law, to test.")
  count = len(moments.deviation)
  total, variance, third = (float(x.sum(dtype=np.float64)) for x in moments[:3])
  spread = math.sqrt(variance)
  allowed = drift * float(np.sqrt(moments.variance).sum(dtype=np.float64))
  z, p_value = z_and_p(total, variance, third, allowed)
  half_width = 1.96 * spread
  span = float((moments.high - moments.low).max())
  surely = max(abs(total) - half_width, 0.0)
  return Test(
    name=name,
    tokens=count,
    z=float(z),
    p_value=float(p_value),
    excess=total / count,
    low=(total - half_width) / count,
    high=(total + half_width) / count,
    scale=spread / math.sqrt(count),
    span=span,
    tv=surely / span / count,
    divergence=surely**2 / variance / count,
  )


def with_power(tests: Sequence[Test], alpha: float, power: float, drift: float) -> list[Test]:
  """The tests with Holm's p-values and detectable excesses; the level of each is alpha / number of tests."""
  adjusted = holm([t.p_value for t in tests])
  level = alpha / max(len(tests), 1)
  normal = float(scipy.stats.norm.isf(level / 2) + scipy.stats.norm.ppf(power))
  out = []
  for t, p in zip(tests, adjusted, strict=True):
    # 2 TV is at most the root of the noncentrality a token.
    reach = math.sqrt(noncentrality(BINS - 1, level, power)) if t.name == RANK else normal
    exactly = t.scale * reach / math.sqrt(t.tokens)
    out.append(
      dataclasses.replace(t, adjusted=float(p), detectable=exactly + t.scale * drift, detectable_exactly=exactly)
    )
  return out


def holm(p_values: Sequence[float]) -> np.ndarray:
  """Holm's adjusted p-values: all that are <= alpha are significant together, with false alarms at most alpha."""
  p = np.asarray(p_values, float)
  order = np.argsort(p)
  stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
  out = np.empty_like(p)
  out[order] = np.minimum(stepped, 1.0)
  return out


def uniform_test(above: np.ndarray, tied: np.ndarray, seed: int, drift: float = 0.0) -> Test | None:
  """Chi-square of the randomised probability integral transform over BINS bins, or None if there are too few tokens.

  Tokens are ordered by probability; mass of the more likely ones + U * mass of those that tie is uniform and
  independent of the past under the null. U is drawn with a fixed seed. `z` is the normal quantile of the p-value
  without tolerance; `excess` is the Kolmogorov-Smirnov distance, a lower bound on the total variation distance once
  what chance makes of it is taken away (`low`, `tv`).
  """
  count = len(above)
  if count < 5 * BINS:
    return None
  u = np.clip(above + np.random.default_rng(seed).random(count) * tied, 0.0, 1.0)
  observed = np.bincount(np.minimum((u * BINS).astype(int), BINS - 1), minlength=BINS)
  statistic = fit(observed, np.full(BINS, 1 / BINS)).chi_square
  exact = float(scipy.stats.chi2.sf(statistic, BINS - 1))
  allowed = count * drift**2
  tolerant = float(scipy.stats.ncx2.sf(statistic, BINS - 1, allowed)) if allowed > 0 else exact
  distance = float(scipy.stats.kstest(u, "uniform").statistic)
  surely = max(distance - 1.48 / math.sqrt(count), 0.0)
  z = float(scipy.stats.norm.isf(exact)) if exact > 0 else math.sqrt(statistic)
  return Test(
    name=RANK, tokens=count, z=z, p_value=min(tolerant, 1.0), excess=distance, low=surely, high=math.nan, scale=0.5,
    span=1.0, tv=surely, divergence=max(statistic - float(scipy.stats.chi2.isf(0.025, BINS - 1)), 0.0) / count,
  )  # fmt: skip


def evidence(moments: Mapping[str, Moments], alpha: float, drift: float = 0.0) -> Evidence:
  """The capital of bets on every score in both directions, a few sizes each, mixed with equal weights.

  Each bet multiplies its capital by 1 + l (f(x) - E_p f) - |l| drift sqrt(v), with l cut so that no token costs more
  than half of it. The mean of that is at most 1 under the null, so capital can be looked at after any token (Ville's
  inequality). The order of tokens is the stream's.
  """
  names = list(moments)
  count = len(moments[names[0]].deviation)
  capital = np.zeros((len(names), 2 * len(BETS)))
  ends, path = [0], [0.0]
  crossed: int | None = None
  final = 0.0
  stretch = max(1, count // 400)
  block_size = max(_BLOCK // stretch, 1) * stretch
  for at in range(0, count, block_size):
    block = slice(at, min(at + block_size, count))
    steps = [_bets(Moments(*(np.asarray(x[block], np.float64) for x in moments[name])), drift) for name in names]
    running = capital[..., None] + np.cumsum(np.stack(steps), axis=-1)  # [scores, bets, tokens]
    flat = running.reshape(-1, running.shape[-1])
    top = flat.max(0)
    mixed = (top + np.log(np.exp(flat - top).mean(0))) / math.log(10)
    if crossed is None and (over := np.flatnonzero(mixed >= -math.log10(alpha))).size:
      crossed = at + int(over[0]) + 1
    for piece in range(0, len(mixed), stretch):
      ends.append(at + min(piece + stretch, len(mixed)))
      path.append(float(mixed[piece : piece + stretch].max()))
    capital, final = running[..., -1], float(mixed[-1])
  return Evidence(max(path), final, crossed, np.array(ends), np.array(path))


def _bets(moments: Moments, drift: float) -> np.ndarray:
  """Log growth of each bet at each token, [bets, tokens]."""
  cost = drift * np.sqrt(moments.variance)
  growth = []
  for size in BETS:
    for sign, worst in ((1.0, -moments.low), (-1.0, moments.high)):
      bet = np.minimum(size, LARGEST_LOSS / np.maximum(worst + cost, 1e-12))
      growth.append(np.log1p(bet * (sign * moments.deviation - cost)))
  return np.stack(growth)


def too_many(count: int, expected: float) -> float:
  """P-value of that many events where about `expected` are allowed: a Poisson tail."""
  return float(scipy.stats.poisson.sf(count - 1, expected)) if count else 1.0
