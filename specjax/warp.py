"""Logits to the law a token is drawn from: temperature, top-k, top-p, min-p, and the draw itself.

The one place where this happens. Draft, verification, residual and bonus all go through `log_probs`, so target and
draft are standardised alike (Leviathan et al., arXiv 2211.17192, section 2.2) and speculative sampling stays exact
under any warp. Order: temperature, top-k, top-p of what top-k left, min-p.

Thresholds are found by reductions over the vocabulary (a bisection on the bits of a float), never by a sort or a
gather, so they work unchanged on a sharded vocabulary. Tokens that tie with the last one kept are kept.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Warp:
  """Settings of the sampling law; each a scalar or one value a row, float32[B] (`top_k` int32[B]). All are dynamic.

  temperature: logits are divided by it; 0 means argmax (the lowest id among equals).
  top_k: keep the k most probable tokens; 0 keeps all.
  top_p: keep the smallest set of most probable tokens whose mass reaches it, of what top_k left; 1 keeps all.
  min_p: keep tokens with at least this fraction of the most probable token's probability; 0 keeps all.
  """

  temperature: Array | float = 1.0
  top_k: Array | int = 0
  top_p: Array | float = 1.0
  min_p: Array | float = 0.0

  def per_row(self, batch: int) -> "Warp":
    """The same settings with every field broadcast to [batch]."""

    def row(value: Array | float, dtype) -> Array:
      return jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))

    return Warp(
      temperature=row(self.temperature, jnp.float32),
      top_k=row(self.top_k, jnp.int32),
      top_p=row(self.top_p, jnp.float32),
      min_p=row(self.min_p, jnp.float32),
    )


DEFAULT_WARP = Warp()


def log_probs(logits: Array, warp: Warp) -> Array:
  """Log-probabilities of the warped law.

  logits: float32[B, T, V], or [B, V]; -inf marks a token that does not exist.
  warp: fields of shape [B], or scalars.
  Returns float32 of the same shape; -inf where the law has no mass. A row with a NaN or +inf logit, or without a finite
  one, is NaN.
  """

  def column(value: Array | float) -> Array:
    return jnp.reshape(value, jnp.shape(value) + (1,) * (logits.ndim - jnp.ndim(value)))

  temperature, top_k, top_p, min_p = map(column, (warp.temperature, warp.top_k, warp.top_p, warp.min_p))
  greedy = temperature == 0
  # Subtracting the maximum first keeps any positive temperature from overflowing.
  scaled = logits.astype(jnp.float32)
  scaled = scaled - scaled.max(-1, keepdims=True)
  scaled = scaled / jnp.where(greedy, 1.0, temperature)
  # No row pays for a filter that no row uses.
  scaled = lax.cond((top_k > 0).any(), lambda x: _top_k(x, top_k), lambda x: x, scaled)
  scaled = lax.cond((top_p < 1).any(), lambda x: _top_p(x, top_p), lambda x: x, scaled)
  # Filters let NaN pass, and a sum does not lose it, as XLA's maximum on a CPU does.
  scaled = jnp.where(scaled < jnp.log(min_p), -jnp.inf, scaled)
  log_p = scaled - jax.nn.logsumexp(scaled, -1, keepdims=True)
  # A row that is NaN stays so: its argmax would pass for a token that the model is sure of.
  return lax.cond(greedy.any(), lambda x: jnp.where(greedy & ~jnp.isnan(x), _argmax_law(logits), x), lambda x: x, log_p)


def pick(values: Array, tokens: Array) -> Array:
  """values[..., V] at tokens[...], as a masked sum: a gather would collect a sharded vocabulary. NaN at no token."""
  picked = jnp.where(_token_ids(values) == tokens[..., None], values, 0).sum(-1)
  return jnp.where((tokens >= 0) & (tokens < values.shape[-1]), picked, jnp.nan)


def one_hot_law(tokens: Array, vocab_size: int) -> Array:
  """Log-probabilities float32[..., V] of the law that always draws tokens[...]."""
  ids = lax.broadcasted_iota(jnp.int32, (*tokens.shape, vocab_size), tokens.ndim)
  return jnp.where(ids == tokens[..., None], 0.0, -jnp.inf)


def categorical(key: Array, log_weights: Array) -> Array:
  """Draws one token from the law proportional to exp(log_weights[V]); int32 scalar.

  Gumbel-argmax in two levels: first a block of about sqrt(V) tokens by its total weight, then a token inside it. Each
  level is right far into the tail (`mode="high"`), a token of weight 0 is never drawn, and a vocabulary of 49,152 takes
  448 noise values in place of 49,152. Over a vocabulary that is split, devices exchange a block, not the law.
  """
  count, width = block_shape(log_weights.shape[-1])
  pad = count * width - log_weights.shape[-1]
  blocks = jnp.pad(log_weights, (0, pad), constant_values=-jnp.inf).reshape(count, width)
  block_key, token_key = jax.random.split(key)
  block = jax.random.categorical(block_key, jax.nn.logsumexp(blocks, -1), mode="high")
  inside = jnp.where(jnp.arange(count)[:, None] == block, blocks, -jnp.inf).max(0)
  token = jax.random.categorical(token_key, inside, mode="high")
  return (block * width + token).astype(jnp.int32)


def block_shape(vocab_size: int) -> tuple[int, int]:
  """(number of blocks, tokens a block) that `categorical` draws in; where their product exceeds V, the rest is padding.

  Blocks are whole parts of a vocabulary that is split over devices if the parts divide their number, so that is a power
  of two, or thrice one, if V has such a divisor anywhere near its square root.
  """
  root = math.isqrt(vocab_size - 1) + 1  # rounded up
  count = 3 if vocab_size % 3 == 0 else 1
  while 2 * count * count < vocab_size and vocab_size % (2 * count) == 0:
    count *= 2
  if 4 * count >= root:
    return count, vocab_size // count
  return -(-vocab_size // root), root


def gumbel_argmax(key: Array, log_weights: Array) -> Array:
  """Draws one token from the law proportional to exp(log_weights[V]) as argmax(log_weights + g); int32 scalar.

  g[V] is Gumbel noise that depends on the key and V alone, right far into the tail (`mode="high"`), and finite, so a
  token of weight 0 is never drawn. Takes V noise values; in return two laws drawn from under one key choose the same
  token with probability sum_i 1 / sum_j max(p_j / p_i, q_j / q_i).
  """
  return jax.random.categorical(key, log_weights, mode="high").astype(jnp.int32)


def _argmax_law(logits: Array) -> Array:
  return one_hot_law(logits.argmax(-1).astype(jnp.int32), logits.shape[-1])


def _token_ids(values: Array) -> Array:
  return lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)


def _top_k(scaled: Array, k: Array) -> Array:
  goal = jnp.where(k > 0, k.astype(jnp.float32), jnp.inf)
  return _keep_until(scaled, jnp.ones_like(scaled), goal)


def _top_p(scaled: Array, p: Array) -> Array:
  weight = jnp.exp(scaled)
  goal = jnp.where(p < 1, p * weight.sum(-1, keepdims=True), jnp.inf)
  return _keep_until(scaled, weight, goal)


def _keep_until(scaled: Array, weight: Array, goal: Array) -> Array:
  """Keeps the largest entries of scaled[..., V] (all <= 0) until their weight reaches goal[..., 1]; -inf elsewhere.

  The bits of a non-negative float grow with it, so the least threshold on -scaled is built bit by bit from the top:
  31 masked sums.
  """
  # abs: -0.0 and 0.0 are the same number with different bits.
  bits = lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)

  def add_bit(i: Array, threshold: Array) -> Array:
    candidate = threshold | (jnp.int32(1) << (30 - i))
    below = jnp.where(bits < candidate, weight, 0.0).sum(-1, keepdims=True)
    return jnp.where(below < goal, candidate, threshold)

  threshold = lax.fori_loop(0, 31, add_bit, jnp.zeros((*scaled.shape[:-1], 1), jnp.int32))
  return jnp.where((bits <= threshold) | jnp.isnan(scaled), scaled, -jnp.inf)
