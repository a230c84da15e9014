"""Drafts by looking the last few tokens up in the text so far: no parameters, no law of its own but one-hot.

Known as prompt lookup. It pays where text repeats itself (code, summaries, edits) and costs almost nothing elsewhere.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax import warp
from specjax.draft.base import Context, DraftState, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NGramDrafter:
  """Proposes what followed the latest earlier occurrence of the last n tokens, the longest n first.

  n runs from `max_ngram` down to `min_ngram`. A row without a match drafts nothing. A continuation that reaches the end
  of the text goes on through the drafts themselves, so a loop of any period is drafted in full.
  """

  max_ngram: int = dataclasses.field(default=3, metadata={"static": True})
  min_ngram: int = dataclasses.field(default=1, metadata={"static": True})

  def __post_init__(self):
    low, high = self.min_ngram, self.max_ngram
    if not (isinstance(low, int) and isinstance(high, int) and 1 <= low <= high):
      raise ValueError(f"need integers 1 <= min_ngram <= max_ngram, got min_ngram={low!r}, max_ngram={high!r}.")

  def init(self, batch: int, max_length: int) -> DraftState:
    del batch, max_length
    return ()

  def prefill(self, state: DraftState, tokens: Array, lengths: Array, chunk: int) -> DraftState:
    del tokens, lengths, chunk
    return state

  def propose(self, state: DraftState, context: Context, num_draft_tokens: int) -> Proposal:
    source = jax.vmap(self._find)(context.tokens, context.length)
    period = jnp.maximum(context.length - source, 1)
    # A continuation that has run into the drafts repeats with this period.
    offset = jnp.arange(num_draft_tokens)[None] % period[:, None]
    tokens = jnp.take_along_axis(context.tokens, jnp.maximum(source, 0)[:, None] + offset, axis=1)
    return Proposal(
      tokens=tokens,
      log_q=warp.one_hot_law(tokens, context.vocab_size),
      num_drafted=jnp.where(source >= 0, num_draft_tokens, 0),
      state=state,
    )

  def _find(self, tokens: Array, length: Array) -> Array:
    """Where the continuation of the best match starts in tokens[L]; -1 without a match."""
    ends = jnp.arange(tokens.shape[0])  # a candidate match ends at this position, and must have a continuation
    matched = ends < length - 1
    best = jnp.int32(-1)
    for n in range(1, self.max_ngram + 1):
      back = n - 1
      last = tokens[jnp.maximum(length - n, 0)]
      shifted = jnp.roll(tokens, back)  # shifted[e] == tokens[e - back]
      matched &= (shifted == last) & (ends >= back)
      found = jnp.where(matched, ends, -1).max()
      if n >= self.min_ngram:
        best = jnp.where(found >= 0, found + 1, best)
    return best
