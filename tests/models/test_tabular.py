"""The toys that exactness is measured with, against their own tables read by hand in numpy."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import LanguageModel, Warp
from specjax.models import tabular

V = 3


def random_table(order, *, vocab_size=V, period=3, seed=0):
  shape = (period, *[vocab_size + 1] * order, vocab_size)
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(logits):
  weights = np.exp(logits.astype(np.float64))
  return weights / weights.sum()


def by_hand(table, prompt, continuation):
  """The probability of a continuation, a step at a time from the table."""
  period, vocab_size, order = table.shape[0], table.shape[-1], table.ndim - 2
  text, probability = list(prompt), 1.0
  for token in continuation:
    last = len(text) - 1  # the position whose logits say the next token
    context = [text[last - back] if last >= back else vocab_size for back in range(order - 1, -1, -1)]
    probability *= softmax(table[(last % period, *context)])[token]
    text.append(token)
  return probability


@pytest.mark.parametrize(
  ("order", "prompt"), [(0, (0, 1)), *itertools.product([1, 2, 3], [(2,), (1, 1, 0, 2, 0)]), (3, (0, 1))]
)
def test_law_is_the_product_along_the_table(order, prompt):
  """Prompts shorter and longer than the order and the period."""
  table = random_table(order)
  law = tabular.law(tabular.from_table(table), prompt, 3)
  assert list(law) == list(itertools.product(range(V), repeat=3))
  for continuation, probability in law.items():
    assert probability == pytest.approx(by_hand(table, prompt, continuation), rel=1e-5)
  assert math.fsum(law.values()) == pytest.approx(1, abs=1e-6)


def test_law_of_one_step_written_out():
  """Order 2, prompt (2, 0): position 1, context (2, 0), then position 2, context (0, x)."""
  table = random_table(2)
  law = tabular.law(tabular.from_table(table), (2, 0), 2)
  first = softmax(table[1, 2, 0])
  for x, y in itertools.product(range(V), repeat=2):
    assert law[x, y] == pytest.approx(first[x] * softmax(table[2, 0, x])[y], rel=1e-5)


def test_every_position_and_context_has_its_own_row():
  """No two entries of a random table are read for the same step: changing one changes exactly the texts that use it."""
  table = random_table(2)
  law = tabular.law(tabular.from_table(table), (1,), 3)
  changed = table.copy()
  changed[1, 1, 2] += [1, 0, -1]  # after the text (1, 2)
  other = tabular.law(tabular.from_table(changed), (1,), 3)
  assert {text for text in law if abs(law[text] - other[text]) > 1e-6} == {text for text in law if text[0] == 2}


def test_length_zero():
  assert tabular.law(tabular.from_table(random_table(1)), (0,), 0) == {(): 1.0}


@pytest.mark.parametrize("stop_ids", [(0,), (1, 2), (0, 1, 2)])
def test_stop_tokens_end_a_text(stop_ids):
  """The law of stopped texts is that of the full ones, summed over what could have followed."""
  model = tabular.from_table(random_table(2))
  full, stopped = tabular.law(model, (1,), 4), tabular.law(model, (1,), 4, stop_ids=stop_ids)
  sums: dict[tuple[int, ...], float] = {}
  for text, probability in full.items():
    ends = [i for i, token in enumerate(text) if token in stop_ids]
    text = text[: ends[0] + 1] if ends else text
    sums[text] = sums.get(text, 0) + probability
  assert stopped == pytest.approx(sums, rel=1e-5)
  assert math.fsum(stopped.values()) == pytest.approx(1, abs=1e-6)


def test_minus_infinity_forbids():
  table = random_table(1)
  table[..., 1] = -np.inf
  table[0, 0, 2] = -np.inf
  law = tabular.law(tabular.from_table(table), (0,), 3)
  assert all(1 not in text and text[0] != 2 for text in law)
  assert len(law) == 4
  assert math.fsum(law.values()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
  ("warp", "step"),
  [
    (Warp(temperature=0.5), lambda p: p**2 / (p**2).sum()),
    (Warp(top_k=1), lambda p: (p == p.max()).astype(float)),
    (Warp(temperature=0.0), lambda p: (p == p.max()).astype(float)),
    (Warp(top_k=2), lambda p: np.where(p > p.min(), p, 0) / (1 - p.min())),
  ],
)
def test_warped_law(warp, step):
  table = random_table(1)
  law = tabular.law(tabular.from_table(table), (1,), 2, warp=warp)
  first = step(softmax(table[0, 1]))
  expected = {(x, y): first[x] * step(softmax(table[1, x]))[y] for x, y in itertools.product(range(V), repeat=2)}
  assert law == pytest.approx({text: p for text, p in expected.items() if p > 0}, rel=1e-5)


def test_law_of_another_model():
  """Any language model will do; here the next token is the sum of all before it, modulo 3."""

  def apply(params, tokens, cache, start):
    del params, start
    total = jnp.cumsum(tokens, axis=1) % V
    return jnp.where(jnp.arange(V) == total[..., None], 0.0, -jnp.inf), cache

  with jax.numpy_rank_promotion("allow"):
    law = tabular.law(LanguageModel((), apply, lambda params, batch, length: (), V), (1, 1), 3)
  assert law == {(2, 1, 2): 1.0}


def test_sequences():
  np.testing.assert_array_equal(tabular.sequences(2, 2), [[0, 0], [0, 1], [1, 0], [1, 1]])
  assert tabular.sequences(3, 0).shape == (1, 0)
  assert tabular.sequences(1, 4).tolist() == [[0, 0, 0, 0]]
  assert tabular.sequences(4, 3).dtype == np.int32


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_cache_is_read(order):
  """Fed whole, or token by token over rejected ones, the logits are those of the text. A cache that lost a token gives
  others."""
  model = tabular.from_table(random_table(order, vocab_size=4))
  feed = jax.jit(model.apply)
  texts = np.array([[1, 3, 0, 2, 2, 1, 3], [0, 0, 1, 3, 2, 2, 0]], np.int32)
  empty = model.init_cache(model.params, 2, 9)
  whole = np.asarray(feed(model.params, texts, empty, np.zeros(2, np.int32))[0])

  cache = empty
  for i in range(7):
    at = np.full(2, i, np.int32)
    _, cache = feed(model.params, np.full((2, 3), 3, np.int32), cache, at)  # to be rejected
    logits, cache = feed(model.params, texts[:, i : i + 1], cache, at)
    np.testing.assert_array_equal(logits[:, 0], whole[:, i])
  np.testing.assert_array_equal(cache[:, :7], texts)

  lost = np.array(cache)
  lost[:, 3] = 0
  at = np.full(2, 4, np.int32)
  seen = (feed(model.params, texts[:, 4:5], lost, at)[0][:, 0] != whole[:, 4]).any()
  assert seen == (order > 1)


def test_rows_stand_at_their_own_positions():
  """One row at its start, one in the middle of its text."""
  table = random_table(2)
  model = tabular.from_table(table)
  cache = jnp.array([[0, 0, 0, 0], [1, 2, 0, 0]])
  logits, cache = model.apply(model.params, jnp.array([[2], [0]]), cache, jnp.array([0, 2]))
  np.testing.assert_array_equal(logits[:, 0], [table[0, V, 2], table[2, 2, 0]])
  np.testing.assert_array_equal(cache, [[2, 0, 0, 0], [1, 2, 0, 0]])


def test_random_languages():
  model = tabular.tabular(jax.random.key(0), 4, order=2, spread=2.0)
  assert model.params.shape == (tabular.PERIOD, 5, 5, 4)
  assert np.std(model.params) == pytest.approx(2, rel=0.15)
  assert model.vocab_size == 4
  other = tabular.tabular(jax.random.key(1), 4, spread=2.0)
  assert (np.asarray(model.params) != np.asarray(other.params)).all()


@pytest.mark.parametrize("shape", [(3,), (3, 3, 3), (3, 4, 3, 3), (3, 3, 4, 3)])
def test_tables_of_a_wrong_shape(shape):
  with pytest.raises(ValueError, match=r"\[period, V\+1, ..., V\+1, V\]"):
    tabular.from_table(jnp.zeros(shape))


@pytest.mark.parametrize("prompt", [(), (3,), (0, -1)])
def test_prompts_without_a_law(prompt):
  with pytest.raises(ValueError, match=r"prompt=.*0 to 2"):
    tabular.law(tabular.from_table(random_table(1)), prompt, 1)
