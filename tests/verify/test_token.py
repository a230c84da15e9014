"""Token verification on hand-made laws: one round, every outcome."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify
from tests import rounds
from tests.rounds import CASES, enumerate_outcomes, token_oracle
from tests.statistics import assert_follows

PLACES = rounds.by_position([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0]], [[0.4, 0.3, 0.3]] * 3)


@pytest.mark.parametrize("case", CASES)
def test_outcomes_of_a_round(case):
  assert_follows(rounds.simulate(verify.token, CASES[case]), enumerate_outcomes(token_oracle, CASES[case]))


def test_the_position_that_rejects_decides_about_the_residual():
  assert_follows(rounds.simulate(verify.token, PLACES), enumerate_outcomes(token_oracle, PLACES))


@pytest.mark.parametrize("num_drafted", [0, 1, 2])
def test_drafts_that_do_not_exist(num_drafted):
  law = enumerate_outcomes(token_oracle, CASES["soft"], num_drafted)
  assert_follows(rounds.simulate(verify.token, CASES["soft"], num_drafted), law)


def test_the_oracle_is_exact():
  """A round's outcome, continued by plain sampling, has plain sampling's joint law."""
  for laws in [*CASES.values(), PLACES]:
    for num_drafted in range(laws.gamma + 1):
      law = rounds.complete(enumerate_outcomes(token_oracle, laws, num_drafted), laws, laws.gamma + 1)
      expected = rounds.plain_law(laws, laws.gamma + 1)
      np.testing.assert_allclose([law.get(x, 0.0) for x in expected], list(expected.values()), atol=1e-12)


def test_wide_vocabulary():
  """V = 16 and an id that does not exist, q the reverse of p: shared bits of draft and residual would show here."""
  p = np.arange(1, 17) ** 2.0 / (np.arange(1, 17) ** 2.0).sum()
  laws = rounds.context_free([*p, 0], [*p[::-1], 0], 1)
  assert_follows(rounds.simulate(verify.token, laws, seed=1), enumerate_outcomes(token_oracle, laws))


def test_padded_vocabulary_is_never_drawn():
  """V = 8k + 1 of which the last ids do not exist, all drafts rejected."""
  laws = rounds.context_free(np.eye(17)[3], np.eye(17)[5], 1)
  assert set(rounds.simulate(verify.token, laws)) == {(3,)}


def test_a_token_without_mass_is_never_accepted():
  """u = 0 is drawn: a test of `u <= p/q` would accept it."""
  p, q = jnp.log(jnp.array([[0.0, 1.0], [0.0, 1.0]])), jnp.log(jnp.array([[0.5, 0.5]]))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("specjax.keys.uniform", lambda key: jnp.float32(0))
    verdict = jax.jit(lambda *row: verify.token(*row))(p, q, jnp.array([0]), jnp.int32(1), jax.random.key(0))
  assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 1)


def test_an_empty_residual_draws_from_p():
  """p = q and a rejection that only rounding can bring: no NaN, and p is what is left to draw from."""
  law = [0.25, 0.25, 0.5]
  log = jnp.log(jnp.array([law, law]))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("specjax.keys.uniform", lambda key: jnp.float32(1))
    draw = jax.jit(jax.vmap(lambda key: verify.token(log, log[:1], jnp.array([0]), jnp.int32(1), key)))
    verdict = draw(jax.random.split(jax.random.key(0), 50_000))
  assert not verdict.num_accepted.any()
  assert_follows(np.asarray(verdict.next_token).tolist(), dict(enumerate(law)))


def test_a_small_ratio_is_accepted_as_often_as_it_should():
  """p/q = 1e-8: the decision agrees with float64 at the u on either side of it."""
  p, q = jnp.array([[1e-8, 1.0], [1e-8, 1.0]]), jnp.array([[1.0, 0.0]])
  for u, accepted in ((0.99e-8, 1), (1.01e-8, 0)):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr("specjax.keys.uniform", lambda key, u=u: jnp.float32(u))
      judge = jax.jit(lambda *row: verify.token(*row))
      verdict = judge(jnp.log(p), jnp.log(q), jnp.array([0]), jnp.int32(1), jax.random.key(0))
    assert int(verdict.num_accepted) == accepted


def test_names_and_declarations():
  for name in ("token", "block", "coupled", "match"):
    rule = verify.get(name)
    assert rule is getattr(verify, name)
    assert verify.get(rule) is rule
    assert rule.lossless
    assert verify.shares_noise(rule) == (name == "coupled")
  with pytest.raises(ValueError, match=r"'tokens' is unknown\. Known: block, coupled, match, token;"):
    verify.get("tokens")
  with pytest.raises(TypeError, match="lossless"):
    verify.get(lambda *_: None)


def test_noise_is_declared_by_one_of_two_words():
  with pytest.raises(ValueError, match=r"noise='row' is unknown.*\"round\" or \"position\""):
    verify.declare(lossless=True, noise="row")

  @verify.declare(lossless=False)
  def rule(*_): ...

  assert not verify.shares_noise(verify.get(rule))
  setattr(rule, "noise", "row")  # noqa: B010
  with pytest.raises(TypeError, match=r"noise='row'.*\"round\" or \"position\""):
    verify.get(rule)
  del rule.noise  # a function that was marked by hand may lack it
  assert not verify.shares_noise(verify.get(rule))
