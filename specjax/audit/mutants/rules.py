"""Planted faults in acceptance rules.

`assemble` is token verification (`specjax.verify.token`) in parts; a faulty rule replaces one of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax import keys, verify, warp
from specjax.audit.engine import Engine
from specjax.audit.mutants.base import Mutant
from specjax.keys import Purpose
from specjax.verify import Verdict, Verifier, declare
from specjax.verify.base import Noise, residual


def own_uniforms(key: Array, gamma: int) -> Array:
  return jax.vmap(lambda i: keys.uniform(keys.fold(key, Purpose.ACCEPT, i)))(jnp.arange(gamma))


def block_uniforms(key: Array, gamma: int) -> Array:
  return own_uniforms(key, gamma + 1)[1:]  # the first index is of no draft


def strictly(u: Array, p: Array, q: Array) -> Array:
  return u * q < p


def up_to_the_first_rejection(passed: Array) -> Array:
  return jnp.cumprod(passed.astype(jnp.int32)).sum()


def mass_left(p: Array, q: Array) -> Array:
  return jnp.maximum(p - q, 0.0)


def residual_weights(mass: Callable[[Array, Array], Array], guarded: bool = True) -> Callable[..., Array]:
  """Log-weights of `mass(p, q)` at the rejected draft, or of p: behind the last draft, and where guarded and empty."""

  def weights(log_p: Array, log_q: Array, drafts: Array, n: Array, num_drafted: Array) -> Array:
    left = mass(jnp.exp(log_p[n]), jnp.exp(log_q[jnp.minimum(n, len(drafts) - 1)]))
    rejected = (n < num_drafted) & (left.sum() > 0) if guarded else n < num_drafted
    return jnp.where(rejected, jnp.log(left), log_p[n])

  return weights


def draw_next(key: Array, log_weights: Array, n: Array) -> Array:
  del n
  return warp.categorical(keys.fold(key, Purpose.NEXT), log_weights)


def assemble(
  *,
  uniforms: Callable[[Array, int], Array] = own_uniforms,
  passes: Callable[[Array, Array, Array], Array] = strictly,
  count: Callable[[Array], Array] = up_to_the_first_rejection,
  weights: Callable[..., Array] = residual_weights(mass_left),  # noqa: B008
  draw: Callable[[Array, Array, Array], Array] = draw_next,
  noise: Noise = "round",
) -> Verifier:
  """Algorithm 1 of arXiv 2211.17192 for at least one draft; with the default parts, draw for draw the token rule.

  uniforms: (key, gamma) -> u[gamma]. passes: (u, p, q), each [gamma] -> bool[gamma]. count: of what passed -> n.
  weights: (log_p, log_q, drafts, n, num_drafted) -> log-weights[V]. draw: (key, log-weights, n) -> the next token.
  """

  @declare(lossless=False, noise=noise)
  def rule(log_p: Array, log_q: Array, drafts: Array, num_drafted: Array, key: Array) -> Verdict:
    gamma = drafts.shape[0]
    p, q = jnp.exp(warp.pick(log_p[:gamma], drafts)), jnp.exp(warp.pick(log_q, drafts))
    n = count(passes(uniforms(key, gamma), p, q) & (jnp.arange(gamma) < num_drafted))
    return Verdict(n, draw(key, weights(log_p, log_q, drafts, n, num_drafted), n))

  return rule


def _of_p(log_p, log_q, drafts, n, num_drafted):
  return log_p[n]


def _of_q(log_p, log_q, drafts, n, num_drafted):
  return jnp.where(n < num_drafted, log_q[jnp.minimum(n, len(drafts) - 1)], log_p[n])


def _of_the_first_draft(log_p, log_q, drafts, n, num_drafted):
  return residual_weights(mass_left)(log_p, jnp.broadcast_to(log_q[:1], log_q.shape), drafts, n, num_drafted)


def _of_the_next_position(log_p, log_q, drafts, n, num_drafted):
  late = jnp.concatenate([log_p[1:], log_p[-1:]])
  return jnp.where(n < num_drafted, residual_weights(mass_left)(late, log_q, drafts, n, num_drafted), log_p[n])


def _without_the_rejected(log_p, log_q, drafts, n, num_drafted):
  rejected = (n < num_drafted) & (jnp.arange(log_p.shape[1]) == drafts[jnp.minimum(n, len(drafts) - 1)])
  left = jnp.where(rejected, -jnp.inf, log_p[n])
  return jnp.where((left > -jnp.inf).any(), left, log_p[n])


def _bonus_of_q(log_p, log_q, drafts, n, num_drafted):
  right = residual_weights(mass_left)(log_p, log_q, drafts, n, num_drafted)
  return jnp.where((n == num_drafted) & (n > 0), log_q[jnp.maximum(n - 1, 0)], right)


def _draw_unnormalised(key: Array, log_weights: Array, n: Array) -> Array:
  """Inverse of the cumulative sum at u in [0, 1), which the sum may never reach: the last token then."""
  u = keys.uniform(keys.fold(key, Purpose.NEXT))
  return jnp.minimum((jnp.exp(log_weights).cumsum() <= u).sum(), len(log_weights) - 1).astype(jnp.int32)


def _one_uniform(key: Array, gamma: int) -> Array:
  return jnp.broadcast_to(keys.uniform(keys.fold(key, Purpose.ACCEPT)), (gamma,))


def _coarse_uniforms(key: Array, gamma: int) -> Array:
  """With 2^23 values."""
  return jax.vmap(lambda i: jax.random.uniform(keys.fold(key, Purpose.ACCEPT, i)))(jnp.arange(gamma))


def _in_half_precision(u: Array, p: Array, q: Array) -> Array:
  """Rejects where u < 1 - p/q: what bfloat16 rounds to 1 is never accepted."""
  return (u >= lax.reduce_precision(1 - p / q, exponent_bits=8, mantissa_bits=7)) & (p > 0)


def _uniform_of_the_key(key: Array, gamma: int) -> Array:
  return jnp.broadcast_to(jax.random.uniform(key), (gamma,))


def _draw_of_the_same_key(key: Array, log_weights: Array, n: Array) -> Array:
  # A clone, as jax can be told to refuse the reuse that this fault consists of.
  return jax.random.categorical(jax.random.clone(key), log_weights).astype(jnp.int32)


@declare(lossless=False)
def _without_bonus(log_p, log_q, drafts, num_drafted, key):
  """Ends a fully accepted block with its last draft."""
  verdict = verify.token(log_p, log_q, drafts, num_drafted, key)
  full = (verdict.num_accepted == num_drafted) & (num_drafted > 0)
  last = drafts[jnp.maximum(num_drafted - 1, 0)]
  return Verdict(verdict.num_accepted - full.astype(jnp.int32), jnp.where(full, last, verdict.next_token))


def capped(w: Array, p: Array, q: Array) -> Array:
  return jnp.where(w * p > 0, jnp.minimum(w * p / q, 1.0), 0.0)


def assemble_block(
  *,
  weight: Callable[[Array, Array, Array], Array] = capped,
  scaled_residual: bool = True,
  uniforms: Callable[[Array, int], Array] = block_uniforms,
  draw: Callable[[Array, Array, Array], Array] = draw_next,
  noise: Noise = "round",
) -> Verifier:
  """Block verification (`specjax.verify.block`) for at least one draft; weight: (w_i-1, p, q) -> w_i."""

  @declare(lossless=False, noise=noise)
  def rule(log_p: Array, log_q: Array, drafts: Array, num_drafted: Array, key: Array) -> Verdict:
    gamma = drafts.shape[0]
    p, q = jnp.exp(warp.pick(log_p[:gamma], drafts)), jnp.exp(warp.pick(log_q, drafts))
    _, w = lax.scan(lambda w, pq: (weight(w, *pq),) * 2, jnp.float32(1), (p, q))
    kept = jnp.minimum(w, 1.0)
    count = jnp.arange(1, gamma + 1)
    mass = jnp.maximum(w[:-1, None] * jnp.exp(log_p[1:gamma]) - jnp.exp(log_q[1:]), 0.0).sum(-1)
    mass = jnp.pad(mass, (0, 1))
    eta = uniforms(key, gamma)
    inside = jnp.where(kept < 1, eta * (mass + 1 - kept) < mass, eta < kept)
    accept = jnp.where(count < num_drafted, inside, eta < kept) & (count <= num_drafted)
    n = jnp.where(accept, count, 0).max()
    scale = jnp.concatenate([jnp.ones(1), w])[n] if scaled_residual else 1.0
    return Verdict(n, draw(key, residual(log_p, log_q, n, num_drafted, scale), n))

  return rule


def _uncapped(w: Array, p: Array, q: Array) -> Array:
  return jnp.where(w * p > 0, w * p / q, 0.0)


def _of_this_token(w: Array, p: Array, q: Array) -> Array:
  return jnp.where(p > 0, jnp.minimum(p / q, 1.0), 0.0)


ONE_ROUND, RARE, EMPTY = "one round", "rare drafts", "empty residual"


def _mutant(name: str, description: str, rule: Verifier, check: str = ONE_ROUND, visible: bool = True) -> Mutant:
  if getattr(rule, "__name__", "") == "rule":  # for error messages
    setattr(rule, "__name__", name)  # noqa: B010
  return Mutant(name, description, visible, check, Engine(rule=rule))


MUTANTS = (
  _mutant("residual from p", "draws from p after a rejection", assemble(weights=_of_p)),
  _mutant("residual from q", "draws from q after a rejection", assemble(weights=_of_q)),
  _mutant("residual without normalisation", "inverts a cumulative sum that does not reach 1",
          assemble(draw=_draw_unnormalised)),
  _mutant("residual with both signs", "draws from |p - q|",
          assemble(weights=residual_weights(lambda p, q: abs(p - q)))),
  _mutant("residual of the first draft", "subtracts the first draft's q, whichever was rejected",
          assemble(weights=_of_the_first_draft)),
  _mutant("residual of the next position", "takes p one position too late", assemble(weights=_of_the_next_position)),
  _mutant("residual without the rejected token", "zeroes that token alone, though q is soft",
          assemble(weights=_without_the_rejected)),
  _mutant("empty residual not seen", "draws from no mass where p = q",
          assemble(weights=residual_weights(mass_left, guarded=False)), EMPTY, visible=False),
  _mutant("epsilon in the residual", "adds 1e-10 to every lane, also those of no token",
          assemble(weights=residual_weights(lambda p, q: mass_left(p, q) + 1e-10, guarded=False)), EMPTY,
          visible=False),
  _mutant("bonus from q", "draws from the last draft's q after full acceptance", assemble(weights=_bonus_of_q)),
  _mutant("bonus skipped", "emits no token behind a fully accepted block", _without_bonus, "own draft", visible=False),
  _mutant("one u for all positions", "tests every draft of a round with the same u", assemble(uniforms=_one_uniform)),
  _mutant("u too small", "accepts with min(1, p / .9 q)", assemble(passes=lambda u, p, q: 0.9 * u * q < p)),
  _mutant("lenient", "accepts with min(1, p / .5 q)", verify.lenient(0.5)),
  _mutant("accepts at equality", "u q <= p, where u may be 0: accepts tokens of p = 0",
          assemble(uniforms=_coarse_uniforms, passes=lambda u, p, q: u * q <= p), RARE, visible=False),
  _mutant("coarse u", "u with 23 bits: accepts small ratios far too often", assemble(uniforms=_coarse_uniforms), RARE,
          visible=False),
  _mutant("ratio in half precision", "1 - p/q loses small ratios", assemble(passes=_in_half_precision), RARE,
          visible=False),
  _mutant("u and residual from one key", "the residual's noise knows u",
          assemble(uniforms=_uniform_of_the_key, draw=_draw_of_the_same_key)),
  _mutant("accepts behind a rejection", "counts all drafts that pass", assemble(count=lambda x: x.sum())),
  _mutant("block: token criterion", "w_i = min(1, p_i / q_i) forgets the drafts before",
          assemble_block(weight=_of_this_token)),
  _mutant("block: weight without cap", "w_i is the plain product of ratios", assemble_block(weight=_uncapped)),
  _mutant("block: token residual", "the residual is not scaled by w", assemble_block(scaled_residual=False)),
)  # fmt: skip
