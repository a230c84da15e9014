"""Single passes and drafts to be timed: PASSES of them in one program, each waiting for the one before.

One dispatch then weighs little, and a cache that is handed from call to call is never copied or made anew.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

import specjax
from specjax import keys
from specjax.draft.base import Context, Drafter, DraftState
from specjax.language_model import Cache, LanguageModel
from specjax.language_model import run as run_model

PASSES = 8


def target_passes(target: LanguageModel, width: int, slots: int, start: int) -> Callable[[], Array]:
  """A call that runs PASSES passes over `width` tokens at positions start.. of a cache with `slots` slots, batch 1."""
  caches = [target.init_cache(target.params, 1, slots)]

  def call() -> Array:
    tokens, cache = _target_passes(target, caches.pop(), jnp.full(1, start, jnp.int32), width=width)
    caches.append(cache)
    return tokens

  return call


def draft_passes(
  drafter: Drafter, target: LanguageModel, tokens: ArrayLike, length: int, gamma: int
) -> Callable[[], Array]:
  """A call that drafts `gamma` tokens behind tokens[1, :length], PASSES times."""
  tokens = jnp.asarray(tokens)
  states = [drafter.init(*tokens.shape)]

  def call() -> Array:
    lengths = jnp.full(1, length, jnp.int32)
    total, state = _draft_passes(drafter, states.pop(), tokens, lengths, gamma, target.vocab_size)
    states.append(state)
    return total

  return call


@functools.partial(jax.jit, static_argnames="width", donate_argnums=1)
def _target_passes(target: LanguageModel, cache: Cache, start: Array, *, width: int) -> tuple[Array, Cache]:
  def once(_: Array, carry):
    tokens, cache = carry
    logits, cache = run_model(target, tokens, cache, start)
    return logits.argmax(-1).astype(jnp.int32), cache

  return lax.fori_loop(0, PASSES, once, (jnp.ones((1, width), jnp.int32), cache))


@functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=1)
def _draft_passes(
  drafter: Drafter, state: DraftState, tokens: Array, length: Array, gamma: int, vocab_size: int
) -> tuple[Array, DraftState]:
  def once(i: Array, carry):
    tokens, total, state = carry
    key = keys.row_keys(jax.random.fold_in(jax.random.key(0), i), 1)
    proposal = drafter.propose(state, Context(tokens, length, key, specjax.Warp().per_row(1), (), vocab_size), gamma)
    tokens = tokens.at[:, 0].set(proposal.tokens[:, -1])  # each changes the text that the next one reads
    return tokens, total + jnp.exp(proposal.log_q).sum(), proposal.state

  _, total, state = lax.fori_loop(0, PASSES, once, (tokens, jnp.float32(0), state))
  return total, state
