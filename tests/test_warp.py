"""The warped law against a float64 sort, and the draw against exact laws, far into the tail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.extend.random import define_prng_impl

from specjax.warp import Warp, block_shape, categorical, gumbel_argmax, log_probs, one_hot_law, pick

LEAST_P_VALUE = 1e-5
law_of = jax.jit(log_probs)


def reference(logits, temperature, top_k, top_p, min_p):
  """The kept set and log-law of one row by sorting, in float64 from the float32 scaled logits on."""
  if temperature == 0:
    kept = np.arange(logits.size) == logits.argmax()
    return kept, np.where(kept, 0.0, -np.inf)
  with np.errstate(over="ignore", divide="ignore"):
    scaled = ((logits - logits.max()) / np.float32(temperature)).astype(np.float64)
    kept = scaled > -np.inf
    if top_k:
      kept &= scaled >= np.sort(scaled)[::-1][min(top_k, scaled.size) - 1]
    if top_p < 1:
      by_rank = np.sort(scaled[kept])[::-1]
      mass = np.cumsum(np.exp(by_rank))
      kept &= scaled >= by_rank[np.argmax(mass >= top_p * mass[-1])]
    kept &= scaled >= np.log(min_p)
    scaled = np.where(kept, scaled, -np.inf)
    return kept, scaled - np.log(np.exp(scaled).sum())


def logits_of(kind, rng, vocab_size):
  normal = rng.normal(size=vocab_size)
  best = normal == normal.max()
  return {
    "normal": lambda: 3 * normal,
    "ties": lambda: np.round(normal),
    "all equal": lambda: np.full(vocab_size, 2.5),
    "holes": lambda: np.where((rng.random(vocab_size) < 0.5) & ~best, -np.inf, normal),
    "one hot": lambda: np.where(best, 0.0, -1e9),
    "only one": lambda: np.where(best, -5.0, -np.inf),
    "huge": lambda: 1e30 * normal,
    "tiny": lambda: 1e-6 * normal,
    "far from zero": lambda: 1e4 + normal,
    "signed zeros": lambda: np.where(normal > 0, 0.0, -0.0) - (np.abs(normal) > 1),
  }[kind]().astype(np.float32)


KINDS = ["normal", "ties", "all equal", "holes", "one hot", "only one", "huge", "tiny", "far from zero", "signed zeros"]
TEMPERATURES = [0.0, 1e-30, 0.3, 0.7, 1.0, 1.5, 1e30]


def random_warp(rng, rows, vocab_size):
  """A warp of one random setting a row."""
  return Warp(
    temperature=rng.choice(TEMPERATURES, rows).astype(np.float32),
    top_k=rng.choice([0, 0, 1, 2, 5, vocab_size, vocab_size + 7], rows).astype(np.int32),
    top_p=rng.choice([1.0, 1.0, 1e-6, 0.1, 0.5, 0.8, 0.95, 0.999], rows).astype(np.float32),
    min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 1.0], rows).astype(np.float32),
  )


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 4099])
def test_log_probs_is_the_sorted_law(vocab_size):
  """Every kind of logits under random settings, mixed in one batch. Where a threshold lies within rounding of a token,
  the kept set may be that of either side."""
  rng = np.random.default_rng(vocab_size)
  kinds = KINDS * 12
  logits = np.stack([logits_of(kind, rng, vocab_size) for kind in kinds])
  warp = random_warp(rng, len(kinds), vocab_size)
  settings = zip(*map(np.asarray, (warp.temperature, warp.top_k, warp.top_p, warp.min_p)), strict=True)
  actual = np.asarray(law_of(logits, warp))
  assert actual.dtype == np.float32
  decided = 0
  for row, (kind, (temperature, top_k, top_p, min_p)) in enumerate(zip(kinds, settings, strict=True)):
    given = f"{kind} {temperature=} {top_k=} {top_p=} {min_p=}"
    kept, law = reference(logits[row], temperature, top_k, top_p, min_p)
    least, most = top_p * (1 - 2e-6), min(top_p * (1 + 2e-6), 1)
    fewer, _ = reference(logits[row], temperature, top_k, least, min(min_p * (1 + 2e-6), 1))
    more, _ = reference(logits[row], temperature, top_k, most, min_p * (1 - 2e-6))
    here = actual[row] > -np.inf
    assert (fewer <= here).all(), given
    assert (here <= more).all(), given
    if (fewer == more).all():
      decided += 1
      np.testing.assert_array_equal(here, kept, given)
      np.testing.assert_allclose(actual[row][here], law[here], rtol=2e-6, atol=2e-6, err_msg=given)
    np.testing.assert_allclose(np.exp(actual[row].astype(np.float64)).sum(), 1, rtol=1e-5, err_msg=given)
  assert decided > 0.9 * len(kinds)


def kept(probabilities, **setting):
  law = law_of(jnp.log(jnp.array([probabilities])), Warp(**setting))[0]
  return np.flatnonzero(law > -jnp.inf).tolist()


@pytest.mark.parametrize(
  ("setting", "ids"),
  [
    ({"top_k": 1}, [0]),
    ({"top_k": 2}, [0, 2]),
    ({"top_k": 3}, [0, 1, 2, 3]),  # a tie with the third is kept
    ({"top_k": 99}, [0, 1, 2, 3]),
    ({"top_p": 1e-9}, [0]),
    ({"top_p": 0.499}, [0]),
    ({"top_p": 0.501}, [0, 2]),
    ({"top_p": 0.749}, [0, 2]),
    ({"top_p": 0.751}, [0, 1, 2, 3]),  # one of two equals would do
    ({"top_p": 1.0}, [0, 1, 2, 3]),
    ({"min_p": 0.501}, [0]),
    ({"min_p": 0.499}, [0, 2]),
    ({"min_p": 0.251}, [0, 2]),
    ({"min_p": 0.249}, [0, 1, 2, 3]),
    ({"min_p": 1.0}, [0]),
    ({"temperature": 0.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1}, [0]),
  ],
)
def test_kept_tokens(setting, ids):
  assert kept([0.5, 0.125, 0.25, 0.125], **setting) == ids


def test_temperature_comes_before_top_p():
  """At T = 1.5 the law flattens, so .8 of the mass takes four tokens in place of three."""
  probabilities = [0.5, 0.2, 0.15, 0.1, 0.05]
  assert kept(probabilities, temperature=1.0, top_p=0.8) == [0, 1, 2]
  assert kept(probabilities, temperature=1.5, top_p=0.8) == [0, 1, 2, 3]
  law = np.exp(law_of(jnp.log(jnp.array([probabilities])), Warp(temperature=1.5, top_p=0.8))[0])
  flat = np.array(probabilities[:4]) ** (1 / 1.5)
  np.testing.assert_allclose(law, [*flat / flat.sum(), 0], atol=1e-6)


def test_top_k_comes_before_top_p():
  """Of the two tokens that top-k leaves, (.57, .43), the first has .55 of the mass; of all four it has not."""
  assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.55) == [0, 1]
  assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.55, top_k=2) == [0]


def test_filters_leave_other_rows_alone():
  """Rows without a filter are the same bit for bit, whatever filters the rest of the batch uses."""
  logits = 3 * np.random.default_rng(0).normal(size=(12, 3, 1000)).astype(np.float32)
  temperature = np.resize(np.float32([0.7, 1.0, 1.5]), 12)
  odd = np.arange(12) % 2 == 1
  plain = np.asarray(law_of(logits, Warp(temperature).per_row(12)))
  filters = np.where(odd, 5, 0), np.where(odd, 0.6, 1.0), np.where(odd, 0.1, 0.0)
  filtered = np.asarray(law_of(logits, Warp(temperature, *filters).per_row(12)))
  np.testing.assert_array_equal(filtered[~odd], plain[~odd])
  assert np.isfinite(plain).all()
  assert (np.isinf(filtered[odd]).sum(-1) >= 995).all()


def test_greedy_rows_in_a_mixed_batch():
  """Temperatures (0, 1, .7): the greedy row is one-hot on the lowest id among equals, the others are untouched."""
  logits = np.tile(np.float32([[1.0, 3.0, -np.inf, 3.0]]), (3, 1))
  law = law_of(logits, Warp(temperature=np.float32([0.0, 1.0, 0.7])))
  np.testing.assert_array_equal(law[0], [-np.inf, 0, -np.inf, -np.inf])
  np.testing.assert_array_equal(law[1:], law_of(logits, Warp(temperature=np.float32([0.5, 1.0, 0.7])))[1:])
  for row in (1, 2):
    expected = np.exp(logits[0].astype(np.float64) / [1.0, 0.7][row - 1])
    np.testing.assert_allclose(np.exp(law[row]), expected / expected.sum(), rtol=1e-5)
  zeros = np.float32([[-0.0, 0.0, -0.0]])
  np.testing.assert_array_equal(law_of(zeros, Warp(temperature=0.0)), [[0, -np.inf, -np.inf]])


def test_every_form_of_the_call_agrees():
  """Scalars or one value a row, [B, V] or [B, T, V], plain or vmapped over rows or seeds."""
  logits = 2 * np.random.default_rng(1).normal(size=(3, 2, 50)).astype(np.float32)
  scalars = Warp(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02)
  rows = scalars.per_row(3)
  assert [x.dtype.name for x in jax.tree.leaves(rows)] == ["float32", "int32", "float32", "float32"]
  expected = law_of(logits, rows)
  assert 0 < np.isinf(expected).sum() < expected.size
  forms = {
    "scalars": law_of(logits, scalars),
    "numpy scalars": law_of(logits, Warp(np.float32(0.8), np.int32(20), np.float32(0.9), np.float32(0.02))),
    "by position": np.stack([law_of(logits[:, t], rows) for t in range(2)], 1),
    "vmap over rows": jax.jit(jax.vmap(log_probs))(logits, rows),
    "vmap over seeds": jax.jit(jax.vmap(log_probs, (0, None)))(np.stack([logits, logits]), rows)[1],
  }
  for name, law in forms.items():
    np.testing.assert_array_equal(np.isinf(law), np.isinf(expected), name)
    np.testing.assert_allclose(law, expected, rtol=1e-6, atol=1e-6, err_msg=name)


def test_settings_are_dynamic():
  traces = []

  @jax.jit
  def law(logits, warp):
    traces.append(1)
    return log_probs(logits, warp.per_row(2))

  for temperature, top_k, top_p in [(1.0, 0, 1.0), (0.0, 3, 0.5), (2.0, 1, 0.1)]:
    law(np.zeros((2, 8), np.float32), Warp(temperature, top_k, top_p))
  assert len(traces) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
  "setting", [Warp(), Warp(0.0), Warp(0.5), Warp(top_k=2), Warp(top_p=0.5), Warp(min_p=0.3), Warp(0.0, 2, 0.5, 0.3)]
)
def test_broken_logits_show_as_nan(setting, bad):
  """Under greedy sampling too, where an argmax would pass for a token of probability 1; the other row is unharmed."""
  broken, sound = np.array([0.0, bad, 1.0], np.float32), np.array([0.0, 2.0, 1.0], np.float32)
  law = law_of(np.stack([broken, sound]), setting)
  assert np.isnan(law[0]).all()
  np.testing.assert_array_equal(law[1], law_of(np.stack([sound, sound]), setting)[0])
  assert np.isnan(law_of(np.full((2, 3), -np.inf, np.float32), setting)).all()


@pytest.mark.parametrize("setting", [Warp(), Warp(0.0), Warp(top_k=20), Warp(top_p=0.5), Warp(min_p=0.3)])
@pytest.mark.parametrize("at", [0, 499, 999])
def test_one_nan_among_many_logits_shows(setting, at):
  """Compiled for many, a maximum passes NaN over; the token must not be taken for one that does not exist."""
  logits = np.random.default_rng(at).normal(size=(4, 8, 1000)).astype(np.float32)
  logits[1:3, 2:, at] = np.nan
  law = np.asarray(jax.jit(log_probs)(logits, setting.per_row(4)))
  np.testing.assert_array_equal(np.isnan(law).all(-1), np.isnan(logits).any(-1))
  np.testing.assert_array_equal(np.isnan(law).any(-1), np.isnan(logits).any(-1))


def test_bfloat16_logits():
  logits = (4 * np.random.default_rng(2).normal(size=(3, 2, 50))).astype(jnp.bfloat16)
  warp = Warp(np.float32([0.0, 1.0, 0.3]), top_k=30, top_p=0.9).per_row(3)
  law = law_of(logits, warp)
  assert law.dtype == jnp.float32
  np.testing.assert_array_equal(law, law_of(logits.astype(np.float32), warp))


def test_ids_that_do_not_exist_change_nothing():
  """A vocabulary padded with -inf has the law of the unpadded one."""
  rng = np.random.default_rng(3)
  logits = rng.normal(size=(60, 23)).astype(np.float32)
  warp = random_warp(rng, 60, 23)
  padded = law_of(np.pad(logits, ((0, 0), (0, 9)), constant_values=-np.inf), warp)
  np.testing.assert_allclose(padded[:, :23], law_of(logits, warp), rtol=1e-6, atol=1e-6)
  assert (padded[:, 23:] == -np.inf).all()


def test_pick_and_one_hot_law():
  values = jnp.array([[[1.0, -jnp.inf, jnp.nan], [4.0, 5.0, 6.0]]])
  np.testing.assert_array_equal(pick(values, jnp.array([[0, 2]])), [[1, 6]])
  np.testing.assert_array_equal(pick(values, jnp.array([[1, 0]])), [[-np.inf, 4]])
  np.testing.assert_array_equal(pick(values, jnp.array([[3, -1]])), [[np.nan, np.nan]])
  np.testing.assert_array_equal(one_hot_law(jnp.array([[2, 0]]), 3), [[[-np.inf, -np.inf, 0], [0, -np.inf, -np.inf]]])


# The draw.

draw = jax.jit(jax.vmap(categorical, (0, None)))


def draws(log_weights, count, chunk=20_000):
  """`count` independent draws, as numpy."""
  keys = jax.random.split(jax.random.key(0), count)
  log_weights = np.asarray(log_weights, np.float32)
  return np.concatenate([draw(keys[start : start + chunk], log_weights) for start in range(0, count, chunk)])


def assert_law(tokens, probabilities):
  """Chi-square, tokens of fewer than 5 expected pooled; none of probability 0."""
  expected = len(tokens) * np.asarray(probabilities, np.float64)
  observed = np.bincount(tokens, minlength=len(expected)).astype(np.float64)
  assert len(observed) == len(expected)
  assert observed[expected == 0].sum() == 0
  rare = expected < 5
  observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
  some = expected > 0
  assert scipy.stats.chisquare(observed[some], expected[some]).pvalue > LEAST_P_VALUE


def zipf(vocab_size):
  """Heavy and light tokens in random order."""
  weights = 1.0 / np.arange(1, vocab_size + 1)
  return np.random.default_rng(0).permutation(weights / weights.sum())


@pytest.mark.parametrize(("vocab_size", "count"), [(2, 200_000), (17, 400_000), (1000, 200_000), (49_152, 10_000)])
def test_draws_follow_their_law(vocab_size, count):
  probabilities = zipf(vocab_size)
  chunk = 2_500 if vocab_size > 1000 else 20_000
  assert_law(draws(np.log(probabilities), count, chunk), probabilities)


@pytest.mark.parametrize("offset", [-80.0, 40.0])
def test_weights_need_no_normalising(offset):
  assert_law(draws(np.log(zipf(17)) + offset, 200_000), zipf(17))


@pytest.mark.parametrize("vocab_size", [17, 1001])
def test_the_padded_tail_is_never_drawn(vocab_size):
  """No vocabulary here is whole blocks: the last is filled up, and its padding outweighs no token, however light."""
  assert_law(draws(np.full(vocab_size, -1e3), 60_000), np.full(vocab_size, 1 / vocab_size))


def test_tokens_of_weight_zero_are_never_drawn():
  """Single holes, a whole block of 5, and the end of the last one; a million draws."""
  probabilities = zipf(17)
  probabilities[[0, 3, *range(5, 10), 16]] = 0
  probabilities /= probabilities.sum()
  with np.errstate(divide="ignore"):
    assert_law(draws(np.log(probabilities), 1_000_000), probabilities)


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 1000])
def test_all_weight_on_one_token(vocab_size):
  for token in (0, vocab_size // 2, vocab_size - 1):
    log_weights = np.full(vocab_size, -np.inf, np.float32)
    log_weights[token] = -30.0
    tokens = draws(log_weights, 20_000)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, token)


def test_block_and_token_are_drawn_independently():
  """Equal weights: the position in a block says nothing about the block."""
  tokens = draws(np.zeros(17), 200_000)
  table = np.bincount(tokens[tokens < 15], minlength=15).reshape(3, 5)
  assert scipy.stats.chi2_contingency(table).pvalue > LEAST_P_VALUE


RARE = 20  # bits


def rare_key(seed):
  """A key under which the noise of the second of two candidates is drawn given an event of probability 2^-20.

  The first 20 bits of that candidate's random word are 0, which a Gumbel of 14 and more implies. Whatever this
  candidate wins only through such noise is so won 2^20 times as often, and a weight of 1e-9 can be measured.
  """
  wrap, data = jax.random.wrap_key_data, jax.random.key_data

  def random_bits(key, bit_width, shape):
    words = jax.random.bits(wrap(key), shape, jnp.dtype(f"uint{bit_width}"))
    if shape[-1:] != (2,):
      return words
    flat = words.reshape(-1)
    return flat.at[1].set(flat[1] >> RARE).reshape(shape)

  implementation = define_prng_impl(
    key_shape=data(jax.random.key(0)).shape,
    seed=lambda seed: data(jax.random.key(seed)),
    split=lambda key, shape: data(jax.random.split(wrap(key), shape)),
    random_bits=random_bits,
    fold_in=lambda key, value: data(jax.random.fold_in(wrap(key), value)),
    name="rare",
    tag="rare",
  )
  return jax.random.key(seed, impl=implementation)


@pytest.mark.parametrize(
  ("weights", "token"),
  [
    ([1.0, 1e-9], 1),  # inside a block
    ([0.5, 0.5, 1e-9, 0.0], 2),  # a block
  ],
)
def test_a_weight_of_one_in_a_billion(weights, token):
  """Drawn as often as it should be: by `jax.random.categorical` in its default mode, never."""
  count = 400_000
  with np.errstate(divide="ignore"):
    tokens = draw(jax.random.split(rare_key(0), count), np.log(np.float32(weights)))
  hits = int((tokens == token).sum())
  assert scipy.stats.binomtest(hits, count, 1e-9 * 2**RARE).pvalue > LEAST_P_VALUE


def test_noise_goes_with_the_square_root(monkeypatch):
  """448 noise values for 49,152 tokens."""
  drawn = []
  real = jax.random.categorical
  monkeypatch.setattr(jax.random, "categorical", lambda key, x, **kw: drawn.append(x.size) or real(key, x, **kw))
  jax.eval_shape(categorical, jax.random.key(0), jnp.zeros(49_152))
  assert sum(drawn) == 448


@pytest.mark.parametrize(
  ("vocab_size", "shape"),
  [
    *((1, (1, 1)), (2, (1, 2)), (3, (3, 1)), (17, (4, 5)), (1001, (32, 32)), (50_257, (224, 225))),
    *((49_152, (192, 256)), (32_000, (128, 250)), (128_256, (384, 334)), (151_936, (128, 1187))),
  ],
)
def test_blocks_are_parts_of_a_split_vocabulary(vocab_size, shape):
  """Real vocabularies, the last four, are whole blocks, and as many as 64 devices share evenly."""
  assert block_shape(vocab_size) == shape


# The draw that two laws can share.

draw_shared = jax.jit(jax.vmap(gumbel_argmax, (0, None)))


def test_gumbel_argmax_follows_its_law():
  """Holes are never drawn, and a law without normalising is as good."""
  probabilities = zipf(17)
  probabilities[[0, 3, 16]] = 0
  with np.errstate(divide="ignore"):
    tokens = draw_shared(jax.random.split(jax.random.key(0), 400_000), np.log(np.float32(probabilities)) - 30)
  assert tokens.dtype == jnp.int32
  assert_law(np.asarray(tokens), probabilities / probabilities.sum())


def test_gumbel_argmax_of_one_certain_token():
  """As greedy settings give it: the noise is finite."""
  log_weights = one_hot_law(jnp.int32(3), 7)
  assert (draw_shared(jax.random.split(jax.random.key(1), 20_000), log_weights) == 3).all()


def test_gumbel_argmax_is_right_in_the_tail():
  count = 400_000
  tokens = draw_shared(jax.random.split(rare_key(0), count), np.log(np.float32([1.0, 1e-9])))
  hits = int((tokens == 1).sum())
  assert scipy.stats.binomtest(hits, count, 1e-9 * 2**RARE).pvalue > LEAST_P_VALUE


def test_two_laws_under_one_key_choose_the_same_token_as_often_as_the_formula_says():
  p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.3, 0.2, 0.4])
  both = [1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(4)) for i in range(3)]
  keys = jax.random.split(jax.random.key(2), 200_000)
  with np.errstate(divide="ignore"):
    a = np.asarray(draw_shared(keys, np.log(np.float32(p))))
    b = np.asarray(draw_shared(jax.random.clone(keys), np.log(np.float32(q))))  # the same bits, as is the point
  for token, expected in enumerate(both):
    hits = int(((a == token) & (b == token)).sum())
    assert scipy.stats.binomtest(hits, len(a), expected).pvalue > LEAST_P_VALUE
