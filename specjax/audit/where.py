"""Where in the samples a deviation lies: by what a token was in its round, and the one before it, row, position,
context and time.

Only groups that the past decides are formed: inside one of them every score keeps its mean under the null. That a draft
was accepted is no such group: accepted tokens follow norm(min(p, q)) and residual ones norm(max(p - q, 0)), neither of
which is p, so the two are put together as "tested".
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.audit import stats
from specjax.audit.samples import LABELS, Samples
from specjax.audit.scores import Moments

MOST_ROWS = 64  # rows tested one by one; of more the first and the last, and bins between them
CLEAN_Z = 2.5  # of a part of the samples that shows no sign


@dataclasses.dataclass(frozen=True)
class Grouping:
  """A partition of the tokens. names: of the groups; codes: int[n], the group of each token, -1 for none.
  ordered: whether "all groups from here on" means something."""

  name: str
  names: tuple[str, ...]
  codes: np.ndarray
  ordered: bool


@dataclasses.dataclass(frozen=True)
class Part:
  """One score in one group. z and p_value as in `stats.Test`; adjusted: Holm's over all parts of the report."""

  grouping: str
  group: str
  score: str
  tokens: int
  z: float
  p_value: float
  excess: float
  adjusted: float


@dataclasses.dataclass(frozen=True)
class Contrast:
  """Some groups of a grouping that deviate while the others do not, and differ from them significantly.

  z_inside, z_outside: of the score there. p_value: of the difference, corrected for the contrasts that were tried.
  """

  grouping: str
  groups: tuple[str, ...]
  score: str
  z_inside: float
  z_outside: float
  p_value: float


def groupings(samples: Samples) -> list[Grouping]:
  """The partitions of all generated tokens that have at least two groups."""
  counts = samples.counts
  generation = np.repeat(np.arange(len(counts)), counts)
  position = np.concatenate([np.arange(count) for count in counts])
  context = position + np.array([len(prompt) for prompt in samples.prompts])[generation]
  out = [
    _bins("position", position, [0, 1, 4, 16, 64, 256, 1024, 4096]),
    _bins("context", context, [0, 32, 64, 128, 256, 512, 1024, 2048, 4096]),
  ]
  if samples.labels is not None:
    labels = np.concatenate(samples.labels)
    codes = np.select([labels == "bonus", labels != ""], [1, 0], -1)
    out.append(Grouping("label", ("tested (accepted or residual)", "bonus"), codes, ordered=False))
    before = np.where(position > 0, np.roll(labels, 1), "")
    codes = np.select([before == label for label in LABELS], range(len(LABELS)), -1)
    out.append(Grouping("after", LABELS, codes, ordered=False))
  if samples.rows is not None:
    rows = samples.rows[generation]
    values = np.unique(samples.rows)
    if len(values) > MOST_ROWS:
      values = np.concatenate([values[[0, 1, -1]], np.quantile(values[1:], np.linspace(0, 1, 17)[1:-1]).astype(int)])
    out.append(_bins("row", rows, values))
  quarter = 4 * np.arange(len(generation)) // max(len(generation), 1)
  out.append(Grouping("time", ("1st quarter", "2nd quarter", "3rd quarter", "4th quarter"), quarter, ordered=True))
  return [g for g in out if len(np.unique(g.codes[g.codes >= 0])) > 1]


def _bins(name: str, values: np.ndarray, edges: Sequence[int] | np.ndarray) -> Grouping:
  """Groups from one edge to before the next; edges that separate nothing are left out."""
  edges = np.unique(np.asarray(edges))
  codes = np.searchsorted(edges, values, side="right") - 1
  used = np.unique(codes)
  codes = np.searchsorted(used, codes)
  ends = [(values[codes == code].min(), values[codes == code].max()) for code in range(len(used))]
  names = [f"{a}" if a == b else f"{a} to {b}" for a, b in ends]
  return Grouping(name, tuple(names), codes, ordered=True)


class _Sums(NamedTuple):
  """Of one score, an entry a group. allowed: of drift."""

  count: np.ndarray
  total: np.ndarray
  variance: np.ndarray
  third: np.ndarray
  fourth: np.ndarray
  allowed: np.ndarray


def _sums(grouping: Grouping, m: Moments, drift: float) -> _Sums:
  known = grouping.codes >= 0
  codes, size = grouping.codes[known], len(grouping.names)
  columns = (m.deviation, m.variance, m.third, m.fourth, drift * np.sqrt(m.variance))
  return _Sums(np.bincount(codes, minlength=size), *(np.bincount(codes, x[known], size) for x in columns))


def parts(partitions: Sequence[Grouping], moments: Mapping[str, Moments], drift: float) -> list[Part]:
  """Every score in every group that has enough tokens for it, with Holm's p-values over all."""
  out = []
  for grouping in partitions:
    columns = {score: _sums(grouping, m, drift) for score, m in moments.items()}
    for score, sums in columns.items():
      for code in np.flatnonzero(stats.known(sums.variance, sums.third, sums.fourth)):
        own = _Sums(*(x[code] for x in sums))
        name = grouping.names[code]
        out.append((grouping.name, name, score, int(own.count), own.total / own.count, _tested(own)))
  if not out:
    return []
  z, p = stats.z_and_p(*np.array([own for *_, own in out]).T)
  return [
    Part(grouping, group, score, count, float(z[i]), float(p[i]), float(excess), float(adjusted))
    for i, ((grouping, group, score, count, excess, _), adjusted) in enumerate(zip(out, stats.holm(p), strict=True))
  ]


def sharpest_contrast(
  partitions: Sequence[Grouping], moments: Mapping[str, Moments], alpha: float, drift: float
) -> Contrast | None:
  """The most significant contrast at level alpha, or None.

  Deviations are compared as sum d / sum v, which for a law that is tilted along the score is the same in all groups.
  """
  tried, best = 0, None
  for grouping in partitions:
    for score, m in moments.items():
      sums = _sums(grouping, m, drift)
      for inside in _subsets(grouping):
        a, b = (_Sums(*(x[side].sum() for x in sums)) for side in (inside, ~inside))
        if min(a.variance, b.variance) <= 0:
          continue
        apart = _difference(a, b)
        if not stats.known(apart.variance, apart.third, apart.fourth):
          continue
        tried += 1
        difference = max(abs(apart.total) - apart.allowed, 0.0) / math.sqrt(apart.variance)
        is_clean = max(abs(b.total) - b.allowed, 0.0) < CLEAN_Z * math.sqrt(b.variance)
        is_worse = abs(a.total) / math.sqrt(a.variance) > abs(b.total) / math.sqrt(b.variance)
        if is_clean and is_worse and (best is None or difference > best[0]):
          best = (difference, grouping, inside, score, a, b)
  if best is None:
    return None
  _, grouping, inside, score, a, b = best
  p_value = min(1.0, tried * float(stats.z_and_p(*_tested(_difference(a, b)))[1]))
  if p_value > alpha:
    return None
  names = tuple(name for name, is_in in zip(grouping.names, inside, strict=True) if is_in)
  z, _ = stats.z_and_p(*np.array([_tested(a), _tested(b)]).T)
  return Contrast(grouping.name, names, score, float(z[0]), float(z[1]), p_value)


def _difference(a: _Sums, b: _Sums) -> _Sums:
  """Of total / variance: the cumulants of its difference."""
  return _Sums(
    count=a.count + b.count,
    total=a.total / a.variance - b.total / b.variance,
    variance=1 / a.variance + 1 / b.variance,
    third=a.third / a.variance**3 - b.third / b.variance**3,
    fourth=a.fourth / a.variance**4 + b.fourth / b.variance**4,
    allowed=a.allowed / a.variance + b.allowed / b.variance,
  )


def _tested(sums: _Sums) -> tuple[Any, ...]:
  """What `stats.z_and_p` takes."""
  return sums.total, sums.variance, sums.third, sums.allowed


def _subsets(grouping: Grouping) -> Iterator[np.ndarray]:
  """Each group alone; where groups are ordered, also all up to one, and all from one on."""
  count = len(grouping.names)
  index, seen = np.arange(count), set()
  candidates = [index == i for i in range(count)]
  if grouping.ordered:
    candidates += [side for i in range(1, count) for side in (index < i, index >= i)]
  for inside in candidates:
    if 0 < inside.sum() < count and inside.tobytes() not in seen:
      seen.add(inside.tobytes())
      yield inside
