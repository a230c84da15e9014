"""The law of the statistics where nothing is wrong: many audits of one right engine, and sums with a known tail."""

import functools

import jax
import numpy as np
import pytest
import scipy.stats

import specjax
from specjax.audit import core, scores, stats
from specjax.audit.scores import Moments, bernoulli
from tests.audit import engines
from tests.audit.engines import draft, part, right, samples, target

REPLICATIONS, ROWS = 200, 16


@functools.cache
def replications(rule) -> list[tuple]:
  """(samples, scores) of parts of ROWS generations each, 640 tokens."""
  out = []
  for seed in range(REPLICATIONS * ROWS // engines.ROWS + 1):
    made = samples(rule, seed)
    all_scores = scores.score(
      target(), made, specjax.Warp().per_row(engines.ROWS), np.zeros(0, np.int32), draft()
    )  # fmt: skip
    for at in range(0, engines.ROWS, ROWS):
      tokens = slice(at * engines.NEW, (at + ROWS) * engines.NEW)
      out.append((part(made, slice(at, at + ROWS)), jax.tree.map(lambda leaf, own=tokens: leaf[own], all_scores)))
  return out[:REPLICATIONS]


@functools.cache
def reports(rule):
  settings = {
    "warp": specjax.Warp().per_row(ROWS), "stop_ids": np.zeros(0, np.int32), "rule": "token", "alpha": 1e-2,
    "power": 0.8, "noise": core.Noise(0.0, 1e-3, 1e-3, 1e-3, 1e-3),
  }  # fmt: skip
  return [core.judge(*one, **settings, seed=i) for i, one in enumerate(replications(rule))]


@pytest.mark.parametrize("name", ["surprise", "draft", "argmax", "repeat"])
def test_z_is_standard_normal_where_nothing_is_wrong(name):
  z = [report.test(name).z for report in reports(right)]
  assert scipy.stats.kstest(z, "norm").pvalue > 1e-3
  assert np.std(z) == pytest.approx(1, abs=0.2)


def test_rank_p_value_is_uniform_where_nothing_is_wrong():
  p = [report.test("rank").p_value for report in reports(right)]
  assert scipy.stats.kstest(p, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("name", ["acceptance", "accepted", "residual"])
def test_laws_of_the_rule_where_nothing_is_wrong(name):
  z = [test.z for report in reports(right) for test in report.rule_tests if test.name == name]
  assert len(z) == REPLICATIONS
  assert scipy.stats.kstest(z, "norm").pvalue > 1e-3


def test_false_alarms_are_as_rare_as_promised():
  """At most 1 % a report: 8 of 200 or more would have a chance of 1 in 1,000."""
  assert sum(report.ok is not True for report in reports(right)) < 8


def test_parts_are_standard_normal_too():
  z = np.array([part.z for report in reports(right) for part in report.parts if part.score == "surprise"])
  assert len(z) > 2000
  assert (np.abs(z) > 3).mean() < 0.008  # .0027, and the parts overlap
  assert np.std(z) == pytest.approx(1, abs=0.07)


def test_capital_is_no_more_than_a_game():
  """It is worth 1 on average, and reaches 1 / alpha no more often than alpha (Ville)."""
  largest = np.array([report.evidence.largest for report in reports(right)])
  assert (largest >= 1).mean() < 0.2  # at most .1, and 200 replications
  assert (largest >= 2).sum() <= 8
  assert np.mean(10.0 ** np.array([report.evidence.final for report in reports(right)])) < 1.5


def test_power_is_as_promised():
  """The share of small samples in which leniency is seen by the draft score, against the excess that it causes."""
  moments = [found.moments["draft"] for _, found in replications(engines.lenient)]
  tests = [stats.with_power([stats.add_up("draft", m, 0.0)], 0.01, 0.8, 0.0)[0] for m in moments]
  excess = np.mean([test.excess for test in tests])
  reach = [(excess - test.detectable) / test.scale * np.sqrt(test.tokens) for test in tests]
  predicted = scipy.stats.norm.cdf(np.mean(reach) + scipy.stats.norm.ppf(0.8))
  assert 0.05 < predicted < 0.95  # else the comparison would say nothing
  assert np.mean([test.p_value < 0.01 for test in tests]) == pytest.approx(predicted, abs=0.12)


def test_tolerated_drift_only_takes_power_away():
  for _, found in replications(engines.lenient)[:20]:
    m = found.moments["draft"]
    assert stats.add_up("draft", m, 0.1).p_value > stats.add_up("draft", m, 0.0).p_value
    exact, tolerant = (stats.evidence(found.moments, 1e-2, drift) for drift in (0.0, 0.1))
    assert tolerant.final < exact.final


def test_tail_of_rare_events():
  """40 tokens of probability .0025 expected in 16,000: the law of their number is Poisson's, not normal."""
  count, p = 16_000, 0.0025
  for seen in (20, 25, 60, 75):
    hits = np.zeros(count)
    hits[:seen] = 1
    m = bernoulli(hits - p, p, p * (1 - p))
    m = Moments(*(np.broadcast_to(x, count) for x in m))
    law = scipy.stats.binom(count, p)
    # Half of the probability of what was seen: the continuous law that the discrete one is compared with.
    middle = law.sf(seen - 1) - law.pmf(seen) / 2 if seen > 40 else law.cdf(seen) - law.pmf(seen) / 2
    assert stats.add_up("rare", m, 0.0).p_value == pytest.approx(2 * middle, rel=0.25)


def test_too_few_rare_events_are_no_test():
  p = np.full(100, 0.01)
  m = bernoulli(0 - p, p, p * (1 - p))
  assert not stats.is_testable(m)
  with pytest.raises(ValueError, match="too few tokens"):
    stats.add_up("rare", m, 0.0)


def test_holm():
  np.testing.assert_allclose(stats.holm([0.01, 0.04, 0.03, 0.5]), [0.04, 0.09, 0.09, 0.5])
  assert stats.holm([]).shape == (0,)


def test_bets_have_mean_one_and_never_lose_all():
  """Exactly, for a law on three tokens: the mean growth factor is 1, and less where drift is tolerated."""
  p, f = np.array([0.7, 0.2, 0.1]), np.array([0.3, 1.6, 12.0])
  mean = (p * f).sum()
  variance = np.full(3, (p * (f - mean) ** 2).sum())
  m = Moments(f - mean, variance, np.zeros(3), np.zeros(3), np.full(3, (f - mean).min()), np.full(3, (f - mean).max()))
  growth = np.exp(stats._bets(m, 0.0))
  np.testing.assert_allclose(growth @ p, 1.0)
  assert growth.min() >= 1 - stats.LARGEST_LOSS - 1e-9
  assert (np.exp(stats._bets(m, 0.05)) @ p < 1.0).all()


def test_evidence_does_not_depend_on_how_it_is_cut(monkeypatch):
  _, found = replications(right)[0]
  whole = stats.evidence(found.moments, 1e-2)
  monkeypatch.setattr(stats, "_BLOCK", 37)
  cut = stats.evidence(found.moments, 1e-2)
  assert cut.final == pytest.approx(whole.final)
  assert cut.largest == pytest.approx(whole.largest)
