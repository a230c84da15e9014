"""Whole generations against an exact law: counts, a chi-square test, and the smallest deviation it would have seen.

A test of marginals or of single rounds misses faults that only correlate tokens; here an outcome is everything that a
row generated. The exact law comes from enumeration (`specjax.models.tabular.law`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.optimize
import scipy.stats
from jax.typing import ArrayLike

from specjax.result import SampleResult

Outcome = tuple[int, ...]
LEAST_EXPECTED = 5.0  # outcomes expected less often are counted as one: below that chi-square's law does not hold
POWER = 0.99


@dataclasses.dataclass(frozen=True)
class Fit:
  """How well counts fit a law.

  observations: generations counted. cells: outcomes compared, rare ones pooled.
  chi_square: Pearson's statistic, with `cells - 1` degrees of freedom.
  outside: observations that the law excludes; a single one refutes it.
  """

  observations: int
  cells: int
  chi_square: float
  outside: int = 0

  @property
  def p_value(self) -> float:
    """Probability of so large a statistic under the law."""
    if self.outside:
      return 0.0
    return float(scipy.stats.chi2.sf(self.chi_square, self.cells - 1)) if self.cells > 1 else 1.0

  def detectable(self, level: float) -> float:
    """The least total variation that a test at `level` would have seen with probability 0.99, whatever its shape.

    A law q at distance d = sum |q - p| / 2 has noncentrality n sum (q - p)^2 / p >= 4 n d^2 (Cauchy-Schwarz), with
    equality for the most hidden one. Distances are of the pooled outcomes. 1 where nothing was to be seen.
    """
    if self.cells < 2 or not self.observations:
      return 1.0
    return min(1.0, float(np.sqrt(noncentrality(self.cells - 1, level, POWER) / (4 * self.observations))))

  def __add__(self, other: "Fit") -> "Fit":
    """Two independent experiments as one: statistics and degrees of freedom add up."""
    return Fit(
      self.observations + other.observations,
      self.cells + other.cells - 1,
      self.chi_square + other.chi_square,
      self.outside + other.outside,
    )


@functools.cache
def noncentrality(freedom: int, level: float, power: float) -> float:
  """Of the chi-square law whose part beyond the critical value at `level` is `power`."""
  critical = scipy.stats.chi2.isf(level, freedom)
  missed = lambda x: scipy.stats.ncx2.cdf(critical, freedom, x) - (1 - power)  # noqa: E731
  return scipy.optimize.root_scalar(missed, bracket=(1e-9, 4 * critical + 100)).root


def fit(observed: ArrayLike, probabilities: ArrayLike) -> Fit:
  """Pearson's chi-square of counts observed[K] against probabilities[K], which add up to 1.

  Outcomes expected fewer than five times are pooled, with the least likely other one if they make fewer than five.
  """
  observed, expected = np.asarray(observed, float), np.asarray(probabilities, float)
  total = observed.sum()
  possible = expected > 0
  outside = int(observed[~possible].sum())
  observed, expected = observed[possible], total * expected[possible]
  order = np.argsort(expected)
  observed, expected = observed[order], expected[order]
  # The shortest prefix that holds all rare outcomes and is itself expected often enough.
  rare = int(np.searchsorted(expected, LEAST_EXPECTED))
  if rare:
    rare = min(max(rare, int(np.searchsorted(np.cumsum(expected), LEAST_EXPECTED)) + 1), len(expected))
    observed = np.append(observed[:rare].sum(), observed[rare:])
    expected = np.append(expected[:rare].sum(), expected[rare:])
  statistic = float(((observed - expected) ** 2 / expected).sum()) if len(expected) else 0.0
  return Fit(int(total), max(len(expected), 1), statistic, outside)


def compare(result: SampleResult, law: Mapping[Outcome, float], *, rows: slice = slice(None)) -> Fit:
  """Fits what `rows` of a result generated to a law over continuations, such as `tabular.law` returns."""
  codes, size = _codes(result, max(map(len, law)), max(map(max, filter(None, law)), default=0), rows)
  base = size + 1
  keys = np.array([_code(outcome, base) for outcome in law])
  seen, counts = np.unique(codes, return_counts=True)
  order = np.argsort(keys)
  at = order[np.minimum(np.searchsorted(keys[order], seen), len(keys) - 1)]
  known = keys[at] == seen
  observed = np.zeros(len(keys) + 1)
  observed[at[known]] = counts[known]
  observed[-1] = counts[~known].sum()  # outcomes of probability 0
  return fit(observed, np.append(list(law.values()), 0.0))


def _codes(result: SampleResult, length: int, largest: int, rows: slice) -> tuple[np.ndarray, int]:
  """One number for each row's continuation, digits base V + 1, and V; a continuation that is too long gets its own."""
  tokens, ends = np.asarray(result.tokens)[rows], np.asarray(result.lengths)[rows]
  starts = ends - np.asarray(result.stats.generated)[rows]
  width = max(length, int((ends - starts).max(initial=0)))
  index = starts[:, None] + np.arange(width)
  inside = index < ends[:, None]
  generated = np.where(inside, np.take_along_axis(tokens, np.minimum(index, tokens.shape[1] - 1), axis=1), -1)
  size = max(largest, int(generated.max(initial=0))) + 1
  powers = (size + 1) ** np.arange(width, dtype=np.int64)
  return ((generated + 1) * powers).sum(-1), size


def _code(outcome: Sequence[int], base: int) -> int:
  return sum((token + 1) * base**i for i, token in enumerate(outcome))
