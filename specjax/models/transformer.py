"""The decoder family in flax: llama, qwen2, qwen3 and gpt2 by configuration, and its seam to the sampler.

`Decoder` is an ordinary nnx module; `as_language_model` splits it into parameters and pure functions. Checkpoint
formats live in their own modules, the forms of the parameters in `forms`, those of the expensive operations in `ops`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from specjax.language_model import LanguageModel
from specjax.models import ops
from specjax.models.config import DecoderConfig
from specjax.models.ops import Options

Cache = Any  # {"k": ..., "v": ...}: [B, K, S, h] a layer, in a list, or stacked where layers are scanned


def _last_axis(vector: nnx.Param, like: Array) -> Array:
  """The vector with leading axes of size 1, so that rank promotion may be an error."""
  return jnp.expand_dims(vector[...], range(like.ndim - 1))


def _weight(initializer, shape: tuple[int, ...], dtype, rngs: nnx.Rngs | None) -> nnx.Param:
  """Without rngs, zeros that a checkpoint replaces: tracing 200 initialisers takes seconds."""
  return nnx.Param(jnp.zeros(shape, dtype) if rngs is None else initializer(rngs.params(), shape, dtype))


class Linear(nnx.Module):
  """y = x W^T + b, W stored (out, in)."""

  def __init__(self, width: int, out: int, *, use_bias: bool, dtype, rngs: nnx.Rngs | None):
    self.weight = _weight(nnx.initializers.lecun_normal(in_axis=1, out_axis=0), (out, width), dtype, rngs)
    self.bias = nnx.Param(jnp.zeros(out, dtype)) if use_bias else None

  def __call__(self, x: Array, options: Options) -> Array:
    y = ops.matmul(x, self.weight[...], options)
    return y if self.bias is None else y + _last_axis(self.bias, y)


class Norm(nnx.Module):
  """RMS norm, or LayerNorm with a bias; statistics in float32."""

  def __init__(self, config: DecoderConfig, width: int, kind: str, *, dtype):
    self.eps, self.kind = config.norm_eps, kind
    self.scale = nnx.Param(jnp.ones(width, dtype))
    self.bias = nnx.Param(jnp.zeros(width, dtype)) if kind == "layer" else None

  def __call__(self, x: Array) -> Array:
    y = x.astype(jnp.float32)
    if self.kind == "layer":
      y = y - y.mean(-1, keepdims=True)
    y = (y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)).astype(x.dtype)
    y = y * _last_axis(self.scale, y)
    return y if self.bias is None else y + _last_axis(self.bias, y)


class Embed(nnx.Module):
  """One vector an id."""

  def __init__(self, count: int, width: int, *, dtype, rngs: nnx.Rngs | None):
    self.weight = _weight(nnx.initializers.normal(0.02), (count, width), dtype, rngs)

  def __call__(self, ids: Array) -> Array:
    # Behind a row's end ids and positions may be out of range; what they give is never read.
    return jnp.take(self.weight[...], ids, axis=0, mode="clip")


DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
# Logical axes of weights by module; their biases have the first of them. The dimension of a norm is left unnamed.
_AXES = {
  **dict.fromkeys(("embed", "head"), ("vocab", "embed")),
  "positions": (None, "embed"),
  "q": ("heads", "embed"),
  **dict.fromkeys(("k", "v"), ("kv_heads", "embed")),
  "o": ("embed", "heads"),
  **dict.fromkeys(("gate", "up"), ("mlp", "embed")),
  "down": ("embed", "mlp"),
}


class Block(nnx.Module):
  """One layer, in two halves around the cache: `project` to queries, keys and values; `finish` what was attended."""

  def __init__(self, config: DecoderConfig, options: Options, *, dtype, rngs: nnx.Rngs | None):
    c = self.config = config
    linear = functools.partial(Linear, dtype=dtype, rngs=rngs)
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    self.attn_norm = Norm(c, c.d_model, c.norm, dtype=dtype)
    if options.cpu_kernels:
      self.qkv = linear(c.d_model, heads + 2 * kv_heads, use_bias=c.qkv_bias)
    else:
      self.q = linear(c.d_model, heads, use_bias=c.qkv_bias)
      self.k = linear(c.d_model, kv_heads, use_bias=c.qkv_bias)
      self.v = linear(c.d_model, kv_heads, use_bias=c.qkv_bias)
    self.o = linear(heads, c.d_model, use_bias=c.output_bias)
    self.q_norm = Norm(c, c.head_dim, "rms", dtype=dtype) if c.qk_norm else None
    self.k_norm = Norm(c, c.head_dim, "rms", dtype=dtype) if c.qk_norm else None
    self.mlp_norm = Norm(c, c.d_model, c.norm, dtype=dtype)
    if c.mlp == "swiglu" and options.cpu_kernels:
      self.gate_up = linear(c.d_model, 2 * c.d_ff, use_bias=c.mlp_bias)
    else:
      self.up = linear(c.d_model, c.d_ff, use_bias=c.mlp_bias)
    if c.mlp == "swiglu" and not options.cpu_kernels:
      self.gate = linear(c.d_model, c.d_ff, use_bias=c.mlp_bias)
    self.down = linear(c.d_ff, c.d_model, use_bias=c.mlp_bias)

  def project(self, x: Array, rotation: tuple[Array, Array] | None, options: Options) -> tuple[Array, Array, Array]:
    """x[B, T, d] -> queries [B, T, H, h], keys and values [B, K, T, h]."""
    c = self.config
    y = self.attn_norm(x)
    if options.cpu_kernels:
      heads = jnp.split(self.qkv(y, options), np.cumsum([c.num_heads, c.num_kv_heads]) * c.head_dim, axis=-1)
    else:
      # Without the barrier a TPU takes the split into heads into the product, and copies the weights' slice for that.
      heads = lax.optimization_barrier((self.q(y, options), self.k(y, options), self.v(y, options)))
    q, k, v = (each.reshape(*x.shape[:2], -1, c.head_dim) for each in heads)
    if self.q_norm is not None and self.k_norm is not None:
      q, k = self.q_norm(q), self.k_norm(k)
    if rotation is not None:
      q, k = rotate(q, rotation), rotate(k, rotation)
    return q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

  def finish(self, x: Array, attended: Array, options: Options) -> Array:
    x = x + self.o(attended.reshape(*x.shape[:2], -1), options)
    y = self.mlp_norm(x)
    if self.config.mlp == "gelu":
      hidden = jax.nn.gelu(self.up(y, options), approximate=True)
    elif options.cpu_kernels:
      gate, up = jnp.split(self.gate_up(y, options), 2, axis=-1)
      hidden = jax.nn.silu(gate) * up
    else:
      hidden = jax.nn.silu(self.gate(y, options)) * self.up(y, options)
    return x + self.down(hidden, options)


class Decoder(nnx.Module):
  """tokens[B, T] at positions start[B].. over a cache -> logits float32[B, T, V].

  rngs: for random weights; without them all weights are zero.
  """

  def __init__(
    self, config: DecoderConfig, *, options: Options | None = None, dtype=jnp.float32, rngs: nnx.Rngs | None = None
  ):
    c = self.config = config
    self.options = options or Options.for_backend()
    self.embed = Embed(c.vocab_size, c.d_model, dtype=dtype, rngs=rngs)
    self.positions = Embed(c.context_length, c.d_model, dtype=dtype, rngs=rngs) if c.position == "learned" else None
    self.layers: Any  # one Block of stacked weights, or a list of Blocks
    if self.options.scan_layers:
      make = nnx.split_rngs(splits=c.num_layers)(
        nnx.vmap(lambda rngs: Block(c, self.options, dtype=dtype, rngs=rngs), axis_size=c.num_layers)
      )
      self.layers = make(rngs)
    else:
      self.layers = nnx.List([Block(c, self.options, dtype=dtype, rngs=rngs) for _ in range(c.num_layers)])
    self.norm = Norm(c, c.d_model, c.norm, dtype=dtype)
    self.head = None if c.tied_head else Linear(c.d_model, c.vocab_size, use_bias=False, dtype=dtype, rngs=rngs)

  def __call__(self, tokens: Array, cache: Cache, start: Array) -> tuple[Array, Cache]:
    width = tokens.shape[1]
    positions = start[:, None] + jnp.arange(width)[None]
    if ops.lone(self.options, *tokens.shape):
      tokens, positions = lax.optimization_barrier((tokens.repeat(2, 1), positions.repeat(2, 1)))
    x = self.embed(tokens)
    if self.positions is not None:
      x = x + self.positions(positions)
    rotation = rotations(self.config, positions) if self.config.position == "rope" else None

    def layer(block: Block, x: Array, k: Array, v: Array, at) -> tuple[Array, Array, Array]:
      """`at` is the layer's index into stacked caches, or None where k and v are this layer's own."""
      q, new_k, new_v = block.project(x, rotation, self.options)
      new_k, new_v = new_k[:, :, :width], new_v[:, :, :width]
      k, v = ops.write(k, new_k, start, self.options, at), ops.write(v, new_v, start, self.options, at)
      own_k, own_v = (k, v) if at is None else (k[at], v[at])
      return block.finish(x, ops.attention(q, own_k, own_v, positions, self.options), self.options), k, v

    k, v = cache["k"], cache["v"]
    if self.options.scan_layers:
      # The caches are carried, not scanned over: scanned outputs would be written into fresh buffers every pass.
      scan = nnx.scan(
        lambda carry, block, at: (layer(block, carry[0], carry[1], carry[2], at), None),
        in_axes=(nnx.Carry, 0, 0),
        out_axes=(nnx.Carry, 0),
      )
      (x, k, v), _ = scan((x, k, v), self.layers, jnp.arange(self.config.num_layers))
    else:
      k, v = list(k), list(v)
      for i, block in enumerate(self.layers):
        x, k[i], v[i] = layer(block, x, k[i], v[i], None)
    x = self.norm(x)
    weight = self.embed.weight if self.head is None else self.head.weight
    logits = ops.matmul(x, weight[...], self.options).astype(jnp.float32)
    if self.config.vocab_padding:
      ids = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
      logits = jnp.where(ids < self.config.num_ids, logits, -jnp.inf)
    return logits[:, :width], {"k": k, "v": v}


def rotations(config: DecoderConfig, positions: Array) -> tuple[Array, Array]:
  """cos and sin float32[B, T, 1, h/2] of the rotary angles (arXiv 2104.09864), scaling included."""
  half = config.head_dim // 2
  frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  scaling = config.rope_scaling
  if scaling is not None and scaling.kind == "linear":
    frequency = frequency / scaling.factor
  elif scaling is not None and scaling.kind == "factors":
    frequency = frequency / jnp.asarray(scaling.factors, jnp.float32)
  elif scaling is not None:
    turns = scaling.original_context * frequency / (2 * jnp.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = jnp.clip(kept, 0.0, 1.0)
    frequency = frequency * (kept + (1 - kept) / scaling.factor)
  angle = positions[:, :, None, None].astype(jnp.float32) * frequency[None, None, None]
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
  """Rotates dimension i of each head x[B, T, H, h] with dimension i + h/2."""
  cos, sin = rotation
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def as_language_model(decoder: Decoder, *, tokenizer_hash: str | None = None) -> LanguageModel:
  """The sampler's view of a decoder: its parameters as nested dicts, and pure functions."""
  params = nnx.to_pure_dict(nnx.split(decoder)[1])
  return language_model(decoder.config, decoder.options, params, tokenizer_hash)


def language_model(config: DecoderConfig, options: Options, params: Any, tokenizer_hash: str | None) -> LanguageModel:
  """The model of these parameters, which have the structure of `skeleton`."""
  return LanguageModel(
    params=params,
    apply=Apply(config, options),
    init_cache=InitCache(config, options),
    vocab_size=config.vocab_size,
    context_length=config.context_length,
    tokenizer_hash=tokenizer_hash,
  )


@functools.cache
def skeleton(config: DecoderConfig, options: Options) -> tuple[nnx.GraphDef, Any]:
  """A decoder's structure and the shapes of its parameters."""
  graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, options=options)))
  return graph, nnx.to_pure_dict(shapes)


@dataclasses.dataclass(frozen=True)
class Apply:
  """`apply` of a decoder. Equal for equal configurations, so that a second load does not compile again."""

  config: DecoderConfig
  options: Options

  def __call__(self, params: Any, tokens: Array, cache: Cache, start: Array) -> tuple[Array, Cache]:
    return nnx.merge(skeleton(self.config, self.options)[0], params)(tokens, cache, start)

  @property
  def num_ids(self) -> int:
    return self.config.num_ids

  def axes(self, params: Any) -> Any:
    """Logical axes of every parameter: vocab, embed, heads, kv_heads, mlp, and layers where they are stacked.

    Heads and their dimensions are one axis. Weights that the CPU forms fuse are whole: on a mesh they are apart.
    """

    def axes(path: tuple, _: Any) -> PartitionSpec:
      *prefix, module, leaf = (str(getattr(key, "key", "")) for key in path)
      names = _AXES.get(module, (None,))
      stacked = ("layers",) if prefix and self.options.scan_layers else ()
      return PartitionSpec(*stacked, *(names if leaf == "weight" else names[:1]))

    return jax.tree_util.tree_map_with_path(axes, params)


@dataclasses.dataclass(frozen=True)
class InitCache:
  """`init_cache` of a decoder: zeros of the parameters' type, [B, K, S, h] a layer."""

  config: DecoderConfig
  options: Options

  def __call__(self, params: Any, batch: int, max_length: int) -> Cache:
    c = self.config
    shape, dtype = (batch, c.num_kv_heads, max_length, c.head_dim), params["embed"]["weight"].dtype
    if self.options.scan_layers:
      return {name: jnp.zeros((c.num_layers, *shape), dtype) for name in ("k", "v")}
    return {name: [jnp.zeros(shape, dtype) for _ in range(c.num_layers)] for name in ("k", "v")}

  def axes(self, cache: Cache) -> Any:
    """Logical axes of the cache; those of slots and within a head have no name."""
    stacked = ("layers",) if self.options.scan_layers else ()
    return jax.tree.map(lambda _: PartitionSpec(*stacked, "batch", "kv_heads"), cache)


def abstract_decoder(
  config: DecoderConfig, *, options: Options | None = None, dtype: Any = jnp.bfloat16
) -> LanguageModel:
  """A decoder of jax.ShapeDtypeStructs: to place on a mesh and compile without weights."""
  options = options or Options.for_backend()
  params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), skeleton(config, options)[1])
  return language_model(config, options, params, None)
