"""What an acceptance rule is: a pure function of one row's two laws, its drafts and a key.

A rule knows no model, cache or batch; the sampler maps it over rows. `specjax.verify` looks rules up by name.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, cast, get_args

import jax.numpy as jnp
from jax import Array

Noise = Literal["round", "position"]


class Verdict(NamedTuple):
  """What one row keeps of a round.

  num_accepted: int32 scalar n, 0 <= n <= num_drafted; the first n drafts are emitted.
  next_token: int32 scalar, emitted behind them: the residual's draw after a rejection, the bonus token otherwise.
  """

  num_accepted: Array
  next_token: Array


class Verifier(Protocol):
  """`(log_p[gamma+1, V], log_q[gamma, V], draft_tokens[gamma], num_drafted, key) -> Verdict`, all for one row.

  log_p: float32, the warped target law at each position of the block; row `num_drafted` is the bonus law.
  log_q: float32, the law each draft was really drawn from.
  num_drafted: int32 scalar; drafts from this index on do not exist.
  key: consumed. A single key; key[gamma+1] where `noise` is "position".
  lossless: whether the emitted tokens follow the target's law.
  noise: what the key is folded from. "round": from the row's round counter, and nothing else consumes it. "position":
    key i is that of the absolute position of draft i, the same in whatever round it is reached, and draft i was drawn
    from it by `specjax.warp.gumbel_argmax`. Exact only for a rule whose emitted tokens do not depend on the drafts.
  """

  lossless: bool
  noise: Noise

  def __call__(self, log_p: Array, log_q: Array, draft_tokens: Array, num_drafted: Array, key: Array) -> Verdict: ...


def declare(*, lossless: bool, noise: Noise = "round") -> Callable[[Callable[..., Verdict]], Verifier]:
  """Decorator: states whether a rule keeps the target's law, which every rule must, and what its key is folded from.

  Raises ValueError for a `noise` that is neither "round" nor "position".
  """
  if noise not in get_args(Noise):
    raise ValueError(f'noise={noise!r} is unknown; it must be "round" or "position".')

  def mark(rule: Callable[..., Verdict]) -> Verifier:
    marked = cast(Verifier, rule)
    marked.lossless = lossless
    marked.noise = noise
    return marked

  return mark


def shares_noise(rule: Verifier) -> bool:
  """Whether the drafter draws from the rule's own bits."""
  return getattr(rule, "noise", "round") == "position"


def residual(log_p: Array, log_q: Array, num_accepted: Array, num_drafted: Array, scale: Array | float = 1.0) -> Array:
  """Log-weights[V] of norm(max(scale p - q, 0)) at position `num_accepted`; of p behind the last draft.

  log_p: float32[gamma+1, V]; log_q: float32[gamma, V]; num_accepted, num_drafted: int32 scalars; scale: at most 1.
  Where the residual has no mass, p: then p = q there, and a rejection can only have come from rounding.
  """
  log_p_next = log_p[num_accepted]
  if log_q.shape[0] == 0:
    return log_p_next
  q_next = jnp.exp(log_q[jnp.minimum(num_accepted, log_q.shape[0] - 1)])
  mass = jnp.maximum(scale * jnp.exp(log_p_next) - q_next, 0.0)
  return jnp.where((num_accepted < num_drafted) & (mass.sum() > 0), jnp.log(mass), log_p_next)
