"""Coupled verification: the same noise for draft and target, and an output that no drafter can change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import verify
from specjax.audit.battery import InTurn
from specjax.models import tabular
from specjax.verify import declare
from tests import rounds
from tests.rounds import CASES, coupled_law, match_probabilities
from tests.statistics import assert_follows, p_value

V = 5


@pytest.mark.parametrize("case", CASES)
def test_outcomes_of_a_round(case):
  assert_follows(rounds.simulate(verify.coupled, CASES[case]), coupled_law(CASES[case]))


@pytest.mark.parametrize("num_drafted", [0, 1, 2])
def test_drafts_that_do_not_exist(num_drafted):
  law = coupled_law(CASES["soft"], num_drafted)
  assert_follows(rounds.simulate(verify.coupled, CASES["soft"], num_drafted), law)


def test_the_enumerated_law_is_exact():
  for laws in CASES.values():
    for num_drafted in range(laws.gamma + 1):
      law = rounds.complete(coupled_law(laws, num_drafted), laws, laws.gamma + 1)
      expected = rounds.plain_law(laws, laws.gamma + 1)
      np.testing.assert_allclose([law.get(x, 0.0) for x in expected], list(expected.values()), atol=1e-12)


def test_match_probability_lies_between_its_bounds():
  rng = np.random.default_rng(0)
  for _ in range(200):
    p, q = rng.dirichlet(np.full(6, rng.choice([0.1, 1.0, 5.0])), 2)
    overlap = np.minimum(p, q).sum()
    assert overlap / (2 - overlap) - 1e-12 <= match_probabilities(p, q).sum() <= overlap + 1e-12


@declare(lossless=False, noise="position")
def a_position_late(log_p, log_q, draft_tokens, num_drafted, key):
  """Draws from the noise of the next position: exact in one round, but the draft's noise is another's."""
  return verify.coupled(log_p, log_q, draft_tokens, num_drafted, jnp.roll(key, -1))


@declare(lossless=False, noise="position")
def residual_after_rejection(log_p, log_q, draft_tokens, num_drafted, key):
  """Emits the residual's draw from the same noise, as the token rule would."""
  verdict = verify.coupled(log_p, log_q, draft_tokens, num_drafted, key)
  n = verdict.num_accepted
  q = jnp.where(n < num_drafted, jnp.exp(log_q[jnp.minimum(n, log_q.shape[0] - 1)]), 0)
  noise = jax.random.gumbel(jax.random.clone(key)[n], log_p[0].shape)  # a clone: this reuse is the fault
  token = (jnp.log(jnp.maximum(jnp.exp(log_p[n]) - q, 0)) + noise).argmax().astype(jnp.int32)
  return verify.Verdict(n, token)


@pytest.mark.parametrize("rule", [a_position_late, residual_after_rejection])
def test_faults_are_seen(rule):
  assert p_value(rounds.simulate(rule, CASES["soft"]), coupled_law(CASES["soft"])) < 1e-9


# Whole generations.


@functools.cache
def language(seed: int):
  """With a stop token, the last, that is not said too soon."""
  return tabular.from_table(tabular.tabular(jax.random.key(seed), V).params.at[..., V - 1].add(-2.0))


def drafters():
  """The target itself, another model, and no model."""
  each = specjax.ModelDrafter(language(1)), specjax.ModelDrafter(language(2)), specjax.NGramDrafter()
  return InTurn(each, np.arange(len(each)))


ROWS = 60  # sizes of cycles below have few common factors with the three drafters
LENGTHS = np.resize([1, 4, 7, 2], ROWS)
SETTINGS = specjax.Warp(
  temperature=np.resize(np.float32([0, 0.7, 1, 1]), ROWS), top_p=np.resize(np.float32([1, 0.8, 0.9, 1]), ROWS)
)


def generate(drafter, gamma):
  prompts = np.random.default_rng(0).integers(0, V, (ROWS, 7)).astype(np.int32)
  return specjax.sample(
    language(1),
    drafter,
    prompts,
    key=jax.random.key(5),
    prompt_lengths=LENGTHS,
    warp=SETTINGS,
    eos_id=V - 1,
    max_new_tokens=np.resize([40, 23, 9, 31, 0], ROWS),
    num_draft_tokens=gamma,
    verifier="coupled",
  )


@functools.cache
def plain():
  return generate(None, 0)


def test_output_is_that_of_plain_sampling():
  """Bit for bit, whatever drafts: ragged rows, stop tokens, limits and settings of their own. Short texts: test_law."""
  result = generate(drafters(), 3)
  np.testing.assert_array_equal(result.tokens, plain().tokens)
  np.testing.assert_array_equal(result.lengths, plain().lengths)
  np.testing.assert_allclose(result.logprobs, plain().logprobs, atol=1e-6)
  accepted, drafted, tested = (
    np.asarray(x) for x in (result.stats.accepted, result.stats.drafted, result.stats.tested.sum(-1))
  )
  # The same law and the same noise: nothing is ever rejected.
  np.testing.assert_array_equal(accepted[::3], drafted[::3])
  for kind in (0, 1, 2):
    assert accepted[kind::3].sum() > 20
  assert (accepted[1::3].sum(), accepted[2::3].sum()) < (tested[1::3].sum(), tested[2::3].sum())


def test_rows_differ_and_end_in_several_ways():
  """What the comparison above has seen: enough text, stops and limits, and noise that differs by row and position."""
  lengths, tokens = np.asarray(plain().lengths), np.asarray(plain().tokens)
  generated = [tuple(row[start:end]) for row, start, end in zip(tokens, LENGTHS, lengths, strict=True)]
  assert sum(map(len, generated)) > 100
  assert {text[-1] == V - 1 for text in generated if text} == {True, False}
  assert len({text[:2] for text in generated if text}) > 6
