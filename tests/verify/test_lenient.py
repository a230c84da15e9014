"""Lenient verification: its law is not the target's, but the one that is documented."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify, warp
from specjax.keys import Purpose, fold
from specjax.verify import Verdict, declare, lenient
from tests import rounds
from tests.rounds import CASES, enumerate_outcomes, token_oracle
from tests.statistics import assert_follows, p_value

LEVELS = (1.0, 0.5, 0.3, 0.1)  # those of table 5


def oracle(lenience):
  return lambda p, q, path: token_oracle(p, q, path, lenience)


def random_pairs(count=200):
  rng = np.random.default_rng(0)
  for _ in range(count):
    yield rng.dirichlet(np.full(5, rng.choice([0.2, 1.0, 5.0])), 2)


def closed_form(p, q, lenience):
  """Acceptance and emitted law of one position, as documented."""
  accepted, rest = np.minimum(p / lenience, q), np.maximum(p - q, 0)
  return accepted.sum(), accepted + (1 - accepted.sum()) * rest / rest.sum()


def first_token(law):
  return np.array([sum(mass for outcome, mass in law.items() if outcome[0] == v) for v in range(5)])


def test_the_documented_law_is_the_definitions():
  for p, q in random_pairs():
    for lenience in LEVELS:
      law = enumerate_outcomes(oracle(lenience), rounds.context_free(p, q, 1))
      acceptance, emitted = closed_form(p, q, lenience)
      np.testing.assert_allclose(first_token(law), emitted, atol=1e-12)
      np.testing.assert_allclose(rounds.expected_accepted(law), acceptance, atol=1e-12)


def test_the_documented_distance():
  for p, q in random_pairs():
    overlap = np.minimum(p, q).sum()
    for lenience in LEVELS:
      distance = np.abs(closed_form(p, q, lenience)[1] - p).sum() / 2
      np.testing.assert_allclose(distance, np.minimum(np.maximum(q - p, 0), (1 / lenience - 1) * p).sum(), atol=1e-12)
      assert distance <= min(1 - overlap, 1 / lenience - 1) + 1e-12


def test_no_residual_is_closer():
  """The residual that scales q as the acceptance does, norm(max(p - l q, 0)), leads further from p; never nearer."""
  further = 0
  for p, q in random_pairs():
    acceptance, emitted = closed_form(p, q, 0.5)
    other = np.maximum(p - 0.5 * q, 0)
    other = np.minimum(p / 0.5, q) + (1 - acceptance) * other / other.sum()
    gap = np.abs(other - p).sum() - np.abs(emitted - p).sum()
    assert gap > -1e-12
    further += gap > 1e-3
  assert further > 100


@pytest.mark.parametrize("case", ["soft", "one-hot draft", "one-hot target", "each lacks a token"])
def test_outcomes_of_a_round(case):
  law = enumerate_outcomes(oracle(0.5), CASES[case])
  assert_follows(rounds.simulate(lenient(0.5), CASES[case]), law)


@pytest.mark.parametrize("num_drafted", [0, 1, 2])
def test_drafts_that_do_not_exist(num_drafted):
  law = enumerate_outcomes(oracle(0.5), CASES["soft"], num_drafted)
  assert_follows(rounds.simulate(lenient(0.5), CASES["soft"], num_drafted), law)


def test_the_loss_is_seen():
  law = rounds.simulate(lenient(0.5), CASES["soft"])
  assert p_value(law, enumerate_outcomes(token_oracle, CASES["soft"])) < 1e-9
  assert p_value(law, enumerate_outcomes(oracle(0.5), CASES["soft"])) > 1e-5


def test_acceptance_grows_as_lenience_falls():
  """Table 5's order, round by round: under the same bits a smaller l never accepts fewer drafts."""
  laws = CASES["soft"]
  accepted = [np.asarray(rounds.run(lenient(level), laws)[1].num_accepted) for level in LEVELS]
  for fewer, more in itertools.pairwise(accepted):
    assert (more >= fewer).all()
    assert (more > fewer).mean() > 0.02
  for level, observed in zip(LEVELS, accepted, strict=True):
    assert abs((observed > 0).mean() - np.minimum(laws.p[0] / level, laws.q[0]).sum()) < 4.5 * 0.5 / rounds.DRAWS**0.5


# Leviathan et al., table 5: EnDe at T = 1, acceptance at l = 1, .5, .3, .1.
TABLE_5 = {
  "unigram": (0.07, 0.10, 0.11, 0.16),
  "bigram": (0.19, 0.23, 0.25, 0.32),
  "small": (0.62, 0.71, 0.76, 0.84),
  "base": (0.68, 0.80, 0.83, 0.90),
}


@pytest.mark.parametrize("draft", TABLE_5)
def test_table_5_lies_within_what_acceptance_allows(draft):
  """Our closed form, between laws as far apart as the paper's, moves like the printed row: up, and less than 1/l."""
  printed = TABLE_5[draft]
  rng = np.random.default_rng(1)
  p = rng.dirichlet(np.full(50, 0.3), 400)
  q = rng.dirichlet(np.full(50, 0.3), 400)

  def rows(mix):  # q is moved towards p until alpha is the printed one
    return [np.minimum(p / level, (1 - mix) * q + mix * p).sum(-1).mean() for level in LEVELS]

  mix = min(np.linspace(0, 1, 201), key=lambda mix: abs(rows(mix)[0] - printed[0]))
  for row in (printed, rows(mix)):
    assert all(a < b for a, b in itertools.pairwise(row))
    assert all(alpha <= min(1, row[0] / level) + 0.005 / level for alpha, level in zip(row, LEVELS, strict=True))


def test_lenience_1_is_the_token_rule():
  """Draw for draw; and so it says of itself."""
  assert rounds.simulate(lenient(1), CASES["soft"]) == rounds.simulate(verify.token, CASES["soft"])
  assert lenient(1).lossless
  assert not lenient(0.999).lossless


def test_a_token_without_mass_is_never_accepted():
  p, q = jnp.log(jnp.array([[0.0, 1.0], [0.0, 1.0]])), jnp.log(jnp.array([[0.5, 0.5]]))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("specjax.keys.uniform", lambda key: jnp.float32(0))
    verdict = jax.jit(lenient(1e-6))(p, q, jnp.array([0]), jnp.int32(1), jax.random.key(0))
  assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 1)


@declare(lossless=False)
def scaled_residual(log_p, log_q, draft_tokens, num_drafted, key):
  """Draws from norm(max(p - l q, 0)), which is another law than the documented one."""
  n = lenient(0.5)(log_p, log_q, draft_tokens, num_drafted, key).num_accepted
  q = jnp.where(n < num_drafted, 0.5 * jnp.exp(log_q[jnp.minimum(n, log_q.shape[0] - 1)]), 0)
  weights = jnp.log(jnp.maximum(jnp.exp(log_p[n]) - q, 0))
  return Verdict(n, warp.categorical(fold(key, Purpose.NEXT, 99), weights))


def test_another_residual_is_seen():
  law = enumerate_outcomes(oracle(0.5), CASES["soft"])
  assert p_value(rounds.simulate(scaled_residual, CASES["soft"]), law) < 1e-9


def test_one_function_for_each_lenience():
  """Rules are static: a new function would compile anew."""
  assert lenient(0.5) is lenient(np.float32(0.5)) is lenient(1 / 2)
  assert lenient(1) is lenient(1.0)
  assert lenient(0.5) is not lenient(0.25)


@pytest.mark.parametrize("value", [0, -0.5, 1.001, float("nan"), float("inf")])
def test_lenience_out_of_range(value):
  with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
    lenient(value)


@pytest.mark.parametrize("value", [True, "0.5", None, jnp.float32(0.5)])
def test_lenience_that_is_no_number(value):
  with pytest.raises(TypeError, match=r"must be a Python number in \(0, 1\]"):
    lenient(value)


def test_it_has_no_name():
  with pytest.raises(ValueError, match=r"'lenient' has no name.*specjax\.verify\.lenient\(l\)"):
    verify.get("lenient")
  with pytest.raises(TypeError, match=r"specjax\.verify\.lenient\(l\)"):
    verify.get(lenient)
  assert verify.get(lenient(0.5)) is lenient(0.5)
