"""The closed forms against the paper's printed tables (arXiv 2211.17192), exact fractions, and their limits."""

import math
from fractions import Fraction

import numpy as np
import pytest

from specjax.plan.theory import (
  best_gamma,
  expected_tokens,
  expected_tokens_from_counts,
  minimum_gain,
  operations_factor,
  speedup,
)

# Table 1, c = c_hat = 0: alpha, gamma, operations, speed.
TABLE_1 = [
  (0.6, 2, "1.53", "1.96"),
  (0.7, 3, "1.58", "2.53"),
  (0.8, 2, "1.23", "2.44"),
  (0.8, 5, "1.63", "3.69"),
  (0.9, 2, "1.11", "2.71"),
  (0.9, 10, "1.60", "6.86"),
]

# Tables 2 and 4: gamma, alpha, c and the expected speed as printed; then the speed at exactly these alpha and c.
TABLES_2_AND_4 = [
  (7, 0.75, 0.02, 3.2, "3.157"),
  (7, 0.80, 0.04, 3.3, "3.251"),
  (7, 0.82, 0.11, 2.5, "2.497"),
  (7, 0.62, 0.02, 2.3, "2.258"),
  (5, 0.68, 0.04, 2.4, "2.347"),
  (3, 0.71, 0.11, 2.0, "1.934"),
  (5, 0.65, 0.02, 2.4, "2.402"),
  (5, 0.73, 0.04, 2.6, "2.619"),
  (3, 0.74, 0.11, 2.0, "2.025"),
  (5, 0.53, 0.02, 1.9, "1.891"),
  (3, 0.55, 0.04, 1.8, "1.803"),
  (3, 0.56, 0.11, 1.6, "1.541"),
]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1(alpha: float, gamma: int, operations: str, speed: str) -> None:
  assert f"{operations_factor(alpha, gamma, 0.0):.2f}" == operations
  assert f"{speedup(alpha, gamma, 0.0):.2f}" == speed


@pytest.mark.parametrize(("gamma", "alpha", "c", "printed", "recomputed"), TABLES_2_AND_4)
def test_tables_2_and_4(gamma: int, alpha: float, c: float, printed: float, recomputed: str) -> None:
  assert f"{speedup(alpha, gamma, c):.3f}" == recomputed
  # alpha and c are printed to two digits, the speed to one: some values that round to these must agree with it.
  lowest, highest = speedup(alpha - 0.005, gamma, c + 0.005), speedup(alpha + 0.005, gamma, c - 0.005)
  assert lowest - 0.05 <= printed <= highest + 0.05


@pytest.mark.parametrize("gamma", [0, 1, 2, 7, 63])
@pytest.mark.parametrize("alpha", [0.0, 1e-12, 0.3, 0.5, 0.9, 1 - 1e-6, 1 - 1e-12, 1 - 2**-53, 1.0])
def test_expected_tokens_is_the_geometric_sum(alpha: float, gamma: int) -> None:
  exact = sum(Fraction(alpha) ** i for i in range(gamma + 1))
  assert expected_tokens(alpha, gamma) == pytest.approx(float(exact), rel=1e-14)


def test_nothing_drafted_costs_and_gains_nothing() -> None:
  assert speedup(0.7, 0, 0.3) == operations_factor(0.7, 0, 0.3) == 1.0
  assert speedup(0.7, 0, 0.3, v=1.25) == pytest.approx(0.8)


def test_by_hand() -> None:
  """alpha = 1/2, gamma = 2: 1 + 1/2 + 1/4 tokens, for two drafts of 0.1 and a pass of 1.2."""
  assert expected_tokens(0.5, 2) == 1.75
  assert speedup(0.5, 2, 0.1, v=1.2) == pytest.approx(1.75 / 1.4)
  assert operations_factor(0.5, 2, 0.1) == pytest.approx(3.2 / 1.75)
  assert minimum_gain(0.5, 0.1) == pytest.approx(1.5 / 1.1)


def test_arrays_broadcast() -> None:
  alphas, gammas = np.array([[0.0], [0.5], [1.0]]), np.array([0, 1, 3])
  values = speedup(alphas, gammas, 0.1, v=np.array([1.0, 1.5, 2.0]))
  assert values.shape == (3, 3)
  for row, alpha in zip(values, [0.0, 0.5, 1.0], strict=True):
    singles = [speedup(alpha, gamma, 0.1, v) for gamma, v in [(0, 1.0), (1, 1.5), (3, 2.0)]]
    np.testing.assert_array_equal(row, singles)
  assert isinstance(expected_tokens(0.5, 2), float)


def test_counts_with_one_acceptance_probability_give_the_closed_form() -> None:
  """1000 rounds of 3 drafts at alpha = 0.5 exactly, split over two rows in unequal parts."""
  tested, accepted = np.array([[600, 350, 100], [400, 150, 150]]), np.array([[350, 100, 60], [150, 150, 65]])
  assert expected_tokens_from_counts(tested.sum(0), accepted.sum(0)) == expected_tokens(0.5, 3)
  assert expected_tokens_from_counts(tested, accepted) == expected_tokens(0.5, 3)


def test_counts_of_rounds_cut_short() -> None:
  """Half of the rounds drafted one token only: position 2 counts where it was reached, at its own rate."""
  assert expected_tokens_from_counts([100, 40], [80, 30]) == pytest.approx(1 + 0.8 + 0.8 * 0.75)


def test_counts_of_positions_never_tested() -> None:
  assert expected_tokens_from_counts([100, 0, 0], [0, 0, 0]) == 1.0
  assert expected_tokens_from_counts([100, 0], [70, 0]) == 1.7
  assert expected_tokens_from_counts([], []) == 1.0


def test_best_gamma() -> None:
  speeds = [speedup(0.8, gamma, 0.05) for gamma in range(33)]
  assert best_gamma(0.8, 0.05) == speeds.index(max(speeds)) == 8
  assert best_gamma(0.8, 0.05, max_gamma=4) == 4
  assert best_gamma(0.05, 0.2) == 0
  assert best_gamma(0.0, 0.0) == 0
  assert best_gamma(1.0, 0.5, max_gamma=10) == 10


def test_best_gamma_weighs_the_verify_pass() -> None:
  """A pass that is flat up to 4 tokens and then grows makes gamma = 3 the best; T = gamma + 1, not gamma."""
  flat_to_4 = [1.0, 1.0, 1.0, 1.0, 3.0, 4.0, 5.0]
  assert best_gamma(0.8, 0.0, flat_to_4, max_gamma=6) == 3
  assert best_gamma(0.8, 0.0, lambda width: flat_to_4[width - 1], max_gamma=6) == 3
  assert best_gamma(0.8, 0.0, float, max_gamma=6) == 0  # T tokens cost T passes: nothing to gain


@pytest.mark.parametrize("c", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.6, 0.95, 1.0])
def test_some_gamma_reaches_the_minimum_gain(alpha: float, c: float) -> None:
  best = speedup(alpha, best_gamma(alpha, c), c)
  assert best >= minimum_gain(alpha, c) >= 1.0
  assert minimum_gain(alpha, c) == (pytest.approx(speedup(alpha, 1, c)) if alpha > c else 1.0)


@pytest.mark.parametrize("alpha", [-0.1, 1.0001, math.nan, [0.5, 2.0]])
def test_alpha_must_be_a_probability(alpha: float) -> None:
  for function in (expected_tokens, lambda a, gamma: speedup(a, gamma, 0.0), lambda a, gamma: minimum_gain(a, 0.0)):
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]; given"):
      function(alpha, 2)


@pytest.mark.parametrize("gamma", [-1, 2.5, math.nan, math.inf, [1, -3]])
def test_gamma_must_be_whole(gamma: float) -> None:
  for function in (expected_tokens, lambda a, g: speedup(a, g, 0.0), lambda a, g: operations_factor(a, g, 0.0)):
    with pytest.raises(ValueError, match="gamma must be a whole number, 0 or more; given"):
      function(0.5, gamma)


@pytest.mark.parametrize("cost", [-0.01, math.nan, math.inf])
def test_costs_must_be_finite_and_not_negative(cost: float) -> None:
  with pytest.raises(ValueError, match=f"c must be finite and not negative; given {cost}"):
    speedup(0.5, 2, cost)
  with pytest.raises(ValueError, match=f"c must be finite and not negative; given {cost}"):
    minimum_gain(0.5, cost)
  with pytest.raises(ValueError, match=f"c_hat must be finite and not negative; given {cost}"):
    operations_factor(0.5, 2, cost)
  with pytest.raises(ValueError, match=f"v must be finite and positive; given {cost}"):
    speedup(0.5, 2, 0.1, cost)


def test_other_bad_input() -> None:
  with pytest.raises(ValueError, match=r"v must be finite and positive; given 0\.0"):
    speedup(0.5, 2, 0.1, 0.0)
  with pytest.raises(ValueError, match=r"v has 3 values; max_gamma=3 needs v\(1\) to v\(4\)"):
    best_gamma(0.5, 0.1, [1.0, 1.1, 1.2], max_gamma=3)
  with pytest.raises(ValueError, match="max_gamma must be a whole number"):
    best_gamma(0.5, 0.1, max_gamma=-1)
  with pytest.raises(ValueError, match="More drafts accepted than tested"):
    expected_tokens_from_counts([3, 2], [2, 3])
  with pytest.raises(ValueError, match=r"given \(2,\) and \(1,\)"):
    expected_tokens_from_counts([3, 2], [2])
  with pytest.raises(ValueError, match="tested must be a whole number"):
    expected_tokens_from_counts([-3], [-4])
