"""Lenient verification (Leviathan et al., arXiv 2211.17192, A.5): accepts more than it should, by a known amount."""

import functools
import numbers

from jax import Array

from specjax import keys, warp
from specjax.keys import Purpose
from specjax.verify.base import Verdict, Verifier, declare, residual
from specjax.verify.token import count_accepted


def lenient(lenience: float) -> Verifier:
  """The rule that accepts draft x_i with probability min(1, p_i(x_i) / (l q_i(x_i))), up to the first rejection.

  lenience: l in (0, 1]; static. The same l gives the same function, so that it is compiled once.

  The paper leaves the residual open. Here it is the token rule's norm(max(p - q, 0)), which adds mass only where too
  little was accepted: no residual leads to a law that is closer to p in total variation. A tested draft is accepted
  with probability a = sum_v min(p(v) / l, q(v)), and the emitted law of one position, and its distance from p, are

    p'(v) = min(p(v) / l, q(v)) + (1 - a) max(p(v) - q(v), 0) / sum_w max(p(w) - q(w), 0)
    TV(p', p) = sum_v min(max(q(v) - p(v), 0), (1 / l - 1) p(v))  <=  min(TV(p, q), 1 / l - 1).

  A token with p = 0 is never accepted. Not lossless but for l = 1, which is the token rule, draw for draw.

  Raises TypeError for an l that is no number and ValueError for one outside (0, 1].
  """
  if isinstance(lenience, bool) or not isinstance(lenience, numbers.Real):
    raise TypeError(f"lenience={lenience!r} must be a Python number in (0, 1]: it is static.")
  if not 0 < lenience <= 1:
    raise ValueError(f"lenience={lenience!r} must be in (0, 1]; 1 is the token rule, smaller values accept more.")
  return _lenient(float(lenience))


@functools.cache
def _lenient(lenience: float) -> Verifier:
  def rule(log_p: Array, log_q: Array, draft_tokens: Array, num_drafted: Array, key: Array) -> Verdict:
    num_accepted = count_accepted(log_p, log_q, draft_tokens, num_drafted, key, lenience)
    log_weights = residual(log_p, log_q, num_accepted, num_drafted)
    return Verdict(num_accepted, warp.categorical(keys.fold(key, Purpose.NEXT), log_weights))

  rule.__name__ = rule.__qualname__ = f"lenient({lenience:g})"
  return declare(lossless=lenience == 1)(rule)
