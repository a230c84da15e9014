"""Do two engines sample one law? For where only their texts are at hand, and no model to score them with.

Maximum mean discrepancy with a Hamming kernel, as in Model Equality Testing (Gao et al., arXiv 2410.20247). Far weaker
than an audit against the target's own law, and says nothing about which of the two is right.
"""

import dataclasses
from typing import Any

import numpy as np
import tqdm

from specjax import checks
from specjax.audit.samples import Samples


@dataclasses.dataclass(frozen=True)
class TwoSample:
  """The result of `two_sample`.

  p_value: of two equal laws, by permutation. statistic: squared MMD a prompt, in tokens that agree, less what chance
  makes of it; threshold: what chance exceeds with probability alpha. prompts: that both have. generations: of a and b
  that were compared. length: tokens of each that were.
  """

  p_value: float
  statistic: float
  threshold: float
  prompts: int
  generations: tuple[int, int]
  length: int
  alpha: float

  @property
  def ok(self) -> bool | None:
    """False: the laws differ; True: no sign that they do; None: can't say."""
    if self.p_value <= self.alpha:
      return False
    return True if min(self.generations) >= 10 * self.prompts else None

  def __str__(self) -> str:
    words = {
      False: "DIFFERENT LAWS: the two engines do not sample the same law.",
      True: "NO SIGN OF A DIFFERENCE between the laws of the two engines.",
      None: "CAN'T SAY: take ten generations of each prompt or more from either engine.",
    }[self.ok]
    return (
      f"{words}\n- squared MMD {self.statistic:.4g} (chance: up to {self.threshold:.4g}), p = {self.p_value:.2g}; "
      f"{self.generations[0]} and {self.generations[1]} generations of {self.prompts} prompts, "
      f"{self.length} tokens of each"
    )


def two_sample(
  a: Samples, b: Samples, *, length: int | None = None, permutations: int = 2000, alpha: float = 1e-3, seed: int = 0
) -> TwoSample:
  """Tests whether the generations of a and b follow the same law, given the same prompts.

  The kernel counts the positions, of the first `length` (default: the longest generation, at most 128), at which two
  generations have the same token; behind the end of one there is none, and none equals none. Generations are exchanged
  between a and b within prompts alone, so the p-value is right however prompts differ.

  Raises ValueError where no prompt has two generations or more in both, and for settings that can't be; TypeError for
  those of other types.
  """
  _check(a, b, length, permutations, alpha, seed)
  if permutations < 1 / alpha:
    raise ValueError(f"permutations={permutations} can't give a p-value as low as alpha={alpha}: {1 / alpha:.0f} can.")
  groups = [_by_prompt(samples) for samples in (a, b)]
  shared = [prompt for prompt in groups[0] if len(groups[0][prompt]) > 1 and len(groups[1].get(prompt, ())) > 1]
  if not shared:
    raise ValueError("no prompt has two generations or more in both samples; the same prompts must be given to both.")
  longest = max(len(tokens) for samples in (a, b) for tokens in samples.tokens)
  length = min(longest, 128) if length is None else length
  random = np.random.default_rng(seed)
  values = np.zeros(permutations + 1)  # the first is the one observed
  counts = np.zeros(2, int)
  for prompt in tqdm.tqdm(shared, desc="Comparing", unit=" prompts", leave=False, disable=None):
    sizes = [len(group[prompt]) for group in groups]
    counts += sizes
    kernel = _hamming(groups[0][prompt] + groups[1][prompt], length)
    weights = np.repeat([1 / sizes[0], -1 / sizes[1]], sizes)
    shuffled = np.stack([weights, *(random.permutation(weights) for _ in range(permutations))])
    values += ((shuffled @ kernel) * shuffled).sum(-1)
  values /= len(shared)
  # The kernel's diagonal adds the same to all of them; what chance gives on average is taken away.
  return TwoSample(
    p_value=float((values >= values[0] * (1 - 1e-12)).mean()),
    statistic=float(values[0] - values[1:].mean()),
    threshold=float(np.quantile(values[1:], 1 - alpha) - values[1:].mean()),
    prompts=len(shared),
    generations=(int(counts[0]), int(counts[1])),
    length=length,
    alpha=alpha,
  )


def _check(a: Any, b: Any, length: Any, permutations: Any, alpha: Any, seed: Any) -> None:
  for name, samples in (("a", a), ("b", b)):
    if not isinstance(samples, Samples):
      raise TypeError(f"{name} must be specjax.audit.Samples, got {type(samples).__name__}; see Samples.read.")
  if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.floating):
    raise TypeError(f"alpha={alpha!r} must be a number.")
  if not 0 < alpha < 1:
    raise ValueError(f"alpha={alpha} must be above 0 and below 1.")
  for name, value, low in (("length", length, 1), ("permutations", permutations, 1), ("seed", seed, 0)):
    if name != "length" or value is not None:
      checks.whole(name, value, low)


def _by_prompt(samples: Samples) -> dict[bytes, list[np.ndarray]]:
  out: dict[bytes, list[np.ndarray]] = {}
  for prompt, tokens in zip(samples.prompts, samples.tokens, strict=True):
    out.setdefault(prompt.tobytes(), []).append(tokens)
  return out


def _hamming(generations: list[np.ndarray], length: int) -> np.ndarray:
  """Positions at which two generations agree, float64[n, n], a position at a time."""
  padded = np.full((len(generations), length), -1)
  for row, tokens in zip(padded, generations, strict=True):
    row[: len(tokens)] = tokens[:length]
  kernel = np.zeros((len(generations),) * 2)
  for column in padded.T:
    kernel += column[:, None] == column[None]
  return kernel
