"""The seam between the sampler and every model: parameters and pure functions.

Anything that can map tokens to logits with a cache that is rolled back by position is a `LanguageModel`; the sampler
asks for nothing else. Nothing here samples.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.placement import ROWS, PartitionSpec, Placement

Params = Any  # a pytree of arrays
Cache = Any  # a pytree of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LanguageModel:
  """A language model as a pytree: `params` are its leaves, the functions are static.

  apply: `(params, tokens[B, T], cache, start[B]) -> (float32 logits[B, T, V], cache)`. `start[b]` is the absolute
    position of `tokens[b, 0]`. Writes positions start..start+T-1; a query attends to nothing beyond its own position.
    What lies at or past `start` in the cache is garbage of a rejected round and must not be read: rollback is a
    smaller `start`. Whatever a drafter may want to read of the model (hidden states of the last pass) lives in the
    cache too.
  init_cache: `(params, batch, max_length) -> cache`, room for positions 0..max_length-1.
  vocab_size: V.
  rewind: `(cache, length[B]) -> cache`, only for models whose state can't be overwritten by position (recurrent,
    rotating window): afterwards the cache stands at `length`. That is at most gamma + 1 positions back, over several
    passes in a draft model, or one chunk back while a prompt is read.
  context_length: the longest sequence the model can represent; None if it has no limit.
  tokenizer_hash: identifies the tokenizer where known, so that a drafter with another one is refused.
  placement: where it lies on a mesh; of `specjax.sharding.shard`, which reads the logical axes of arrays, such as
    P("heads", "embed"), from methods `apply.axes(params)` and `init_cache.axes(cache)` where they exist, and from
    `apply.num_ids` how many of the V ids are no padding.

  Two models are compiled once if their functions are equal, so build the functions once a configuration, not once a
  model.
  """

  params: Params
  apply: Callable[[Params, Array, Cache, Array], tuple[Array, Cache]] = dataclasses.field(metadata={"static": True})
  init_cache: Callable[[Params, int, int], Cache] = dataclasses.field(metadata={"static": True})
  vocab_size: int = dataclasses.field(metadata={"static": True})
  rewind: Callable[[Cache, Array], Cache] | None = dataclasses.field(default=None, metadata={"static": True})
  context_length: int | None = dataclasses.field(default=None, metadata={"static": True})
  tokenizer_hash: str | None = dataclasses.field(default=None, metadata={"static": True})
  placement: Placement | None = dataclasses.field(default=None, metadata={"static": True})

  @property
  def num_ids(self) -> int:
    """Ids that stand for tokens, the first ones of V: without those that a vocabulary is padded with for a mesh."""
    return getattr(self.apply, "num_ids", self.vocab_size)

  def __repr__(self) -> str:
    """A summary: the arrays would fill a notebook."""
    leaves = jax.tree.leaves(self.params)
    count = sum(math.prod(getattr(leaf, "shape", ())) for leaf in leaves)
    kinds = " and ".join(dict.fromkeys(str(getattr(leaf, "dtype", type(leaf).__name__)) for leaf in leaves))
    return (
      f"{type(self).__name__}(vocab_size={self.vocab_size}, {count:,} parameters in {kinds or 'no array'}, "
      f"context_length={self.context_length})"
    )


def run(model: LanguageModel, tokens: Array, cache: Cache, start: Array) -> tuple[Array, Cache]:
  """One pass of `model` over tokens[B, T] from start[B], rewound to `start` first if it is a model that must be.

  Raises TypeError, while it is traced, if `apply` returns other types than it must.
  """

  def once(model: LanguageModel, tokens: Array, cache: Cache, start: Array) -> tuple[Array, Cache]:
    if model.placement is not None:
      tokens, start = model.placement.constrain((tokens, start), model.placement.specs((tokens, start), ROWS))
    rewound = cache if model.rewind is None else model.rewind(cache, start)
    returned = model.apply(model.params, tokens, rewound, start)
    _check_pass(model, tokens, cache, returned)
    return place_laws(model, returned[0]), place_cache(model, returned[1])

  if model.placement is not None:
    once = model.placement.automatic(
      once, lambda: (laws_spec(model, (*tokens.shape, model.vocab_size)), cache_specs(model, cache))
    )
  return once(model, tokens, cache, start)


def empty_cache(model: LanguageModel, batch: int, max_length: int) -> Cache:
  """`model.init_cache`, each array where it belongs."""

  def make(params: Params) -> Cache:
    return place_cache(model, model.init_cache(params, batch, max_length))

  if model.placement is not None:
    shapes = lambda: jax.eval_shape(lambda params: model.init_cache(params, batch, max_length), model.params)  # noqa: E731
    make = model.placement.automatic(make, lambda: cache_specs(model, shapes()))
  return make(model.params)


def place_cache(model: LanguageModel, cache: Cache) -> Cache:
  return cache if model.placement is None else model.placement.constrain(cache, cache_specs(model, cache))


def place_laws(model: LanguageModel, values: Array) -> Array:
  """Logits or log-probabilities [B, ..., V] where the model's own are."""
  return values if model.placement is None else model.placement.constrain(values, laws_spec(model, values.shape))


def laws_spec(model: LanguageModel, shape: tuple[int, ...]) -> Any:
  """The mesh axes of laws [B, ..., V] of a model that is placed."""
  assert model.placement is not None
  axes = PartitionSpec("batch", *(None,) * (len(shape) - 2), "vocab")
  return model.placement.specs(jax.ShapeDtypeStruct(shape, jnp.float32), axes)


def cache_specs(model: LanguageModel, cache: Cache) -> Any:
  """The mesh axes of every array in the cache of a model that is placed: by its own names, or rows first."""
  assert model.placement is not None
  axes = getattr(model.init_cache, "axes", None)
  return model.placement.specs(cache, ROWS if axes is None else axes(cache))


def _check_pass(model: LanguageModel, tokens: Array, cache: Cache, returned: Any) -> None:
  """Costs a traced program nothing; without it a loop over passes fails far from the cause."""
  batch, width = tokens.shape
  allowed, name = f"float32[{batch},{width},{model.vocab_size}]", _name(model.apply)
  if not (isinstance(returned, tuple) and len(returned) == 2):
    raise TypeError(f"{name} returned {type(returned).__name__}; it must return (logits {allowed}, cache).")
  logits = short_types(returned[0])
  if logits != allowed:
    raise TypeError(
      f"{name} returned logits {logits}; they must be {allowed} for tokens {short_types(tokens)} and a vocabulary of "
      f"{model.vocab_size}."
    )
  require_same_types(f"{name} returned a cache", cache, returned[1])


def short_types(tree: Any) -> Any:
  """The same pytree with a text such as "int32[2,3]" for each array."""

  def short(leaf: Any) -> str:
    try:
      kind = jax.typeof(leaf)
    except TypeError:
      return type(leaf).__name__
    return f"{kind.dtype}[{','.join(map(str, kind.shape))}]"

  return jax.tree.map(short, tree)


def require_same_types(what: str, given: Any, returned: Any) -> None:
  """Raises TypeError, naming the first difference, unless both pytrees have the same structure, shapes and dtypes."""
  structures = jax.tree.structure(given), jax.tree.structure(returned)
  if structures[0] != structures[1]:
    raise TypeError(f"{what} of the structure {structures[1]}; it must be that of the one given: {structures[0]}.")
  for (path, before), after in zip(
    jax.tree.leaves_with_path(short_types(given)), jax.tree.leaves(short_types(returned)), strict=True
  ):
    if before != after:
      where = f" at {jax.tree_util.keystr(path)}" if path else ""
      raise TypeError(f"{what} with {after}{where}; it must be {before}, as in the one given.")


def _name(function: Any) -> str:
  name = getattr(function, "__qualname__", None)
  return f"{function.__module__}.{name}" if name else repr(function)


def prefill(model: LanguageModel, cache: Cache, tokens: Array, lengths: Array, chunk: int) -> Cache:
  """Feeds tokens[b, :lengths[b]] in passes of `chunk` tokens; the cache then holds positions < lengths[b].

  The number of passes follows the longest row and is dynamic, so one program serves every prompt length. The cache must
  have room for max(lengths) + chunk positions: a row that has ended feeds garbage behind its own end.
  """

  def feed(carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
    done, cache = carry
    start = jnp.minimum(done, lengths)
    _, cache = run(model, take_window(tokens, start, chunk), cache, start)
    return done + chunk, cache

  _, cache = lax.while_loop(lambda carry: carry[0] < lengths.max(), feed, (jnp.int32(0), cache))
  return cache


def fit_vocabulary(logits: Array, vocab_size: int) -> Array:
  """Cuts or pads logits[..., V] to another model's vocabulary: ids that one of the two lacks have no mass."""
  logits = logits[..., :vocab_size]
  pad = [(0, 0)] * (logits.ndim - 1) + [(0, vocab_size - logits.shape[-1])]
  return jnp.pad(logits, pad, constant_values=-jnp.inf)


def take_window(tokens: Array, start: Array, width: int) -> Array:
  """tokens[b, start[b]:start[b]+width]; positions behind the buffer's end repeat its last token, they never shift."""
  positions = start[:, None] + jnp.arange(width)[None]
  return jnp.take_along_axis(tokens, jnp.minimum(positions, tokens.shape[1] - 1), axis=1)
