"""Whole generations against an exact law: the tests that the exactness suite shares, and its budget of false alarms."""

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from specjax.audit import battery, exact
from specjax.audit.battery import Scenario
from specjax.audit.exact import Fit
from specjax.result import SampleResult

# A test fails where so small a p-value comes up. Seeds are fixed, so a test that passes once passes always; the level
# says how likely a sound sampler is to be called faulty when seeds or code change. The whole suite may err with a
# probability of 1e-6: a worker that makes more tests than its share of MOST fails.
LEVEL = 1e-10
MOST = 10_000
made = 0  # tests in this process


def assert_probable(p_value: float, message: Callable[[], str]) -> None:
  global made
  made += 1
  workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
  if made * workers > MOST:
    raise AssertionError(f"more than {MOST} tests at level {LEVEL}: false alarms pass 1e-6. Merge some, or lower it.")
  if p_value < LEVEL:
    raise AssertionError(f"p-value {p_value:.2e}: {message()}")


def continuations(result: SampleResult, prompt_lengths: Iterable[int]) -> list[tuple[int, ...]]:
  """The generated tokens of each row."""
  tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
  return [tuple(row[start:end].tolist()) for row, start, end in zip(tokens, prompt_lengths, lengths, strict=True)]


def p_value(observations: Iterable[Hashable], law: Mapping[Any, float]) -> float:
  """Chi-square p-value of the observations, or a Counter of them; 0 if something was observed that `law` excludes."""
  counts = Counter(observations)
  unknown = sum(count for outcome, count in counts.items() if outcome not in law)
  observed = [*(counts[outcome] for outcome in law), unknown]
  return exact.fit(observed, [*law.values(), 0.0]).p_value


def assert_follows(observations: Iterable[Hashable], law: Mapping[Any, float]) -> None:
  """Fails, showing the outcomes that are furthest off, unless the observations could be draws from `law`."""
  counts = Counter(observations)

  def furthest() -> str:
    total = counts.total()
    expected = {outcome: total * law.get(outcome, 0.0) for outcome in {*counts, *law}}
    off = sorted(expected, key=lambda o: -abs(counts[o] - expected[o]) / max(expected[o], 1e-9) ** 0.5)
    lines = (f"  {outcome}: observed {counts[outcome]}, expected {expected[outcome]:.1f}" for outcome in off[:8])
    return f"{total} generations; furthest off:\n" + "\n".join(lines)

  assert_probable(p_value(counts, law), furthest)


def assert_exact(fits: Mapping[Scenario, Fit], *, detectable: float) -> None:
  """Fails unless every scenario fits its law, and all together; and unless `detectable` would have been seen."""
  for case, fit in fits.items():
    assert_probable(fit.p_value, lambda case=case, fit=fit: f"{case.name}: {fit}")
  whole = battery.total(fits)
  assert_probable(whole.p_value, lambda: f"all scenarios together: {whole}")
  assert whole.detectable(LEVEL) < detectable, f"too few generations: {whole}"
