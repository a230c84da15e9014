"""The chi-square test and its promise of power, against simulated counts and hand-made results."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from specjax.audit import exact
from specjax.result import SampleResult, Stats

LAW = np.array([0.4, 0.3, 0.2, 0.06, 0.03, 0.01])


def result(rows, prompt_length, width=12):
  """A SampleResult whose rows generated these continuations behind a prompt of sevens."""
  tokens = np.full((len(rows), width), 7)
  for row, continuation in zip(tokens, rows, strict=True):
    row[prompt_length:] = 0
    row[prompt_length : prompt_length + len(continuation)] = continuation
  generated = np.array([len(row) for row in rows])
  count = np.zeros(len(rows))
  stats = Stats(count, generated, count, count, count, count, count)
  return SampleResult(jnp.asarray(tokens), jnp.asarray(prompt_length + generated), jnp.zeros(tokens.shape), stats)


def test_p_values_are_uniform_under_the_law():
  draws = np.random.default_rng(0).multinomial(2_000, LAW, size=4_000)
  values = [exact.fit(counts, LAW).p_value for counts in draws]
  assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3


def test_statistic_is_pearsons():
  counts = np.array([45, 25, 18, 12])
  law = np.array([0.4, 0.3, 0.2, 0.1])
  fit = exact.fit(counts, law)
  expected = scipy.stats.chisquare(counts, 100 * law)
  assert (fit.observations, fit.cells) == (100, 4)
  assert fit.chi_square == pytest.approx(expected.statistic)
  assert fit.p_value == pytest.approx(expected.pvalue)


@pytest.mark.parametrize(
  ("law", "total", "cells"),
  [
    ([0.5, 0.47, 0.02, 0.01], 100, 3 - 1),  # 2 and 1 expected make 3: too few still, so .47 joins them
    ([0.5, 0.44, 0.03, 0.03], 100, 3),  # 3 and 3 make 6
    ([0.5, 0.5], 4, 1),  # everything is rare
    ([1.0, 0.0], 50, 1),
    ([0.25] * 4, 400, 4),
  ],
)
def test_rare_outcomes_are_pooled(law, total, cells):
  fit = exact.fit(np.round(total * np.array(law)), law)
  assert fit.cells == cells
  assert fit.chi_square < 1
  assert fit.p_value > 0.5


def test_what_the_law_excludes_refutes_it():
  fit = exact.fit([50, 49, 1], [0.5, 0.5, 0.0])
  assert (fit.outside, fit.p_value) == (1, 0.0)


@pytest.mark.parametrize("level", [1e-3, 1e-9])
def test_power_is_as_promised_against_the_most_hidden_law(level):
  """The alternative of least noncentrality moves every outcome in proportion to its probability: p (1 +- 2d)."""
  law, total = np.full(32, 1 / 32), 5_000
  distance = exact.Fit(total, len(law), 0.0).detectable(level)
  signs = np.resize([1, -1], len(law))
  hidden = law * (1 + 2 * distance * signs)
  assert np.abs(hidden - law).sum() / 2 == pytest.approx(distance)
  draws = np.random.default_rng(1).multinomial(total, hidden, size=2_000)
  caught = np.mean([exact.fit(counts, law).p_value < level for counts in draws])
  assert caught == pytest.approx(exact.POWER, abs=0.012)
  # Another alternative of the same distance is caught more often.
  lumped = law.copy()
  lumped[0] += distance
  lumped[1:] -= distance / 31
  draws = np.random.default_rng(2).multinomial(total, lumped, size=200)
  assert np.mean([exact.fit(counts, law).p_value < level for counts in draws]) == 1


def test_independent_experiments_add_up():
  draws = np.random.default_rng(3).multinomial(500, LAW, size=(2_000, 3))
  values = [sum((exact.fit(c, LAW) for c in three[1:]), exact.fit(three[0], LAW)).p_value for three in draws]
  assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3
  both = exact.fit([5, 5], [0.5, 0.5]) + exact.fit([9, 1], [1.0, 0.0])
  assert (both.observations, both.outside, both.p_value) == (20, 1, 0.0)


def test_compare_counts_whole_continuations():
  """Order, length and padding tell outcomes apart; a stop within, a token 0 and an end are not the same."""
  rows = [(0, 1), (1, 0), (0,), (0, 0), (), (0, 1), (2,)]
  law = {(0, 1): 0.4, (1, 0): 0.1, (0,): 0.1, (0, 0): 0.1, (): 0.1, (2,): 0.2}
  counts = collections.Counter(rows)
  fit = exact.compare(result(rows, 3), law)
  assert fit == exact.fit([counts[outcome] for outcome in law], list(law.values()))
  counts = collections.Counter(rows[1::2])
  some = exact.compare(result(rows, 3), law, rows=slice(1, None, 2))
  assert some == exact.fit([counts[outcome] for outcome in law], list(law.values()))


@pytest.mark.parametrize("row", [(2,), (0, 1, 0), (0, 5), (3, 3)])
def test_compare_sees_outcomes_that_the_law_lacks(row):
  law = {(0, 1): 0.5, (1, 0): 0.5}
  assert exact.compare(result([(0, 1), (1, 0), row], 2), law).outside == 1
