"""The three operations whose best form depends on the backend: matrix product, cache write, attention over a cache.

Each has one meaning and two forms; `Options` says which. Forms differ in rounding only.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Indices = Array | np.ndarray

ATTENTION_BLOCK = 128  # cache slots a step of the CPU form
# Heads of all rows that the CPU form attends side by side; more than these take turns, which compiles faster.
UNROLLED_HEADS = 8
# Rows that are written one after the other; of more a scatter is made, which a CPU runs element by element.
UNROLLED_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Options:
  """How a decoder is computed, not what.

  scan_layers: one traced layer under `lax.scan` over stacked weights. Compiles fast at any depth and is right on an
    accelerator; on a CPU every layer's weights are copied on their way in (twice the time a token).
  cpu_kernels: forms for few rows on a CPU. Products take the weight as their left operand, rows padded to a power of
    two (an 8-row pass costs 1.5 one-row passes in place of 2.6); weights that take the same input are kept as one; and
    attention reads only the blocks of the cache that hold something.
  row_parts: devices (or groups of them) that rows are split over, each of which writes its own: see `write`.
  pair_rows: a pass over a single token computes it twice, side by side. A TPU multiplies a lone row without its matrix
    units, in a form that its compiler takes for twice as slow, and in another precision than any pass over several.
  """

  scan_layers: bool
  cpu_kernels: bool
  row_parts: int = 1
  pair_rows: bool = False

  @classmethod
  def for_backend(cls, backend: str | None = None) -> "Options":
    """The defaults for a backend; None means the one jax runs on."""
    backend = backend or jax.default_backend()
    return cls(scan_layers=backend != "cpu", cpu_kernels=backend == "cpu", pair_rows=backend == "tpu")


def matmul(x: Array, weight: Array, options: Options) -> Array:
  """x[..., in] times weight[out, in] transposed: [..., out]."""
  if not options.cpu_kernels:
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
  *batch, width = x.shape
  rows = math.prod(batch)
  x = x.reshape(rows, width)
  if rows == 1:
    y = lax.dot_general(x, weight, (((1,), (1,)), ((), ())))
  else:
    padded = 1 << (rows - 1).bit_length() if rows <= 64 else rows
    x = jnp.pad(x, ((0, padded - rows), (0, 0)))
    # Without the barrier XLA folds the transpose back into the product, and the form is lost.
    y = lax.optimization_barrier(lax.dot_general(weight, x, (((1,), (1,)), ((), ())))).T[:rows]
  return y.reshape(*batch, weight.shape[0])


def lone(options: Options, batch: int, width: int) -> bool:
  """Whether a pass over so many rows and tokens is one whose only token is computed twice."""
  return options.pair_rows and batch == width == 1


def write(cache: Array, new: Array, start: Array, options: Options, layer: Array | None = None) -> Array:
  """Puts new[B, K, T, h] at slots start[b]..start[b]+T-1 of row b of cache[B, K, S, h].

  With `layer`, into that layer of a stacked cache[layers, B, K, S, h].
  """
  axis, prefix = (0, ()) if layer is None else (1, (layer,))
  new = new if layer is None else new[None]
  parts = options.row_parts if start.shape[0] % options.row_parts == 0 else 1
  own = start.shape[0] // parts
  two_slots = lone(options, start.shape[0], new.shape[-2]) and cache.shape[-2] > 1

  def update(cache: Array, new: Array, start: Array, row: Array | int) -> Array:
    one, at = lax.dynamic_slice_in_dim(new, row, 1, axis), start[row]
    if two_slots:
      # One of them as it was: a TPU would keep a cache that is written slot by slot in another layout than passes
      # over several tokens do, and copy it from the one to the other and back in each round.
      first = jnp.clip(at, 0, cache.shape[-2] - 2)
      old = lax.dynamic_slice(cache, (*prefix, row, 0, first, 0), (*one.shape[:-2], 2, one.shape[-1]))
      slot = lax.broadcasted_iota(jnp.int32, old.shape, old.ndim - 2) + first
      one, at = jnp.where(slot == at, one, old), first
    return lax.dynamic_update_slice(cache, one, (*prefix, row, 0, at, 0))

  def one_by_one(cache: Array, new: Array, start: Array) -> Array:
    split = lambda x, axis: x.reshape(*x.shape[:axis], parts, own, *x.shape[axis + 1 :])  # noqa: E731
    every, rows = update, cache
    # Row i of every part at once: the compiler splits vmap's scatter, and one update is left for each part. Without it
    # the compiler of libtpu 0.0.42 fails on the loop over 32 rows, with an internal error.
    if options.row_parts > 1 or own > UNROLLED_ROWS:
      every = jax.vmap(update, (axis, axis, 0, None), axis)
      rows, new, start = split(cache, axis), split(new, axis), split(start, 0)
    if own <= UNROLLED_ROWS:
      for row in range(own):
        rows = every(rows, new, start, row)
    else:
      rows = lax.fori_loop(0, own, lambda row, rows: every(rows, new, start, row), rows)
    return rows.reshape(cache.shape)

  if own <= UNROLLED_ROWS:
    return one_by_one(cache, new, start)
  put = lambda row, new, at: lax.dynamic_update_slice(row, new, (*prefix, 0, at, 0))  # noqa: E731
  scatter = jax.vmap(put, (axis, axis, 0), axis)
  # For a scatter a TPU brings the whole cache into another layout, and back.
  return lax.platform_dependent(cache, new, start, tpu=one_by_one, default=scatter)


def attention(q: Array, k: Array, v: Array, positions: Array, options: Options) -> Array:
  """softmax(q k^T / sqrt(h)) v of queries at positions[B, T] over cache slots 0..positions[b, t].

  q: [B, T, H, h]; k, v: [B, K, S, h], head n of q reading head n // (H/K). Returns [B, T, H, h]. Softmax in float32.
  """
  batch, width, heads, depth = q.shape
  kv_heads = k.shape[1]
  q = q.reshape(batch, width, kv_heads, heads // kv_heads, depth).transpose(0, 2, 1, 3, 4) * depth**-0.5
  limit = positions + 1  # slots that query t may read
  form = _attend_blocks if options.cpu_kernels else _attend_all
  return form(q, k, v, limit).transpose(0, 2, 1, 3, 4).reshape(batch, width, heads, depth)


def _attend_all(q: Array, k: Array, v: Array, limit: Array) -> Array:
  """One batched product over every slot; q: [B, K, T, G, h]."""
  scores = jnp.einsum("bktgh,bksh->bktgs", q, k, preferred_element_type=jnp.float32)
  visible = jnp.arange(k.shape[2])[None, None] < limit[:, :, None]
  scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bktgs,bksh->bktgh", weights, v)


def _attend_blocks(q: Array, k: Array, v: Array, limit: Array) -> Array:
  """Two-dimensional products, one for each row and head: batched ones with few rows fall to a slow path on a CPU."""
  batch, kv_heads, width, group, depth = q.shape
  queries = q.reshape(batch * kv_heads, width * group, depth)
  limits = jnp.repeat(jnp.repeat(limit, group, axis=1), kv_heads, axis=0)[:, :, None]  # [B*K, T*G, 1]
  row, head = np.divmod(np.arange(batch * kv_heads), kv_heads)
  if len(row) <= UNROLLED_HEADS:
    out = _attend_heads(queries, k, v, limits, row, head)
  else:
    one = lambda pair: _attend_heads(pair[0][None], k, v, pair[1][None], pair[2][None], pair[3][None])[0]  # noqa: E731
    out = lax.map(one, (queries, limits, jnp.asarray(row), jnp.asarray(head)))
  return out.reshape(q.shape)


def _attend_heads(queries: Array, k: Array, v: Array, limits: Array, row: Indices, head: Indices) -> Array:
  """Attention of queries[N, R, h] to head `head[n]` of row `row[n]`: slots below limits[N, R, 1].

  A running softmax over blocks of slots (arXiv 1805.02867), up to the last block that any of these queries may read.
  """
  count, size, depth = len(queries), min(ATTENTION_BLOCK, k.shape[2]), k.shape[3]
  dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)

  def block(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    total, norm, top = carry
    # The last block starts early enough to fit; the slots it shares with the one before are masked.
    at = jnp.minimum(i * size, k.shape[2] - size)
    slot = at + jnp.arange(size)[None, None]

    def own(cache: Array, n: int) -> Array:
      return lax.dynamic_slice(cache, (row[n], head[n], at, 0), (1, 1, size, depth)).reshape(size, depth)

    scores = jnp.stack([dot(queries[n], own(k, n).T) for n in range(count)])
    scores = jnp.where((slot >= i * size) & (slot < limits), scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - new_top)
    shrink = jnp.exp(top - new_top)
    norm = norm * shrink + weights.sum(-1, keepdims=True)
    weights = weights.astype(v.dtype)
    total = total * shrink + jnp.stack([dot(weights[n], own(v, n)) for n in range(count)])
    return total, norm, new_top

  # Slot 0 is visible to every query, so `top` is finite after the first block.
  rows = queries.shape[:2]
  carry = jnp.zeros((*rows, depth)), jnp.zeros((*rows, 1)), jnp.full((*rows, 1), -jnp.inf)
  total, norm, _ = lax.fori_loop(0, -(-limits.max() // size), block, carry)
  return (total / norm).astype(queries.dtype)
