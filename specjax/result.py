"""What a sampling run returns: tokens, log-probabilities and statistics. Nothing here computes a draw."""

import dataclasses

import jax
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
  """Counts a row, of emitted tokens only; what a stop token or a limit cut off is not counted.

  rounds: int32[B], target passes after the prompt's.
  generated: int32[B], tokens emitted.
  drafted, accepted: int32[B].
  tested, accepted_at: int32[B, gamma], how often draft i of a round was tested (all before it accepted), and passed.
  overlap: float32[B], sum over tested drafts of sum_v min(p(v), q(v)).
  """

  rounds: Array
  generated: Array
  drafted: Array
  accepted: Array
  tested: Array
  accepted_at: Array
  overlap: Array

  @property
  def alpha(self) -> Array:
    """float32[B]: mean of sum_v min(p, q) over the row's tested drafts; NaN where none was tested."""
    return self.overlap / self.tested.sum(-1).astype(self.overlap.dtype)

  @property
  def pooled_alpha(self) -> Array:
    """Scalar: the same mean over the tested drafts of all rows."""
    return self.overlap.sum() / self.tested.sum().astype(self.overlap.dtype)

  @property
  def acceptance_rate(self) -> Array:
    """Scalar: accepted / drafted, pooled over rows; NaN where nothing was drafted."""
    return self.accepted.sum() / self.drafted.sum()

  @property
  def block_efficiency(self) -> Array:
    """Scalar: tokens per target pass, pooled over rows; NaN before the first round."""
    return self.generated.sum() / self.rounds.sum()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampleResult:
  """Generations of B rows.

  tokens: int32[B, P + max_new]; the prompt, the generated tokens right behind it in each row, 0 after.
  lengths: int32[B], prompt included.
  logprobs: float32[B, P + max_new], log p of each generated token under the warped target law, 0 elsewhere. A NaN says
    that the target's logits were not finite there, or that the rule's verdict could not be: see `step`.
  stats: see `Stats`.
  """

  tokens: Array
  lengths: Array
  logprobs: Array
  stats: Stats

  def cut(self, width: int) -> "SampleResult":
    """The same result in buffers of `width` slots."""
    return dataclasses.replace(self, tokens=self.tokens[:, :width], logprobs=self.logprobs[:, :width])
