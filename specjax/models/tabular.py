"""Tiny languages with an exact law: to test a sampler, a rule or a drafter by enumeration.

The next token depends on the last `order` tokens and on the position, and the model reads the tokens from its cache: a
stale, shifted or missing cache row changes the law, so a chi-square over whole generations sees it.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.language_model import LanguageModel
from specjax.warp import DEFAULT_WARP, Warp, log_probs

PERIOD = 3  # the law repeats over positions with this period


def tabular(key: Array, vocab_size: int, *, order: int = 2, spread: float = 1.5) -> LanguageModel:
  """A random language over `vocab_size` tokens: logits normal with standard deviation `spread`, one table row for each
  (position mod 3, last `order` tokens); positions before the first token count as a token of their own.
  """
  table = spread * jax.random.normal(key, (PERIOD, *[vocab_size + 1] * order, vocab_size))
  return from_table(table)


def from_table(table: Array) -> LanguageModel:
  """The language with logits float32[period, V+1, ..., V+1, V]: (position mod period, tokens oldest first, next token).

  Token id V stands for "before the text". -inf forbids a token. Raises ValueError for a table of another shape.
  """
  vocab_size = table.shape[-1]
  if table.ndim < 2 or any(size != vocab_size + 1 for size in table.shape[1:-1]):
    raise ValueError(f"table has shape {table.shape}; it must be [period, V+1, ..., V+1, V].")
  return LanguageModel(
    params=jnp.asarray(table, jnp.float32),
    apply=_apply,
    init_cache=_init_cache,
    vocab_size=vocab_size,
  )


def recurrent(model: LanguageModel) -> LanguageModel:
  """The same language with a state in place of a cache by position: it must be rewound, and ignores `start`.

  model: of `tabular` or `from_table`. The state is the last tokens and their number; past ones are kept for `rewind`.
  """
  order, vocab_size = model.params.ndim - 2, model.vocab_size

  def init_cache(params: Array, batch: int, max_length: int) -> dict[str, Array]:
    return {
      "position": jnp.zeros(batch, jnp.int32),
      "past": jnp.full((batch, max_length + 1, order), vocab_size, jnp.int32),  # the state at each position
    }

  def rewind(cache: dict[str, Array], length: Array) -> dict[str, Array]:
    return cache | {"position": length}

  def apply(params: Array, tokens: Array, cache: dict[str, Array], start: Array) -> tuple[Array, dict[str, Array]]:
    del start
    row = jnp.arange(tokens.shape[0])

    def feed(cache: dict[str, Array], token: Array) -> tuple[dict[str, Array], Array]:
      position, past = cache["position"], cache["past"]
      state = jnp.concatenate([past[row, position, 1:], token[:, None]], axis=1)
      logits = params[(position % params.shape[0], *state.T)]
      return {"position": position + 1, "past": past.at[row, position + 1].set(state, mode="drop")}, logits

    cache, logits = lax.scan(feed, cache, tokens.T)
    return jnp.moveaxis(logits, 0, 1), cache

  return LanguageModel(model.params, apply, init_cache, vocab_size, rewind=rewind)


def interleave(models: Sequence[LanguageModel]) -> LanguageModel:
  """One model for a batch in which row b speaks `models[b % len(models)]`: many languages in one program.

  The models are tabular, with tables of one shape. Raises ValueError for others.
  """
  shapes = {np.shape(model.params) for model in models}
  if len(shapes) != 1 or any(model.apply is not _apply for model in models):
    raise ValueError(f"need one tabular model or more, with tables of one shape; got the shapes {sorted(shapes)}.")
  tables = jnp.stack([model.params for model in models])
  return LanguageModel(tables, _apply_interleaved, _init_cache, models[0].vocab_size)


def _init_cache(params: Array, batch: int, max_length: int) -> Array:
  # Filled with a real token: a read of a row that was never written is as wrong as it would be in a real cache.
  return jnp.zeros((batch, max_length), jnp.int32)


def _apply(params: Array, tokens: Array, cache: Array, start: Array) -> tuple[Array, Array]:
  context, cache = _read(params.shape, tokens, cache, start)
  return params[context], cache


def _apply_interleaved(params: Array, tokens: Array, cache: Array, start: Array) -> tuple[Array, Array]:
  context, cache = _read(params.shape[1:], tokens, cache, start)
  model = jnp.broadcast_to(jnp.arange(tokens.shape[0])[:, None] % params.shape[0], tokens.shape)
  return params[(model, *context)], cache


def _read(shape: tuple[int, ...], tokens: Array, cache: Array, start: Array) -> tuple[tuple[Array, ...], Array]:
  """Writes the tokens; returns the index into a table of this shape, of arrays [B, T], and the cache."""
  period, vocab_size, order = shape[0], shape[-1], len(shape) - 2
  write = jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (at,)))
  cache = write(cache, tokens, start)
  positions = start[:, None] + jnp.arange(tokens.shape[1])[None]
  context = [positions % period]
  for back in range(order - 1, -1, -1):
    seen = jnp.take_along_axis(cache, jnp.maximum(positions - back, 0), axis=1)
    context.append(jnp.where(positions >= back, seen, vocab_size))
  return tuple(context), cache


def sequences(vocab_size: int, length: int) -> np.ndarray:
  """All continuations of `length` tokens, int32[V^length, length], the last token varying fastest."""
  return np.array(list(itertools.product(range(vocab_size), repeat=length)), np.int32).reshape(
    vocab_size**length, length
  )


def law(
  model: LanguageModel,
  prompt: Sequence[int],
  length: int,
  *,
  warp: Warp = DEFAULT_WARP,
  stop_ids: Sequence[int] = (),
) -> dict[tuple[int, ...], float]:
  """The exact law of plain sampling: continuation -> probability, over all of up to `length` tokens.

  A continuation ends at its first stop token. Works for any `LanguageModel`; V^length continuations are scored, in
  float32 a step and float64 over the steps. The warp's fields are scalars. Raises ValueError for a prompt that is empty
  or holds ids that the model lacks.
  """
  prompt = [int(token) for token in prompt]
  if not prompt or not all(0 <= token < model.vocab_size for token in prompt):
    raise ValueError(f"prompt={prompt} must hold one token or more, of 0 to {model.vocab_size - 1}.")
  ends = sequences(model.vocab_size, length)
  tokens = jnp.concatenate([jnp.tile(jnp.asarray(prompt, jnp.int32), (len(ends), 1)), ends], axis=1)
  log_p = laws(model, tokens, warp.per_row(len(ends)))[:, len(prompt) - 1 : -1]
  log_p = np.asarray(jnp.take_along_axis(log_p, ends[..., None], axis=-1)[..., 0], np.float64)
  probabilities: dict[tuple[int, ...], float] = {}
  for row, steps in zip(ends, log_p, strict=True):
    stops = np.flatnonzero(np.isin(row, list(stop_ids)))
    used = stops[0] + 1 if stops.size else length
    probability = float(np.exp(steps[:used].sum()))
    if probability > 0:
      probabilities[tuple(int(t) for t in row[:used])] = probability
  return probabilities


@jax.jit
def laws(model: LanguageModel, tokens: Array, warp: Warp) -> Array:
  """log p float32[B, L, V]: the warped law behind every token of tokens[B, L], by one pass over the whole text."""
  cache = model.init_cache(model.params, *tokens.shape)
  logits, _ = model.apply(model.params, tokens, cache, jnp.zeros(tokens.shape[0], jnp.int32))
  return log_probs(logits, warp)
