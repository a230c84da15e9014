"""What a drafter is: a pytree that guesses the next tokens and says from which law it drew them.

No drafter knows the target's probabilities or the acceptance rule; the sampler hands it the text so far.
"""

import dataclasses
from typing import Any, Protocol

import jax
from jax import Array

from specjax.language_model import Cache
from specjax.warp import Warp, categorical, gumbel_argmax

DraftState = Any  # a pytree of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
  """What a drafter sees of a generation.

  tokens: int32[B, L]; tokens[b, :length[b]] is final, what lies behind is not to be read.
  length: int32[B], at least 1.
  key: key[B] for this round's drafts; `draw` consumes it.
  warp: the settings of the law, fields of shape [B]; a drafter that draws tokens draws them from its own law so warped.
  target_cache: the target's cache after its last pass, positions < length-1.
  vocab_size: V of the target; `log_q` is over these.
  shares_noise: whether the acceptance rule draws from the same bits on purpose, keyed by position.
  """

  tokens: Array
  length: Array
  key: Array
  warp: Warp
  target_cache: Cache
  vocab_size: int = dataclasses.field(metadata={"static": True})
  shares_noise: bool = dataclasses.field(default=False, metadata={"static": True})

  def draw(self, index: Array | int, log_q: Array) -> Array:
    """int32[B]: draft `index` of every row, drawn from log_q[B, V]. Once an index."""
    if self.shares_noise:  # the bits of the draft's absolute position
      keys = jax.vmap(jax.random.fold_in)(self.key, self.length + index)
      return jax.vmap(gumbel_argmax)(keys, log_q)
    keys = jax.vmap(jax.random.fold_in, (0, None))(self.key, index)
    return jax.vmap(categorical)(keys, log_q)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
  """A round's drafts.

  tokens: int32[B, gamma].
  log_q: float32[B, gamma, V], the law each token was really drawn from (given those before it); one-hot for a
    deterministic drafter.
  num_drafted: int32[B], how many of them count. It may depend on the text and on earlier drafts' laws, never on the
    value of a draft that it decides upon: that would bias the output.
  state: the drafter's state.
  """

  tokens: Array
  log_q: Array
  num_drafted: Array
  state: DraftState


class Drafter(Protocol):
  """A pytree with three pure functions; `max_length` is the room in the buffers, slack included.

  A fourth, `specs(state)`, may say where its state lies on a mesh: a pytree of PartitionSpecs, or None. Without it
  rows, the first axis, are split as the target's are.
  """

  def init(self, batch: int, max_length: int) -> DraftState:
    """State before any token was seen."""
    ...

  def prefill(self, state: DraftState, tokens: Array, lengths: Array, chunk: int) -> DraftState:
    """State after reading tokens[b, :lengths[b]]."""
    ...

  def propose(self, state: DraftState, context: Context, num_draft_tokens: int) -> Proposal:
    """Drafts `num_draft_tokens` >= 1 tokens behind `context.tokens[b, :length[b]]`."""
    ...
