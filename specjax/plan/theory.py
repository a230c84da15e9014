"""Closed forms of speculative sampling (Leviathan, Kalman, Matias, arXiv 2211.17192): tokens a round, speed, work.

They assume that every draft is accepted with the same probability alpha, whatever came before it. Nothing here measures
or samples. Except where an argument says otherwise, arguments are scalars or arrays and broadcast; the result is a
float64 scalar or array of the broadcast shape.

  alpha   acceptance probability, E[sum_v min(p(v), q(v))]
  gamma   drafts a round, `num_draft_tokens`
  c       time of a draft pass / time of a one-token target pass
  c_hat   arithmetic operations a token of the draft model / of the target model
  v       time of the target pass over gamma + 1 tokens / time of the one over a single token
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> Any:
  """Tokens a round: (1 - alpha^(gamma+1)) / (1 - alpha), equation 1; gamma + 1 at alpha = 1.

  Raises:
    ValueError: alpha outside [0, 1]; gamma negative or not a whole number.
  """
  rejection = 1.0 - _probability("alpha", alpha)
  length = _whole("gamma", gamma) + 1.0
  # expm1 and log1p keep every digit where alpha is close to 1, and the quotient is 0 / 0 at 1 itself.
  with np.errstate(divide="ignore", invalid="ignore"):
    tokens = -np.expm1(length * np.log1p(-rejection)) / rejection
  return np.where(rejection == 0.0, length, tokens)[()]


def expected_tokens_from_counts(tested: ArrayLike, accepted_at: ArrayLike) -> float:
  """Tokens a round, each position with its own acceptance probability: 1 + sum_i prod_{j <= i} accepted_j / tested_j.

  The product is the probability that drafts 1 to i all pass; with equal probabilities the sum is `expected_tokens`.
  Rounds that drafted fewer tokens count where they got to. A position that was never tested adds nothing, so the
  result is then a lower bound.

  Args:
    tested, accepted_at: [..., gamma] counts, pooled over all leading axes: how often draft i was tested (all drafts
      before it accepted), and how often it passed.

  Raises:
    ValueError: shapes differ, or a count is negative, not whole, or larger among the accepted than the tested.
  """
  tests, passes = _whole("tested", tested), _whole("accepted_at", accepted_at)
  if tests.shape != passes.shape or tests.ndim == 0:
    raise ValueError(f"tested and accepted_at must both be [..., gamma]; given {tests.shape} and {passes.shape}.")
  if (passes > tests).any():
    raise ValueError(f"More drafts accepted than tested: accepted_at={accepted_at}, tested={tested}.")
  tests, passes = (counts.sum(axis=tuple(range(counts.ndim - 1))) for counts in (tests, passes))
  return 1.0 + float(np.cumprod(passes / np.maximum(tests, 1.0)).sum())


def speedup(alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0) -> Any:
  """Walltime of plain decoding / walltime of speculative decoding: expected_tokens / (gamma c + v), theorem 3.8.

  The paper takes v = 1: a pass over gamma + 1 tokens costs what a pass over one costs. Where it does not, give the
  measured v(gamma + 1).

  Raises:
    ValueError: as in `expected_tokens`; c negative or v not positive, or either not finite.
  """
  cost = _whole("gamma", gamma) * _cost("c", c) + _positive("v", v)
  return expected_tokens(alpha, gamma) / cost


def operations_factor(alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike) -> Any:
  """Arithmetic of speculative decoding / of plain decoding: (gamma c_hat + gamma + 1) / expected_tokens, theorem 3.11.

  Raises:
    ValueError: as in `expected_tokens`; c_hat negative or not finite.
  """
  drafts = _whole("gamma", gamma)
  return (drafts * _cost("c_hat", c_hat) + drafts + 1.0) / expected_tokens(alpha, gamma)


def minimum_gain(alpha: ArrayLike, c: ArrayLike) -> Any:
  """What the best gamma's speed-up is at least, for v = 1: (1 + alpha) / (1 + c) if alpha > c, corollary 3.9; else 1.

  gamma = 1 reaches the first, gamma = 0 the second.

  Raises:
    ValueError: alpha outside [0, 1]; c negative or not finite.
  """
  return np.maximum((1.0 + _probability("alpha", alpha)) / (1.0 + _cost("c", c)), 1.0)[()]


def best_gamma(
  alpha: float, c: float, v: Callable[[int], float] | Sequence[float] | None = None, max_gamma: int = 32
) -> int:
  """The gamma in 0..max_gamma of the largest `speedup`, the smallest of several; 0 says that drafting does not pay.

  Args:
    alpha, c: scalars.
    v: the time of a target pass over T tokens relative to one token, as a function of T = 1..max_gamma + 1, or as the
      sequence of these values; 1 everywhere when None.
    max_gamma: the largest gamma considered.

  Raises:
    ValueError: as in `speedup`; max_gamma negative or not a whole number; v shorter than max_gamma + 1.
  """
  gammas = np.arange(int(_whole("max_gamma", max_gamma)) + 1)
  if v is None:
    passes = np.ones(gammas.shape)
  elif callable(v):
    passes = np.array([v(int(gamma) + 1) for gamma in gammas])
  elif len(v) >= len(gammas):
    passes = np.asarray(v, float)[: len(gammas)]
  else:
    raise ValueError(f"v has {len(v)} values; max_gamma={max_gamma} needs v(1) to v({len(gammas)}).")
  return int(np.argmax(speedup(alpha, gammas, c, passes)))


def _probability(name: str, value: ArrayLike) -> np.ndarray:
  array = np.asarray(value, float)
  return _require(array, (array >= 0.0) & (array <= 1.0), f"{name} must be in [0, 1]")


def _cost(name: str, value: ArrayLike) -> np.ndarray:
  array = np.asarray(value, float)
  return _require(array, np.isfinite(array) & (array >= 0.0), f"{name} must be finite and not negative")


def _positive(name: str, value: ArrayLike) -> np.ndarray:
  array = np.asarray(value, float)
  return _require(array, np.isfinite(array) & (array > 0.0), f"{name} must be finite and positive")


def _whole(name: str, value: ArrayLike) -> np.ndarray:
  array = np.asarray(value, float)
  return _require(
    array, np.isfinite(array) & (array >= 0.0) & (array == np.floor(array)), f"{name} must be a whole number, 0 or more"
  )


def _require(array: np.ndarray, allowed: np.ndarray, rule: str) -> np.ndarray:
  if not allowed.all():
    raise ValueError(f"{rule}; given {array[~allowed].ravel()[0] if array.ndim else array[()]}.")
  return array
