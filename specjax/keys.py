"""Who may consume which random bits.

Every draw of a generation has its own key, folded from (row key, the row's round counter, purpose, index). A row's bits
so depend on its own key and its own history alone, not on its batch mates, and no two decisions share bits: an engine
that drew drafts and residuals from one noise vector failed a chi-square test of its accepted law by 1585 against 70.

The exception are rules that share bits on purpose: theirs are folded from (row key, absolute position), whatever the
round, and both the drafter and the rule consume them. See `specjax.verify.coupled` for when that is exact.

Nothing here draws a token; `specjax.warp` does.
"""

import enum

import jax
import jax.numpy as jnp
from jax import Array

NO_ROUND = 2**32 - 1  # stands where a round's number does, and is none


class Purpose(enum.IntEnum):
  """What a key may be consumed for. A new kind of draw gets a new member, never a used one."""

  DRAFT = 0  # the drafter's own draws
  VERIFY = 1  # everything a verifier draws; it folds ACCEPT and NEXT from here
  ACCEPT = 2  # u_i of the acceptance test of draft i
  NEXT = 3  # the residual or bonus token; under `match`, the target's own token at each position
  COUPLED = 4  # the token at an absolute position, draft and target alike


def row_keys(key: Array, batch: int) -> Array:
  """One key a row: `fold_in(key, b)` from a single key, or the key[B] that was given."""
  if key.ndim == 1:
    return key
  return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))


def fold(key: Array, purpose: Purpose, index: Array | int = 0) -> Array:
  """The key of one draw: folds `purpose`, then `index`, into a single key."""
  return jax.random.fold_in(jax.random.fold_in(key, purpose), index)


def round_keys(key: Array, round: Array) -> Array:
  """Folds each row's round counter int32[B] into its key[B]."""
  return jax.vmap(jax.random.fold_in)(key, round)


def position_keys(key: Array) -> Array:
  """key[B] to fold absolute positions into, from each row's key[B]: the same in every round."""
  return jax.vmap(lambda row: fold(jax.random.fold_in(row, NO_ROUND), Purpose.COUPLED))(key)


def uniform(key: Array) -> Array:
  """One float32 u in [0, 1) with P(u < r) right to a relative 2^-24 for every r down to 2^-48.

  `jax.random.uniform` has 2^23 values, so it would accept a ratio of 1e-9 either never or 119 times too often (u = 0).
  """
  high, low = (jax.random.bits(key, (2,), jnp.uint32) >> 8).astype(jnp.float32)
  # The low word may only be added where the sum is far enough from 1 not to round up to it.
  return high * 2.0**-24 + jnp.where(high < 2.0**23, low * 2.0**-48, 0.0)
