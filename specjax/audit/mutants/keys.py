"""Planted faults in who consumes which random bits. Those within a drafter's own draws are with the drafters."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax import keys, warp
from specjax.audit.engine import Engine, Models
from specjax.audit.mutants.base import Mutant
from specjax.audit.mutants.drafts import Rigged
from specjax.audit.mutants.rules import assemble, assemble_block
from specjax.draft import Drafter
from specjax.keys import Purpose
from specjax.language_model import LanguageModel
from specjax.sampler import SpecState
from specjax.warp import Warp


def uniforms_by_position(key: Array, gamma: int) -> Array:
  return jax.vmap(lambda k: keys.uniform(keys.fold(k, Purpose.ACCEPT)))(key[:gamma])


def draw_by_position(key: Array, log_weights: Array, n: Array) -> Array:
  return warp.categorical(keys.fold(key[n], Purpose.NEXT), log_weights)


def _draw_from_the_draft_noise(key: Array, log_weights: Array, n: Array) -> Array:
  # A clone, as jax can be told to refuse the reuse that this fault consists of.
  return warp.gumbel_argmax(jax.random.clone(key[n]), log_weights)


# Exact, though drafts, u and next tokens are keyed by position: no decision on a draft looks at later ones.
token_by_position = assemble(uniforms=uniforms_by_position, draw=draw_by_position, noise="position")
block_by_position = assemble_block(uniforms=uniforms_by_position, draw=draw_by_position, noise="position")
residual_from_the_draft_noise = assemble(
  uniforms=uniforms_by_position, draw=_draw_from_the_draft_noise, noise="position"
)


def _one_key(state: SpecState, target: LanguageModel) -> SpecState:
  return dataclasses.replace(state, key=jnp.broadcast_to(state.key[0], state.key.shape))


def _keys_by_place(state: SpecState, target: LanguageModel) -> SpecState:
  row = jnp.arange(len(state.length))
  return dataclasses.replace(state, key=jax.vmap(jax.random.fold_in)(state.key, row))


def _keys_by_batch_size(state: SpecState, target: LanguageModel) -> SpecState:
  return dataclasses.replace(state, key=jax.vmap(jax.random.fold_in, (0, None))(state.key, len(state.length)))


def _drafts_by_row(inner, state, context, gamma, asked):
  key = jax.vmap(jax.random.fold_in)(context.key, jnp.arange(len(context.length)))
  return inner.propose(state, dataclasses.replace(context, key=key), gamma)


def _own_drafts(target: LanguageModel, drafter: Drafter, asked: Warp) -> Models:
  return target, Rigged(drafter, asked, _drafts_by_row), asked


ROWS = "permuted rows"

MUTANTS = (
  Mutant("draft noise used again for the residual", "drafts and residuals are drawn from one Gumbel vector", True,
         "one round", Engine(rule=residual_from_the_draft_noise)),
  Mutant("block: noise by position", "a position behind a rejection is judged again by bits that have decided", True,
         "joint law", Engine(rule=block_by_position)),
  Mutant("one key for all rows", "every row draws the same", True, ROWS, Engine(begin=_one_key)),
  Mutant("u shared by rows", "rows draft for themselves, and share u and residual noise", True, ROWS,
         Engine(begin=_one_key, models=_own_drafts)),
  Mutant("keys by place in the batch", "a row's draws depend on where it stands", False, ROWS,
         Engine(begin=_keys_by_place)),
  Mutant("keys by batch size", "a row's draws depend on how many others there are", False, "batch of one",
         Engine(begin=_keys_by_batch_size)),
)  # fmt: skip
