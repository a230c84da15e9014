"""The bits behind every draw: whose they are, and the uniform made from them, word by word and by the million."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.extend.random import define_prng_impl

from specjax import keys
from specjax.keys import Purpose

LEAST_P_VALUE = 1e-5


def data(key):
  return np.asarray(jax.random.key_data(key))


def given_words(high, low):
  """A key whose random bits are these two words."""
  implementation = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: seed,
    split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
    random_bits=lambda key, bit_width, shape: jnp.reshape(key, shape),
    fold_in=lambda key, value: key,
    name="given words",
    tag="given",
  )
  return jax.random.wrap_key_data(jnp.array([high, low], jnp.uint32), impl=implementation)


ALL = 0xFFFFFFFF


@pytest.mark.parametrize(
  ("high", "low", "expected"),
  [
    (0, 0, 0.0),
    (0, 1 << 8, 2.0**-48),  # the finest step
    (0, ALL, (2**24 - 1) * 2.0**-48),
    (1 << 8, 0, 2.0**-24),
    (1 << 8, 1 << 31, 1.5 * 2.0**-24),  # below the resolution of the high word
    (0x7FFFFF << 8, ALL, np.float32(0.5)),  # rounds up to where the next step begins
    (1 << 31, ALL, 0.5),
    (ALL, 0, 1 - 2.0**-24),
    (ALL, ALL, 1 - 2.0**-24),  # never 1
  ],
)
def test_uniform_of_given_words(high, low, expected):
  u = keys.uniform(given_words(high, low))
  assert u.dtype == jnp.float32
  assert u.shape == ()
  assert u == np.float32(expected)
  assert jax.jit(keys.uniform)(given_words(high, low)) == u
  assert 0 <= u < 1


def test_uniform_is_its_48_bits():
  """The first 24 bits of each word are one number below 1; float32 rounds it, relatively where the number is small."""
  rng = np.random.default_rng(0)
  numbers = np.concatenate([rng.integers(0, 1 << bits, 200) for bits in range(1, 49)] + [[0, 2**48 - 1]])
  numbers = np.unique(numbers)
  words = np.stack([numbers >> 24, numbers & (2**24 - 1)], axis=-1).astype(np.uint32) << np.uint32(8)
  words |= rng.integers(0, 256, words.shape, np.uint32)  # no use is made of the rest
  u = jax.vmap(keys.uniform)(jax.random.wrap_key_data(words, impl=jax.random.key_impl(given_words(0, 0))))
  u, exact = np.asarray(u, np.float64), numbers * 2.0**-48
  assert (np.diff(u) >= 0).all()
  assert np.abs(u - exact).max() < 2.0**-24
  small = exact < 0.49
  assert (np.abs(u - exact)[small] <= exact[small] * 2.0**-24).all()


@pytest.fixture(scope="module")
def uniforms():
  """Ten million, each from a key of its own."""
  draw = jax.jit(jax.vmap(keys.uniform))
  parts = []
  for seed in range(10):
    words = jax.random.bits(jax.random.key(seed), (1_000_000, 2), jnp.uint32)
    parts.append(np.asarray(draw(jax.random.wrap_key_data(words))))
  return np.concatenate(parts)


def test_uniform_lies_in_the_half_open_interval(uniforms):
  assert uniforms.min() >= 0
  assert uniforms.max() < 1


def test_uniform_is_uniform(uniforms):
  count = len(uniforms)
  assert abs(uniforms.mean(dtype=np.float64) - 0.5) < 4.5 / np.sqrt(12 * count)
  assert abs(uniforms.var(dtype=np.float64) - 1 / 12) < 4.5 / np.sqrt(180 * count)
  bins = np.bincount((uniforms * 256).astype(np.int64), minlength=256)
  assert scipy.stats.chisquare(bins).pvalue > LEAST_P_VALUE


@pytest.mark.parametrize("ratio", [0.5, 0.3, 1e-1, 2.0**-10, 1e-3, 1e-5, 2e-7])
def test_uniform_accepts_a_ratio_as_often_as_it_should(uniforms, ratio):
  hits = int((uniforms < np.float32(ratio)).sum())
  assert scipy.stats.binomtest(hits, len(uniforms), float(np.float32(ratio))).pvalue > LEAST_P_VALUE


def test_all_draws_of_a_generation_have_different_bits():
  """Every row, round, purpose and index, along every way that the sampler takes to a draw."""
  row = keys.row_keys(jax.random.key(0), 5)
  seen = [data(row)]
  for number in range(6):  # beyond the purposes, which are folded in like rounds
    at_round = keys.round_keys(row, jnp.full(5, number))
    seen.append(data(at_round))
    for purpose in (Purpose.DRAFT, Purpose.VERIFY):
      fold = jax.vmap(keys.fold, (0, None))
      base = fold(at_round, purpose)
      seen.append(data(base))
      seen.extend(data(jax.vmap(jax.random.fold_in, (0, None))(base, index)) for index in range(4))
      if purpose == Purpose.VERIFY:
        seen.append(data(fold(base, Purpose.NEXT)))
        seen.extend(data(jax.vmap(keys.fold, (0, None, None))(base, Purpose.ACCEPT, index)) for index in range(4))
  positions = keys.position_keys(row)
  seen.append(data(positions))
  seen.extend(data(jax.vmap(jax.random.fold_in, (0, None))(positions, position)) for position in range(9))
  everything = np.concatenate(seen)
  assert len(np.unique(everything, axis=0)) == len(everything)


def test_no_two_purposes_share_a_number():
  assert len({purpose.value for purpose in Purpose}) == len(Purpose.__members__)


def test_fold_tells_purpose_and_index_apart():
  pairs = list(itertools.product(range(6), range(6)))
  folded = np.stack([data(keys.fold(jax.random.key(1), purpose, index)) for purpose, index in pairs])
  assert len(np.unique(folded, axis=0)) == len(pairs)
  np.testing.assert_array_equal(
    data(keys.fold(jax.random.key(1), Purpose.ACCEPT)), data(keys.fold(jax.random.key(1), Purpose.ACCEPT, 0))
  )


def test_a_row_key_does_not_know_the_batch():
  """`fold_in(key, b)` whatever the batch; keys that were given stay as they are, and follow their rows."""
  key = jax.random.key(3)
  rows = data(keys.row_keys(key, 7))
  np.testing.assert_array_equal(rows[:2], data(keys.row_keys(key, 2)))
  np.testing.assert_array_equal(rows[4], data(jax.random.fold_in(key, 4)))
  own = jax.random.split(jax.random.key(4), 7)
  np.testing.assert_array_equal(data(keys.row_keys(own, 7)), data(own))

  order, counter = np.array([3, 0, 6, 2, 5, 1, 4]), jnp.arange(7) * 10
  permuted = keys.round_keys(own[order], counter[order])
  np.testing.assert_array_equal(data(permuted), data(keys.round_keys(own, counter))[order])
