"""Same graph, same bits: does a position's arithmetic depend on the row of the pass that computes it?

Speculative sampling scores a position in whatever row of a (gamma+1)-row pass it falls into; plain sampling in the only
row of its own. Same mathematics, another floating-point graph, and so another text now and then. If plain sampling goes
through (gamma+1)-row passes, too (`specjax.sample(..., fixed_graph=True)`), all that is left to differ is the row, and
where the cache of that position was written from. On a backend whose products sum every row in one order that changes
no bit, and the texts are equal: greedy, and under the `coupled` rule at any temperature. That is the "identical
outputs" of arXiv 2211.17192, which no law alone can promise.

A backend says nowhere whether it is one of these, so `row_error` tries it. Nothing here samples.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.language_model import LanguageModel, empty_cache, run

_found: dict[object, float] = {}  # of `require_row_independence`, by what decides about the program


def row_error(target: LanguageModel, batch: int, max_length: int, num_draft_tokens: int) -> float:
  """Feeds the same random text through (gamma+1)-row passes that advance by 1, by gamma+1, and by something between.

  Returns the largest difference of a position's logits between the three, in logits; 0.0 means that no bit differed
  (NaN counts as a difference, and is returned; a token that no pass has, -inf, is none). Rows of the batch stand at
  different positions, a single row at the cache's start and then at its end; the tokens behind the advance are garbage
  each time, and the cache, of `max_length` slots, is written by each run for itself.

  Costs 5 (gamma + 1) passes or so, twice that for a single row, and a compilation. Raises ValueError where `max_length`
  has no room for two passes.
  """
  return _trial(target, batch, max_length, num_draft_tokens)[0]


def _trial(target: LanguageModel, batch: int, max_length: int, num_draft_tokens: int) -> tuple[float, bool]:
  """`row_error`, and whether logits differed from position to position: those of zero weights don't, and prove nothing
  of other weights."""
  width, random = num_draft_tokens + 1, np.random.default_rng(0)
  if max_length < 2 * width:
    raise ValueError(
      f"max_length={max_length} must be at least {2 * width}: two passes of num_draft_tokens + 1 tokens."
    )
  count = min(3 * width, max_length - width)  # positions
  text = random.integers(0, target.num_ids, (batch, count), np.int32)
  last = max_length - count - width  # the pass behind it must fit
  placed = np.linspace(0, last, batch).astype(np.int32)

  def logits(advances: list[int], starts: np.ndarray) -> np.ndarray:
    cache, out, at = empty_cache(target, batch, max_length), [], 0
    for advance in advances:
      advance = min(advance, count - at)
      if advance == 0:
        break
      garbage = random.integers(0, target.num_ids, (batch, width - advance), np.int32)
      fed = np.concatenate([text[:, at : at + advance], garbage], axis=1)
      found, cache = _pass(target, jnp.asarray(fed), cache, jnp.asarray(starts + at))
      out.append(np.asarray(found)[:, :advance])
      at += advance
    return np.concatenate(out, axis=1)

  errors, varied = [], False
  for starts in [placed] if batch > 1 else [placed, placed + last]:
    one_by_one = logits([1] * count, starts)
    varied |= bool((one_by_one != one_by_one[:1, :1]).any())
    for advances in [width] * count, random.integers(1, width + 1, count).tolist():
      other = logits(advances, starts)
      with np.errstate(invalid="ignore"):
        errors.append(np.abs(np.where(one_by_one == other, 0.0, one_by_one - other)).max(initial=0.0))
  return float(max(errors, key=lambda error: (np.isnan(error), error))), varied


def require_row_independence(target: LanguageModel, batch: int, max_length: int, num_draft_tokens: int) -> None:
  """Raises RuntimeError where `row_error` finds a difference, since no fixed graph can then promise equal texts.

  It is tried once for each function, shape and device (again after a model whose logits are all the same). Values that
  are traced can't be tried; nothing is checked then.
  Raises ValueError for a model whose logits are NaN.
  """
  leaves, tree = jax.tree.flatten(target)
  if num_draft_tokens == 0 or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    return
  placed = tuple((jnp.shape(leaf), str(jnp.result_type(leaf)), getattr(leaf, "sharding", None)) for leaf in leaves)
  key = tree, placed, batch, num_draft_tokens, max_length, jax.default_backend(), _precision()
  if key not in _found:
    error, varied = _trial(target, batch, max_length, num_draft_tokens)
    if np.isnan(error):  # says something of these values, nothing of the program
      raise ValueError("fixed_graph: the target's logits of random tokens are not finite numbers: some are NaN.")
    if not varied:
      return
    _found[key] = error
  if _found[key] != 0:
    raise RuntimeError(
      f"fixed_graph: on this backend ({jax.default_backend()}) a position's logits depend on the row of the "
      f"{num_draft_tokens + 1}-row pass that computes it (by up to {_found[key]:.2g}), so plain and speculative "
      "sampling can't agree bit for bit. Try another num_draft_tokens or batch size, another dtype or form of the "
      "model, or do without fixed_graph: specjax.numerics.explain tells rounding from faults."
    )


def _precision() -> str:
  return str(jax.config.jax_default_matmul_precision)  # pyrefly: ignore[missing-attribute]


@functools.partial(jax.jit, donate_argnums=2)
def _pass(target: LanguageModel, tokens: Array, cache, start: Array):
  return run(target, tokens, cache, start)
