"""Drafts with a smaller language model, sampled under the same warp as the target."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax import warp
from specjax.draft.base import Context, DraftState, Proposal
from specjax.language_model import (
  LanguageModel,
  cache_specs,
  empty_cache,
  fit_vocabulary,
  place_laws,
  prefill,
  run,
  take_window,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafter:
  """Draws gamma tokens one after the other from `model`; its state is the model's cache.

  The vocabulary may be padded differently from the target's: ids the target lacks get no mass, ids the model lacks are
  never drafted.
  """

  model: LanguageModel

  def init(self, batch: int, max_length: int) -> DraftState:
    return empty_cache(self.model, batch, max_length)

  def prefill(self, state: DraftState, tokens: Array, lengths: Array, chunk: int) -> DraftState:
    return prefill(self.model, state, tokens, lengths, chunk)

  def specs(self, state: DraftState) -> Any:
    """Where the state lies on a mesh; None for a model that is not placed."""
    return None if self.model.placement is None else cache_specs(self.model, state)

  def propose(self, state: DraftState, context: Context, num_draft_tokens: int) -> Proposal:
    # After full acceptance the model has not seen its own last draft, so the first pass feeds the last two tokens;
    # feeding a token again rewrites what the cache holds. A row of length 1 feeds its only token, and garbage behind.
    start = jnp.maximum(context.length - 2, 0)
    logits, cache = run(self.model, take_window(context.tokens, start, 2), state, start)
    last = context.length - 1 - start
    logits = jnp.where(last[:, None] == 0, logits[:, 0], logits[:, 1])

    def draw(logits: Array, index: Array) -> tuple[Array, Array]:
      log_q = warp.log_probs(fit_vocabulary(logits, context.vocab_size), context.warp)
      # A model that is whole on every device draws on every device, and waits for none.
      log_q = place_laws(self.model, log_q)
      return context.draw(index, log_q), log_q

    def extend(carry, index: Array):
      tokens, cache = carry
      logits, cache = run(self.model, tokens[:, None], cache, context.length + index - 1)
      tokens, log_q = draw(logits[:, 0], index)
      return (tokens, cache), (tokens, log_q)

    first, first_log_q = draw(logits, jnp.int32(0))
    (_, cache), (rest, rest_log_q) = lax.scan(extend, (first, cache), jnp.arange(1, num_draft_tokens))
    return Proposal(
      tokens=jnp.concatenate([first[:, None], rest.T], axis=1),
      log_q=jnp.concatenate([first_log_q[:, None], jnp.moveaxis(rest_log_q, 0, 1)], axis=1),
      num_drafted=jnp.full_like(context.length, num_draft_tokens),
      state=cache,
    )
