"""Match verification: the target's own draws, whatever the drafter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify, warp
from specjax.keys import Purpose, fold
from specjax.verify import Verdict, declare
from tests import rounds
from tests.rounds import CASES, enumerate_outcomes, expected_accepted, match_oracle, token_oracle
from tests.statistics import assert_follows, p_value


def test_the_oracle_is_exact():
  for laws in CASES.values():
    for num_drafted in range(laws.gamma + 1):
      law = rounds.complete(enumerate_outcomes(match_oracle, laws, num_drafted), laws, laws.gamma + 1)
      expected = rounds.plain_law(laws, laws.gamma + 1)
      np.testing.assert_allclose([law.get(x, 0.0) for x in expected], list(expected.values()), atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_outcomes_of_a_round(case):
  assert_follows(rounds.simulate(verify.match, CASES[case]), enumerate_outcomes(match_oracle, CASES[case]))


@pytest.mark.parametrize("num_drafted", [0, 1, 2])
def test_drafts_that_do_not_exist(num_drafted):
  law = enumerate_outcomes(match_oracle, CASES["soft"], num_drafted)
  assert_follows(rounds.simulate(verify.match, CASES["soft"], num_drafted), law)


def test_acceptance_is_the_sum_of_p_q():
  """Less than the token rule's sum of min(p, q), and the same where the draft is certain."""
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.3, 0.6])
  laws = rounds.context_free(p, q, 1)
  np.testing.assert_allclose(expected_accepted(enumerate_outcomes(match_oracle, laws)), (p * q).sum(), rtol=1e-12)
  for laws in CASES.values():
    match, token = (expected_accepted(enumerate_outcomes(oracle, laws)) for oracle in (match_oracle, token_oracle))
    assert match < token + 1e-12
  certain = CASES["one-hot draft"]
  match, token = (expected_accepted(enumerate_outcomes(oracle, certain)) for oracle in (match_oracle, token_oracle))
  np.testing.assert_allclose(match, token, rtol=1e-12)


def test_the_drafters_law_is_not_read():
  """Nor does the draft move what the target draws: an accepted draft is the token that would have been emitted."""
  key, log_p = jax.random.key(0), jnp.log(jnp.array([[0.2, 0.8], [0.6, 0.4], [0.3, 0.7]]))
  judge = jax.jit(verify.match)
  emitted = set()
  for drafts in ([0, 0], [0, 1], [1, 0], [1, 1]):
    n, token = judge(log_p, jnp.full((2, 2), jnp.nan), jnp.array(drafts), jnp.int32(2), key)
    emitted.add((*drafts[: int(n)], int(token)))
  longest = max(emitted, key=len)
  assert len(longest) == 3
  assert all(outcome == longest[: len(outcome)] for outcome in emitted)


@declare(lossless=False)
def draws_again(log_p, log_q, draft_tokens, num_drafted, key):
  """Emits another draw than the one that the draft was compared with."""
  verdict = verify.match(log_p, log_q, draft_tokens, num_drafted, key)
  again = warp.categorical(fold(key, Purpose.NEXT, 99), log_p[verdict.num_accepted])
  return Verdict(verdict.num_accepted, again)


@declare(lossless=False)
def one_key(log_p, log_q, draft_tokens, num_drafted, key):
  """Draws every position from the same bits."""
  own = jax.vmap(warp.categorical, (None, 0))(key, log_p)
  n = jnp.cumprod(((own[:-1] == draft_tokens) & (jnp.arange(len(draft_tokens)) < num_drafted)).astype(jnp.int32)).sum()
  return Verdict(n, own[n])


@pytest.mark.parametrize("rule", [draws_again, one_key])
def test_faults_are_seen(rule):
  law = enumerate_outcomes(match_oracle, CASES["soft"])
  assert p_value(rounds.simulate(rule, CASES["soft"]), law) < 1e-9
