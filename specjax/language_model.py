"""The seam between the sampler and every model: parameters and pure functions.

Anything that can map tokens to logits with a cache that is rolled back by position is a `LanguageModel`; the sampler
asks for nothing else. Nothing here samples.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

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


def run(model: LanguageModel, tokens: Array, cache: Cache, start: Array) -> tuple[Array, Cache]:
  """One pass of `model` over tokens[B, T] from start[B], rewound to `start` first if it is a model that must be."""
  if model.rewind is not None:
    cache = model.rewind(cache, start)
  return model.apply(model.params, tokens, cache, start)


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


def take_window(tokens: Array, start: Array, width: int) -> Array:
  """tokens[b, start[b]:start[b]+width]; positions behind the buffer's end repeat its last token, they never shift."""
  positions = start[:, None] + jnp.arange(width)[None]
  return jnp.take_along_axis(tokens, jnp.minimum(positions, tokens.shape[1] - 1), axis=1)
