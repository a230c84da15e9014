"""Match verification: a draft is accepted if it is what the target draws itself. The plainest exact rule there is."""

import jax
import jax.numpy as jnp
from jax import Array

from specjax import keys, warp
from specjax.keys import Purpose
from specjax.verify.base import Verdict, declare


@declare(lossless=True)
def match(log_p: Array, log_q: Array, draft_tokens: Array, num_drafted: Array, key: Array) -> Verdict:
  """Draws y_i ~ p_i at every position, accepts draft x_i while x_i = y_i, and emits y_n behind the n accepted drafts.

  What is emitted is the target's own draw, so the law is the target's whatever the drafter. The probability that a
  tested draft is accepted is sum_v p(v) q(v): less than the token rule's sum_v min(p(v), q(v)), and the same where p or
  q is one-hot. Serving engines that sample the target and compare verify so.

  log_p: float32[gamma+1, V]; log_q: float32[gamma, V], not read; draft_tokens: int32[gamma]; num_drafted: int32 scalar;
  key: consumed.
  """
  del log_q
  own_keys = jax.vmap(lambda i: keys.fold(key, Purpose.NEXT, i))(jnp.arange(log_p.shape[0]))
  return keep_matches(jax.vmap(warp.categorical)(own_keys, log_p), draft_tokens, num_drafted)


def keep_matches(own_tokens: Array, draft_tokens: Array, num_drafted: Array) -> Verdict:
  """Accepts the drafts int32[gamma] up to the first that differs from the target's own tokens int32[gamma+1]."""
  gamma = draft_tokens.shape[0]
  accept = (draft_tokens == own_tokens[:gamma]) & (jnp.arange(gamma) < num_drafted)
  num_accepted = jnp.cumprod(accept.astype(jnp.int32)).sum()
  return Verdict(num_accepted, own_tokens[num_accepted])
