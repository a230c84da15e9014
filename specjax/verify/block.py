"""Block verification (Sun et al., arXiv 2403.10444, Algorithm 2): judges prefixes of a block, not single tokens."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax import keys, warp
from specjax.keys import Purpose
from specjax.verify.base import Verdict, declare, residual


@declare(lossless=True)
def block(log_p: Array, log_q: Array, draft_tokens: Array, num_drafted: Array, key: Array) -> Verdict:
  """Accepts the longest prefix x_1..x_i of the n = num_drafted drafts with eta_i < h_i; eta_i uniform, independent.

  With P_i = p(. | x_1..x_i-1) and Q_i likewise,

    w_0 = 1,  w_i = min(1, w_i-1 P_i(x_i) / Q_i(x_i))
    S_i = sum_v max(w_i P_i+1(v) - Q_i+1(v), 0)
    h_i = S_i / (S_i + 1 - w_i) for i < n,  h_n = w_n

  and the next token is drawn from norm(max(w_i P_i+1 - Q_i+1, 0)) behind i < n accepted drafts, from P_n+1 behind n.

  The probability that at least i drafts are accepted, given x_1..x_i, is w_i; so a round accepts sum_i E[w_i] drafts,
  E over x ~ Q. The token rule's probability is prod_j<=i min(1, P_j / Q_j), which is never more. No exact rule that
  sees the laws along the drafted path alone accepts more in a round.

  A decision on draft i has looked at all later drafts, so its bits must be the round's own. Were they keyed by
  position, the positions behind a rejection would be judged again by an eta that is known to have been too large.

  log_p: float32[gamma+1, V]; log_q: float32[gamma, V]; draft_tokens: int32[gamma]; num_drafted: int32 scalar;
  key: consumed.
  """
  gamma = draft_tokens.shape[0]
  p_draft = jnp.exp(warp.pick(log_p[:gamma], draft_tokens))
  q_draft = jnp.exp(warp.pick(log_q, draft_tokens))

  def extend(w: Array, draft: tuple[Array, Array]) -> tuple[Array, Array]:
    p, q = draft
    mass = w * p
    w = jnp.where(mass > 0, jnp.minimum(mass / q, 1.0), 0.0)
    return w, w

  _, w = lax.scan(extend, jnp.float32(1), (p_draft, q_draft))

  count = jnp.arange(1, gamma + 1)  # drafts accepted
  # S_gamma has no Q, and is not used: h_n takes its place.
  mass = jnp.maximum(w[:-1, None] * jnp.exp(log_p[1:gamma]) - jnp.exp(log_q[1:]), 0.0).sum(-1)
  mass = jnp.pad(mass, (0, min(gamma, 1)))
  eta = jax.vmap(lambda i: keys.uniform(keys.fold(key, Purpose.ACCEPT, i)))(count)
  # eta < h, strictly, so that eta = 0 does not accept a prefix of probability 0; and multiplied out, as h is 0/0 where
  # w = 1 and S = 0. Either answer is right there: P = Q, so that a longer prefix is accepted.
  accept = jnp.where(count < num_drafted, eta * (mass + 1 - w) < mass, eta < w) & (count <= num_drafted)
  num_accepted = jnp.where(accept, count, 0).max(initial=0)

  w_next = jnp.concatenate([jnp.ones(1), w])[num_accepted]
  log_weights = residual(log_p, log_q, num_accepted, num_drafted, w_next)
  next_token = warp.categorical(keys.fold(key, Purpose.NEXT), log_weights)
  return Verdict(num_accepted, next_token)
