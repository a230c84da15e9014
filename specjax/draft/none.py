"""No drafts at all: plain sampling through the passes of speculative sampling."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax import warp
from specjax.draft.base import Context, DraftState, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoDrafter:
  """Proposes nothing, so a round emits one token, which the target drew; its pass has gamma + 1 rows all the same.

  `sample(..., fixed_graph=True)` is sampling with this drafter. See `specjax.fixed_graph` for what it is good for.
  """

  def init(self, batch: int, max_length: int) -> DraftState:
    del batch, max_length
    return ()

  def prefill(self, state: DraftState, tokens: Array, lengths: Array, chunk: int) -> DraftState:
    del tokens, lengths, chunk
    return state

  def propose(self, state: DraftState, context: Context, num_draft_tokens: int) -> Proposal:
    none = jnp.zeros((context.length.shape[0], num_draft_tokens), jnp.int32), jnp.zeros_like(context.length)
    # Behind a barrier, or a compiler might see that only the first row of a pass counts, and compute no other.
    tokens, num_drafted = lax.optimization_barrier(none)
    return Proposal(tokens, warp.one_hot_law(tokens, context.vocab_size), num_drafted, state)
