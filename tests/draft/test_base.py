"""What a drafter draws with: bits of its own a draft, or those of its absolute position; and over which ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Warp, warp
from specjax.draft import Context, ModelDrafter
from specjax.models import tabular

B, V = 64, 5
LOG_Q = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (B, V)))


def context(length, **settings):
  return Context(
    tokens=jnp.zeros((B, 40), jnp.int32),
    length=length,
    key=jax.random.split(jax.random.key(0), B),
    warp=Warp().per_row(B),
    target_cache=(),
    vocab_size=V,
    **settings,
  )


def test_drafts_have_bits_of_their_own_and_know_no_position():
  lengths = jnp.arange(1, B + 1)
  draws = np.stack([context(lengths).draw(i, LOG_Q) for i in range(3)])
  moved = np.stack([context(lengths + 7).draw(i, LOG_Q) for i in range(3)])
  np.testing.assert_array_equal(draws, moved)
  assert (draws[0] != draws[1]).any()
  assert (draws[1] != draws[2]).any()


def test_shared_noise_is_that_of_the_position():
  """Draft 2 behind a text of length n is draft 0 behind one of length n + 2, and the Gumbel argmax under its key."""
  lengths = jnp.arange(1, B + 1)
  late = context(lengths, shares_noise=True).draw(2, LOG_Q)
  early = context(lengths + 2, shares_noise=True).draw(0, LOG_Q)
  np.testing.assert_array_equal(late, early)
  keys = jax.vmap(jax.random.fold_in)(context(lengths).key, lengths + 2)
  np.testing.assert_array_equal(late, jax.vmap(warp.gumbel_argmax)(keys, LOG_Q))
  assert (late != context(lengths, shares_noise=True).draw(0, LOG_Q)).any()


@pytest.mark.parametrize(("draft_size", "allowed"), [(3, 3), (7, V)])
def test_only_ids_that_both_models_have_are_drafted(draft_size, allowed):
  """An id beyond the draft model's own would be read from outside its embedding."""
  drafter = ModelDrafter(tabular.tabular(jax.random.key(2), draft_size, spread=0.1))
  proposal = drafter.propose(drafter.init(B, 40), context(jnp.full(B, 4)), 3)
  log_q = np.asarray(proposal.log_q)
  assert log_q.shape == (B, 3, V)
  assert np.isfinite(log_q[..., :allowed]).all()
  assert (log_q[..., allowed:] == -np.inf).all()
  assert set(np.unique(proposal.tokens)) == set(range(allowed))
