"""The joint law of whole generations from `specjax.sample`, against enumeration of the target's own law.

Toy languages depend on the last two tokens and on the position, and read them from a cache, so faults in acceptance,
residual, bonus, keys, caches, lengths or warps all move the law. tests/audit/test_mutants.py shows that such tests see
them.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import verify
from specjax.audit import battery
from specjax.models import tabular
from tests.statistics import assert_exact, assert_follows, continuations

ROWS = 60_000
V = 3


@functools.cache
def language(seed: int, vocab_size: int = V, spread: float = 1.5):
  return tabular.tabular(jax.random.key(seed), vocab_size, spread=spread)


def generate(target, drafter, prompts, *, rows=ROWS, seed=0, **settings):
  """Rows of one batch cycle through the prompts (of different lengths); returns continuations by prompt."""
  lengths = np.resize([len(prompt) for prompt in prompts], rows)
  width = max(map(len, prompts))
  # The padding is a real token: reading it would be a fault that shows.
  padded = np.array([[*prompt, *[target.vocab_size - 1] * (width - len(prompt))] for prompt in prompts], np.int32)
  result = specjax.sample(
    target,
    drafter,
    np.resize(padded, (rows, width)),
    prompt_lengths=lengths,
    key=jax.random.key(seed),
    prefill_chunk=2,  # the longer prompts take several passes
    max_length=24,
    **settings,
  )
  out = continuations(result, lengths)
  return [out[i :: len(prompts)] for i in range(len(prompts))], result


PROMPTS = [(1,), (0, 2, 1, 0), (2, 2, 0, 1, 0, 1, 2)]
LOSSLESS = [name for name, rule in verify.RULES.items() if rule.lossless]


@pytest.mark.parametrize(
  ("gamma", "one_hot"), [*((gamma, False) for gamma in range(5)), (1, True), (2, True), (4, True)]
)
@pytest.mark.parametrize("rule", LOSSLESS)
def test_joint_law(rule, gamma, one_hot):
  """Every pair of target and draft under every warp, for prompts of three lengths, with and without a stop token."""
  assert_exact(battery.run(rule, num_draft_tokens=gamma, one_hot=one_hot, rows=96_000), detectable=0.035)


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_many_rounds(gamma):
  """Seven tokens of a two-token language: at gamma 4 full rounds, at least two of them."""
  target, drafter = language(3, 2, 1.0), specjax.ModelDrafter(language(4, 2, 1.0))
  prompts = [(0,), (1, 0, 1)]
  groups, result = generate(target, drafter, prompts, num_draft_tokens=gamma, max_new_tokens=7)
  assert (result.stats.accepted_at[:, gamma - 1] > 0).any()
  for prompt, observed in zip(prompts, groups, strict=True):
    assert_follows(observed, tabular.law(target, prompt, 7))


def test_limits_cut_at_every_offset():
  """Rows that end after 0 to 6 tokens in one batch: each follows the law of its own length."""
  target, drafter, prompt = language(3, 2, 1.0), specjax.ModelDrafter(language(4, 2, 1.0)), (1, 0)
  limits = list(range(7))
  groups, _ = generate(
    target, drafter, [prompt] * 7, num_draft_tokens=4, max_new_tokens=np.resize(limits, ROWS).astype(np.int32)
  )
  for limit, observed in zip(limits, groups, strict=True):
    assert_follows(observed, tabular.law(target, prompt, limit))


@pytest.mark.parametrize(("target_size", "draft_size"), [(6, 8), (8, 6)])
def test_padded_vocabularies(target_size, draft_size):
  """Ids that only one of the two has: the target's law stands, and nothing outside it is drawn."""
  target, draft = language(7, target_size), language(8, draft_size)
  groups, _ = generate(target, specjax.ModelDrafter(draft), [(5, 0)], num_draft_tokens=2, max_new_tokens=2)
  assert_follows(groups[0], tabular.law(target, (5, 0), 2))


def test_rows_and_rounds_are_independent():
  """Neighbouring rows, and the tokens of one row under a law without memory, are independent."""
  table = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.3, 0.2])), language(1).params.shape)
  target = tabular.from_table(table)
  groups, _ = generate(target, specjax.ModelDrafter(language(2)), [(0,)], num_draft_tokens=2, max_new_tokens=4)
  rows = groups[0]
  single = {(t,): p for t, p in enumerate([0.5, 0.3, 0.2])}
  pairs = {(a, b): single[(a,)] * single[(b,)] for a, b in itertools.product(range(3), repeat=2)}
  assert_follows(((a[0], b[0]) for a, b in zip(rows[::2], rows[1::2], strict=True)), pairs)
  assert_follows(((row[0], row[3]) for row in rows), pairs)
