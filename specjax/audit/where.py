"""Where in the samples a deviation lies: by what a token was in its round, row, position, context and time.

Only groups that the past decides are formed: inside one of them every score keeps its mean under the null. That a draft
was accepted is no such group: accepted tokens follow norm(min(p, q)) and residual ones norm(max(p - q, 0)), neither of
which is p, so the two are put together as "tested".
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import scipy.stats

from specjax.audit import stats
from specjax.audit.samples import Samples
from specjax.audit.scores import Moments

MOST_ROWS = 16  # rows shown one by one; more are put in bins
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
  adjusted: float = math.nan


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
  counts = np.array([len(tokens) for tokens in samples.tokens])
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
  if samples.rows is not None:
    rows = samples.rows[generation]
    values = np.unique(samples.rows)
    edges = values if len(values) <= MOST_ROWS else [0, 1, *np.quantile(values[1:], [0.25, 0.5, 0.75]).astype(int)]
    out.append(_bins("row", rows, edges))
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


def parts(partitions: Sequence[Grouping], moments: Mapping[str, Moments], drift: float) -> list[Part]:
  """Every score in every group that has enough tokens for it, with Holm's p-values over all."""
  out = []
  for grouping in partitions:
    for code, group in enumerate(grouping.names):
      inside = grouping.codes == code
      for score, all_moments in moments.items():
        own = Moments(*(x[inside] for x in all_moments))
        if inside.any() and stats.is_testable(own):
          test = stats.add_up(score, own, drift)
          out.append(Part(grouping.name, group, score, test.tokens, test.z, test.p_value, test.excess))
  adjusted = stats.holm([part.p_value for part in out])
  return [dataclasses.replace(part, adjusted=float(p)) for part, p in zip(out, adjusted, strict=True)]


def sharpest_contrast(
  partitions: Sequence[Grouping], moments: Mapping[str, Moments], alpha: float, drift: float
) -> Contrast | None:
  """The most significant contrast at level alpha, or None.

  Deviations are compared as sum d / sum v, which for a law that is tilted along the score is the same in all groups.
  """
  tried, found = 0, []
  for grouping in partitions:
    codes = grouping.codes
    for score, m in moments.items():
      known = codes >= 0
      total, variance, third, allowed = (
        np.bincount(codes[known], x[known].astype(np.float64), len(grouping.names))
        for x in (m.deviation, m.variance, m.third, drift * np.sqrt(m.variance))
      )
      for inside in _subsets(grouping):
        s_in, v_in, third_in, allowed_in = (x[inside].sum() for x in (total, variance, third, allowed))
        s_out, v_out, third_out, allowed_out = (x[~inside].sum() for x in (total, variance, third, allowed))
        if min(v_in, v_out) <= 0:
          continue
        tried += 1
        slack = allowed_in / v_in + allowed_out / v_out
        difference = max(abs(s_in / v_in - s_out / v_out) - slack, 0.0) / math.sqrt(1 / v_in + 1 / v_out)
        z_in, z_out = stats.signed_z(s_in, v_in, third_in), stats.signed_z(s_out, v_out, third_out)
        is_clean = max(abs(s_out) - allowed_out, 0.0) / math.sqrt(v_out) < CLEAN_Z
        if is_clean and abs(z_in) > abs(z_out):
          found.append((difference, grouping, inside, score, z_in, z_out))
  if not found:
    return None
  difference, grouping, inside, score, z_in, z_out = max(found, key=lambda entry: entry[0])
  p_value = min(1.0, 2 * tried * float(scipy.stats.norm.sf(difference)))
  if p_value > alpha:
    return None
  names = tuple(name for name, is_in in zip(grouping.names, inside, strict=True) if is_in)
  return Contrast(grouping.name, names, score, z_in, z_out, p_value)


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
