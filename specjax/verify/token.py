"""Token verification: the acceptance rule of speculative sampling (Leviathan et al., arXiv 2211.17192, Algorithm 1)."""

import jax
import jax.numpy as jnp
from jax import Array

from specjax import keys, warp
from specjax.keys import Purpose
from specjax.verify.base import Verdict, declare, residual


@declare(lossless=True)
def token(log_p: Array, log_q: Array, draft_tokens: Array, num_drafted: Array, key: Array) -> Verdict:
  """Accepts draft x_i with probability min(1, p_i(x_i) / q_i(x_i)), up to the first rejection.

  The next token is drawn from norm(max(p - q, 0)) at the rejected position, or from p behind the last draft. The
  probability that a tested draft is accepted is sum_v min(p(v), q(v)).

  log_p: float32[gamma+1, V]; log_q: float32[gamma, V]; draft_tokens: int32[gamma]; num_drafted: int32 scalar;
  key: consumed.
  """
  num_accepted = count_accepted(log_p, log_q, draft_tokens, num_drafted, key)
  log_weights = residual(log_p, log_q, num_accepted, num_drafted)
  return Verdict(num_accepted, warp.categorical(keys.fold(key, Purpose.NEXT), log_weights))


def count_accepted(
  log_p: Array, log_q: Array, draft_tokens: Array, num_drafted: Array, key: Array, lenience: float = 1.0
) -> Array:
  """int32 scalar: drafts up to the first that fails u_i < p_i(x_i) / (lenience q_i(x_i)), u_i uniform, independent."""
  gamma = draft_tokens.shape[0]
  index = jnp.arange(gamma)
  u = jax.vmap(lambda i: keys.uniform(keys.fold(key, Purpose.ACCEPT, i)))(index)
  p_draft = jnp.exp(warp.pick(log_p[:gamma], draft_tokens))
  q_draft = jnp.exp(warp.pick(log_q, draft_tokens))
  # Strict, so that u = 0 does not accept a token of p = 0.
  accept = (u * lenience * q_draft < p_draft) & (index < num_drafted)
  return jnp.cumprod(accept.astype(jnp.int32)).sum()
