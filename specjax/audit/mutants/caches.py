"""Planted faults in caches, positions, warps and the loop around the rounds.

Wrong positions are planted by `moved`: a model whose every pass starts some slots before or behind the right one. It
works with every cache that is kept by position, whatever is in it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from specjax import warp as warps
from specjax.audit.engine import Engine, Models
from specjax.audit.mutants.base import Mutant
from specjax.draft import Drafter
from specjax.language_model import Cache, LanguageModel, prefill, take_window
from specjax.sampler import RoundInfo, SpecState
from specjax.warp import Warp


class Moved(NamedTuple):
  cache: Cache
  back: Array  # int32[B], slots by which passes start too early


def moved(target: LanguageModel, drafter: Drafter, asked: Warp) -> Models:
  def apply(params, tokens, cache, start):
    logits, own = target.apply(params, tokens, cache.cache, start - cache.back)
    return logits, Moved(own, cache.back)

  def init_cache(params, batch, max_length):
    return Moved(target.init_cache(params, batch, max_length), jnp.zeros(batch, jnp.int32))

  return _wrapped(target, apply, init_cache, lambda cache, length: length - cache.back), drafter, asked


def _wrapped(target: LanguageModel, apply, init_cache, inner_length=lambda cache, length: length) -> LanguageModel:
  """A model whose cache has the target's in it, which is rewound to `inner_length`."""
  own = target.rewind

  def rewind(cache, length):
    assert own is not None
    return cache._replace(cache=own(cache.cache, inner_length(cache, length)))

  return dataclasses.replace(target, apply=apply, init_cache=init_cache, rewind=own and rewind)


def _move(state: SpecState, by: Array | int) -> SpecState:
  cache = state.target_cache
  return dataclasses.replace(state, target_cache=cache._replace(back=cache.back + by))


def _from_the_prompt_on(by: int) -> Engine:
  return Engine(models=moved, begin=lambda state, target: _move(state, by))


def _each_round(by: Callable[[Array, Array, int], Array]) -> Engine:
  """by: (accepted drafts int32[B], which rows took part bool[B], gamma) -> how far the next rounds start too early."""

  def after(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
    active = info.num_emitted > 0
    shift = by(info.num_accepted, active, info.draft_tokens.shape[1])
    return _move(state, jnp.where(active, shift, 0))

  return Engine(models=moved, after=after)


def _padding_read(state: SpecState, target: LanguageModel) -> SpecState:
  """Reads all prompts to the width of the longest."""
  longest = state.prompt_length.max()
  fed = jnp.broadcast_to(longest - 1, state.length.shape)
  cache = prefill(target, state.target_cache, state.tokens, fed, 1)
  return _move(dataclasses.replace(state, target_cache=cache), state.prompt_length - longest)


class Kept(NamedTuple):
  cache: Cache
  tokens: Array  # int32[B, L], the first that was fed at each position
  used: Array  # int32[B], positions that were fed


def _stale(target: LanguageModel, drafter: Drafter, asked: Warp) -> Models:
  """A position that was fed keeps its first token: the cache of a rejected round is not overwritten."""

  def apply(params, tokens, cache, start):
    positions = start[:, None] + jnp.arange(tokens.shape[1])[None]
    tokens = jnp.where(positions < cache.used[:, None], take_window(cache.tokens, start, tokens.shape[1]), tokens)
    logits, own = target.apply(params, tokens, cache.cache, start)
    rows = jnp.arange(len(start))[:, None]
    kept = cache.tokens.at[rows, positions].set(tokens, mode="drop")
    return logits, Kept(own, kept, jnp.maximum(cache.used, start + tokens.shape[1]))

  def init_cache(params, batch, max_length):
    return Kept(
      target.init_cache(params, batch, max_length),
      jnp.zeros((batch, max_length), jnp.int32),
      jnp.zeros(batch, jnp.int32),
    )

  return _wrapped(target, apply, init_cache), drafter, asked


def _prompt_alone_used(state: SpecState, target: LanguageModel) -> SpecState:
  """What prefill fed behind a prompt is no round's."""
  return dataclasses.replace(state, target_cache=state.target_cache._replace(used=state.length - 1))


def _without_slack(target: LanguageModel, drafter: Drafter, asked: Warp) -> Models:
  """The cache of a run with 3 drafts has room for prompt and new tokens, and none for drafts behind the last one."""

  def init_cache(params, batch, max_length):
    return target.init_cache(params, batch, max_length - 4)

  return dataclasses.replace(target, init_cache=init_cache), drafter, asked


def _without_rewind(target: LanguageModel, drafter: Drafter, asked: Warp) -> Models:
  return dataclasses.replace(target, rewind=None), drafter, asked


def _two_orders(target: LanguageModel, drafter: Drafter, asked: Warp) -> Models:
  """Filters come before the temperature where drafts are verified, after it for the bonus token."""
  params = (target.params, asked)

  def apply(params, tokens, cache, start):
    own, asked = params
    logits, cache = target.apply(own, tokens, cache, start)
    greedy = asked.temperature == 0
    before = dataclasses.replace(asked, temperature=jnp.where(greedy, 0.0, 1.0))
    laws = [warps.log_probs(logits, order) for order in (before, asked)]
    last = (jnp.arange(tokens.shape[1]) == tokens.shape[1] - 1)[None, :, None]
    return jnp.where(jnp.where(last, laws[1], laws[0]) > -jnp.inf, logits, -jnp.inf), cache

  def init_cache(params, batch, max_length):
    return target.init_cache(params[0], batch, max_length)

  unfiltered = Warp(temperature=asked.temperature).per_row(jnp.shape(asked.temperature)[0])
  return dataclasses.replace(target, params=params, apply=apply, init_cache=init_cache), drafter, unfiltered


def _marked_greedy(target: LanguageModel, drafter: Drafter, asked: Warp) -> Models:
  """Greedy rows are marked by the temperature -1, and divided by it."""
  marked = jnp.where(asked.temperature == 0, -1.0, asked.temperature)
  return target, drafter, dataclasses.replace(asked, temperature=marked)


def _hide_stops(state: SpecState, target: LanguageModel) -> SpecState:
  return dataclasses.replace(state, stop_ids=-1 - state.stop_ids)  # ids that no token has


def _stop_behind_the_round(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
  last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
  return dataclasses.replace(state, finished=state.finished | (last == -1 - state.stop_ids[None]).any(-1))


def _first_ends_all(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
  return dataclasses.replace(state, finished=jnp.broadcast_to(state.finished.any(), state.finished.shape))


def _looser_limit(state: SpecState, target: LanguageModel) -> SpecState:
  return dataclasses.replace(state, limit=state.limit + state.tested.shape[1])


def _limit_behind_the_round(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
  over = state.length >= state.limit - state.tested.shape[1]
  return dataclasses.replace(state, finished=state.finished | over)


LAWS, ENDS = "fresh laws", "ends"

MUTANTS = (
  Mutant("cache one slot early", "generation overwrites the prompt's last slot", True, LAWS, _from_the_prompt_on(1)),
  Mutant("cache one slot late", "generation leaves a slot behind the prompt", True, LAWS, _from_the_prompt_on(-1)),
  Mutant("rejected drafts stay", "the next round goes on behind them", True, LAWS,
         _each_round(lambda n, active, gamma: n - gamma)),
  Mutant("stale rows after a rejection", "slots that a rejected round wrote are not overwritten", True, LAWS,
         Engine(models=_stale, begin=_prompt_alone_used)),
  Mutant("rows advance by the least accepted", "a batch keeps one position, of its slowest row", True, LAWS,
         _each_round(lambda n, active, gamma: n - jnp.where(active, n, gamma).min())),
  Mutant("rows advance by the most accepted", "a batch keeps one position, of its fastest row", True, LAWS,
         _each_round(lambda n, active, gamma: n - jnp.where(active, n, 0).max())),
  Mutant("padding attended", "short prompts are read with their padding", True, LAWS,
         Engine(models=moved, begin=_padding_read)),
  Mutant("cache without slack", "a write past the end is clamped and overwrites good slots", True, LAWS,
         Engine(models=_without_slack)),
  Mutant("recurrent state not rolled back", "the state has seen what was rejected", True, "recurrent target",
         Engine(models=_without_rewind)),
  Mutant("two orders of the warp", "top-p before the temperature for drafts, after it for the bonus", True, LAWS,
         Engine(models=_two_orders)),
  Mutant("greedy rows divided by -1", "their law is turned upside down", True, "greedy", Engine(models=_marked_greedy)),
  Mutant("stop token overrun", "a stop inside an accepted block does not end the row", True, ENDS,
         Engine(begin=_hide_stops, after=_stop_behind_the_round)),
  Mutant("first row ends the batch", "rows end with the first one that does", True, ENDS,
         Engine(after=_first_ends_all)),
  Mutant("limit overrun", "a row's limit is looked at between rounds alone", True, "own draft",
         Engine(begin=_looser_limit, after=_limit_behind_the_round)),
)  # fmt: skip
