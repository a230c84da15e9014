"""Prompt lookup against texts worked out by hand, and against a search written in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import NGramDrafter, Warp
from specjax.draft import Context

V = 12
GAMMA = 4
WIDTH = 24


def propose(drafter, texts, *, gamma=GAMMA, garbage=0):
  """Proposals for texts of any lengths, in buffers filled up with `garbage` (a token, or a function of the text)."""
  tokens = np.zeros((len(texts), WIDTH), np.int32)
  for row, text in enumerate(texts):
    tokens[row] = garbage(text) if callable(garbage) else garbage
    tokens[row, : len(text)] = text
  context = Context(
    tokens=jnp.asarray(tokens),
    length=jnp.array([len(text) for text in texts], jnp.int32),
    key=jax.random.split(jax.random.key(0), len(texts)),
    warp=Warp().per_row(len(texts)),
    target_cache=(),
    vocab_size=V,
  )
  return _propose(drafter, context, gamma)


_propose = jax.jit(lambda drafter, context, gamma: drafter.propose((), context, gamma), static_argnums=2)


def drafts(drafter, texts, **settings):
  """What was drafted, as lists; an empty one where nothing was."""
  proposal = propose(drafter, texts, **settings)
  return [
    row[:n].tolist() for row, n in zip(np.asarray(proposal.tokens), np.asarray(proposal.num_drafted), strict=True)
  ]


def search(text, gamma, low, high):
  """Prompt lookup as one would write it down: the longest n first, the latest match first."""
  for n in range(high, low - 1, -1):
    for end in range(len(text) - 2, n - 2, -1):
      if n < len(text) and text[end - n + 1 : end + 1] == text[-n:]:
        grown = list(text)
        for i in range(gamma):
          grown.append(grown[end + 1 + i])
        return grown[len(text) :]
  return []


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ([1, 2, 3, 4, 5, 6, 1], [2, 3, 4, 5]),  # what followed the 1
    ([1, 2, 9, 1, 3, 9, 1, 4, 9, 1], [4, 9, 1, 4]),  # "9 1" was followed by 4 most recently, not by 3
    ([1, 5, 7, 2, 5, 8, 5], [8, 5, 8, 5]),  # the latest 5, not the first; it runs into the drafts
    ([1, 2, 3, 7, 9, 3, 8, 0, 1, 2, 3], [7, 9, 3, 8]),  # "1 2 3" before the later "3"
    ([2, 3, 7, 9, 3, 8, 0, 2, 3], [7, 9, 3, 8]),  # "2 3" before the later "3"
    ([0, 1, 2, 3, 5, 6, 9, 1, 2, 3, 7, 6, 0, 1, 2, 3], [7, 6, 0, 1]),  # a fourth token does not count: the latest
    ([1, 2, 3, 4, 5], []),  # no token twice
    ([5], []),
    ([5, 5], [5, 5, 5, 5]),
    ([5, 6], []),
    ([5, 6, 5], [6, 5, 6, 5]),
    ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),  # a loop goes on
    ([7, 1, 2, 1, 2, 1], [2, 1, 2, 1]),
    ([0, 0, 0, 0], [0, 0, 0, 0]),
    ([3, 1, 1, 1, 4, 1, 1, 1], [4, 1, 1, 1]),  # the longest n, though "1 1" and "1" occur later
  ],
)
def test_texts_by_hand(text, expected):
  assert drafts(NGramDrafter(), [text]) == [expected]
  assert search(text, GAMMA, 1, 3) == expected


@pytest.mark.parametrize(("low", "high"), [(1, 3), (2, 3), (1, 1), (3, 3), (1, 5)])
def test_random_texts(low, high):
  """Few tokens, so that matches of every length and texts without one occur; ids at both ends of the vocabulary."""
  rng = np.random.default_rng(high)
  texts = [rng.choice([0, 1, V - 1], rng.integers(1, WIDTH - GAMMA)).tolist() for _ in range(200)]
  texts += [rng.integers(0, V, rng.integers(1, WIDTH - GAMMA)).tolist() for _ in range(200)]
  expected = [search(text, GAMMA, low, high) for text in texts]
  assert drafts(NGramDrafter(max_ngram=high, min_ngram=low), texts) == expected
  assert {len(drafted) for drafted in expected} == {0, GAMMA}


@pytest.mark.parametrize("period", [1, 2, 3, 5, 7])
def test_loops_are_drafted_in_full(period):
  """Of any period, also one that is longer than the drafts or that they run through several times."""
  loop = (list(range(period)) * WIDTH)[: period + 4]
  going_on = (list(range(period)) * WIDTH)[period + 4 : period + 12]
  assert drafts(NGramDrafter(), [loop], gamma=8) == [going_on]


def test_nothing_behind_the_text_is_read():
  """Garbage that would match, or go on, better than the text does."""
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, 3, rng.integers(1, WIDTH - 8)).tolist() for _ in range(100)]
  clean = drafts(NGramDrafter(), texts)
  assert drafts(NGramDrafter(), texts, garbage=texts[0][0]) == clean
  assert drafts(NGramDrafter(), texts, garbage=lambda text: np.resize(text, WIDTH)) == clean
  assert drafts(NGramDrafter(), texts, garbage=lambda text: np.resize(text[-3:], WIDTH)) == clean
  assert drafts(NGramDrafter(), [[4], [1, 2]], garbage=lambda text: np.full(WIDTH, text[-1])) == [[], []]


def test_rows_know_nothing_of_each_other():
  rng = np.random.default_rng(1)
  texts = [rng.integers(0, 4, rng.integers(1, WIDTH - GAMMA)).tolist() for _ in range(20)]
  together = drafts(NGramDrafter(), texts)
  assert together == [drafts(NGramDrafter(), [text])[0] for text in texts]
  assert drafts(NGramDrafter(), texts[::-1]) == together[::-1]


def test_a_text_that_fills_its_buffer():
  """Nothing wraps around: the first tokens are not behind the last."""
  text = [3, 4, *[5] * (WIDTH - 4), 6, 3]
  assert drafts(NGramDrafter(), [text]) == [[4, 5, 5, 5]]
  assert drafts(NGramDrafter(max_ngram=2, min_ngram=2), [text]) == [[]]
  wrapped = [1, 2, 7, *[5] * (WIDTH - 5), 9, 1]  # "9 1 2" only if the end went on at the start
  assert drafts(NGramDrafter(max_ngram=3, min_ngram=3), [wrapped]) == [[]]


def test_the_law_is_one_hot_on_the_drafts():
  proposal = propose(NGramDrafter(), [[1, 2, 3, 1], [4, 5]])
  law = np.exp(proposal.log_q)
  assert law.shape == (2, GAMMA, V)
  np.testing.assert_array_equal(law[0], np.eye(V)[[2, 3, 1, 2]])
  np.testing.assert_array_equal(law.sum(-1), 1)
  assert proposal.num_drafted.dtype == proposal.tokens.dtype == jnp.int32
  assert ((proposal.tokens >= 0) & (proposal.tokens < V)).all()


def test_it_has_no_state():
  drafter = NGramDrafter()
  state = drafter.init(2, WIDTH)
  assert not jax.tree.leaves((drafter, state))
  tokens = jnp.zeros((2, WIDTH), jnp.int32)
  assert drafter.prefill(state, tokens, jnp.array([1, 2]), 4) == state
  assert propose(drafter, [[1]]).state == state


@pytest.mark.parametrize(("low", "high"), [(0, 3), (3, 2), (-1, 1), (1, 2.5), (None, 3)])
def test_bad_settings(low, high):
  with pytest.raises(ValueError, match=f"1 <= min_ngram <= max_ngram.*min_ngram={low}.*max_ngram={high}"):
    NGramDrafter(max_ngram=high, min_ngram=low)
