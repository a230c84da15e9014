"""Whole generations against an exact law: the chi-square test that the exactness tests share."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import scipy.stats

from specjax.result import SampleResult

LEAST_P_VALUE = 1e-5  # with fixed seeds: a failure is a fault, or a chance of 1 in 100,000 a test that stays once seen


def continuations(result: SampleResult, prompt_lengths: Iterable[int]) -> list[tuple[int, ...]]:
  """The generated tokens of each row."""
  tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
  return [tuple(row[start:end].tolist()) for row, start, end in zip(tokens, prompt_lengths, lengths, strict=True)]


def p_value(observations: Iterable[Hashable], law: Mapping[Any, float]) -> float:
  """Chi-square p-value of the observations under `law`; outcomes of fewer than 5 expected are pooled.

  0 if something was observed that the law excludes.
  """
  counts = Counter(observations)
  total = sum(counts.values())
  if any(outcome not in law for outcome in counts):
    return 0.0
  observed = np.array([counts[outcome] for outcome in law], float)
  expected = total * np.array(list(law.values()))
  rare = expected < 5
  if rare.any():
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
  if len(expected) == 1:
    return 1.0
  if expected[-1] == 0:
    observed, expected = observed[:-1], expected[:-1]
  return float(scipy.stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def assert_follows(observations: Iterable[Hashable], law: Mapping[Any, float]) -> None:
  """Fails, showing the outcomes that are furthest off, unless the observations could be draws from `law`."""
  observations = list(observations)
  p = p_value(observations, law)
  if p >= LEAST_P_VALUE:
    return
  counts, total = Counter(observations), len(observations)
  rows = [
    (abs(counts[outcome] - total * law.get(outcome, 0.0)) / max(total * law.get(outcome, 0.0), 1e-9) ** 0.5, outcome)
    for outcome in {*counts, *law}
  ]
  worst = "\n".join(
    f"  {outcome}: observed {counts[outcome]}, expected {total * law.get(outcome, 0.0):.1f}"
    for _, outcome in sorted(rows, key=lambda row: -row[0])[:8]
  )
  raise AssertionError(f"p-value {p:.2e} over {total} generations; furthest off:\n{worst}")
