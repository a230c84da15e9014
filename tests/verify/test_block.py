"""Block verification: its oracle is exact and never worse than the token rule; the rule does what the oracle says."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from specjax import keys, verify, warp
from specjax.keys import Purpose
from specjax.verify import Verdict, declare
from specjax.verify.base import residual
from tests import rounds
from tests.rounds import CASES, block_oracle, enumerate_outcomes, expected_accepted, token_oracle
from tests.statistics import assert_follows, p_value

TOY = {gamma: rounds.context_free([1 / 3, 2 / 3], [2 / 3, 1 / 3], gamma) for gamma in (1, 2)}


@functools.cache
def oracle_law(case, num_drafted=None):
  return enumerate_outcomes(block_oracle, CASES[case], num_drafted)


def test_the_papers_toy():
  """Expected accepted tokens 10/9 and 11/9, by enumeration."""
  np.testing.assert_allclose(expected_accepted(enumerate_outcomes(token_oracle, TOY[2])), 10 / 9, rtol=1e-12)
  np.testing.assert_allclose(expected_accepted(enumerate_outcomes(block_oracle, TOY[2])), 11 / 9, rtol=1e-12)
  for oracle in (token_oracle, block_oracle):
    np.testing.assert_allclose(expected_accepted(enumerate_outcomes(oracle, TOY[1])), 2 / 3, rtol=1e-12)


def random_instances():
  for seed, (vocab_size, gamma) in enumerate(itertools.product((2, 3, 4), (1, 2, 3))):
    for spread in (0.5, 1.5, 4.0):
      yield rounds.random_laws(100 + seed, vocab_size, gamma, spread)


def test_the_oracle_is_exact():
  """A round's outcome, continued by plain sampling, has plain sampling's joint law."""
  for laws in [*random_instances(), *CASES.values()]:
    for num_drafted in range(laws.gamma + 1):
      law = rounds.complete(enumerate_outcomes(block_oracle, laws, num_drafted), laws, laws.gamma + 1)
      expected = rounds.plain_law(laws, laws.gamma + 1)
      np.testing.assert_allclose([law.get(x, 0.0) for x in expected], list(expected.values()), atol=1e-12)


def test_never_fewer_tokens_than_the_token_rule():
  """By enumeration; and on most laws, more."""
  gains = []
  for laws in [*random_instances(), *CASES.values()]:
    block, token = (expected_accepted(enumerate_outcomes(oracle, laws)) for oracle in (block_oracle, token_oracle))
    if laws.gamma > 1:
      gains.append(block - token)
    else:  # one draft: the same rule
      np.testing.assert_allclose(block, token, atol=1e-12)
  assert min(gains) > -1e-12
  assert np.mean(np.array(gains) > 1e-3) > 0.5


def test_accepting_i_drafts_has_the_documented_probability():
  """P(at least i accepted | x_1..x_i) = w_i, averaged over the drafts behind."""
  for laws in random_instances():
    mass: dict[tuple[int, ...], np.ndarray] = {}
    for path in itertools.product(range(laws.vocab_size), repeat=laws.gamma):
      p, q = laws.along(path)
      w = 1.0
      drawn = np.prod([q[i, token] for i, token in enumerate(path)])
      at_least = np.cumsum(block_oracle(p, q, path)[0][::-1])[::-1]
      for i, token in enumerate(path):
        w = min(1.0, w * p[i, token] / q[i, token])
        mass[path[: i + 1]] = mass.get(path[: i + 1], 0.0) + drawn * np.array([at_least[i + 1], w])
    for accepted, documented in mass.values():
      np.testing.assert_allclose(accepted, documented, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_outcomes_of_a_round(case):
  assert_follows(rounds.simulate(verify.block, CASES[case]), oracle_law(case))


@pytest.mark.parametrize("num_drafted", [0, 1, 2])
def test_drafts_that_do_not_exist(num_drafted):
  """The last draft that exists is judged by w, whatever stands behind it."""
  assert_follows(rounds.simulate(verify.block, CASES["soft"], num_drafted), oracle_law("soft", num_drafted))


def test_no_drafts_at_all():
  """gamma = 0: the bonus token alone."""
  key, log_p = jax.random.key(0), jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
  verdict = jax.jit(verify.block)(log_p, jnp.zeros((0, 3)), jnp.zeros(0, jnp.int32), jnp.int32(0), key)
  expected = jax.jit(warp.categorical)(keys.fold(jax.random.clone(key), Purpose.NEXT), log_p[0])
  assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, int(expected))


def judge(p, q, drafts, eta):
  """(drafts accepted, next token) in float32, where eta_i is what is given."""
  n, token = _judge(*(np.asarray(x, np.float32) for x in (p, q, eta)), np.asarray(drafts, np.int32))
  return int(n), int(token)


@jax.jit
def _judge(p, q, eta, drafts):
  fold = keys.fold
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(keys, "fold", lambda key, purpose, i=0: i if purpose == Purpose.ACCEPT else fold(key, purpose))
    patch.setattr(keys, "uniform", lambda i: eta[i - 1])
    return verify.block(jnp.log(p), jnp.log(q), drafts, jnp.int32(drafts.shape[0]), jax.random.key(0))


def test_thresholds():
  """The decision turns where eta_i passes h_i of float64, for each i, on laws that make h anything from 1e-8 up."""
  p = np.array([[1e-8, 0.5, 0.5 - 1e-8], [0.2, 0.3, 0.5], [0.6, 0.1, 0.3], [1.0, 0.0, 0.0]])
  q = np.array([[0.7, 0.2, 0.1], [0.6, 0.4, 0.0], [0.1, 0.9, 0.0]])
  least = 1.0
  for path in ((0, 0, 0), (1, 0, 1), (2, 0, 1), (2, 1, 1)):
    accepted, _ = block_oracle(p, q, path)
    at_least = np.cumsum(accepted[::-1])[::-1]
    for i in (1, 2, 3):
      beyond = at_least[i + 1] if i < 3 else 0.0
      h = accepted[i] / (1 - beyond)
      if not 0 < h < 1 - 1e-6:
        continue
      least = min(least, h)
      for factor, expected in ((1 - 1e-5, True), (1 + 1e-5, False)):
        eta = np.full(3, 1.0)
        eta[i - 1] = h * factor
        assert (judge(p, q, path, eta)[0] == i) is expected, (path, i)
  assert least < 1e-7


def test_a_prefix_without_mass_is_never_accepted():
  """eta = 0 is drawn: with `eta <= h` a token of p = 0 would pass; what follows it can't make it good."""
  p, q = [[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.1, 0.9]]
  assert judge(p, q, (0, 0), (0.0, 0.0)) == (0, 1)


def test_equal_laws_accept_everything():
  """w = 1 and S = 0 at every draft, so h is 0/0 there: no NaN, and the whole block is kept at the largest eta."""
  p = [[0.25, 0.25, 0.5]] * 4
  assert judge(p, p[:3], (0, 1, 2), np.full(3, 1 - 2.0**-24))[0] == 3


def test_an_empty_residual_draws_from_p():
  """p = q and a rejection that only rounding can bring."""
  p = [0.0, 1.0, 0.0]
  assert judge([p, p], [p], (1,), (1.0,)) == (0, 1)


FAULTS = (
  "none",
  "token criterion",
  "product of token criteria",
  "never capped",
  "w alone",
  "one eta",
  "first rejection",
  "last draft that is none",
  "residual of the token rule",
  "residual by the next w",
  "residual by the first w",
  "residual of another position",
)


@declare(lossless=False)
def faulty(fault, log_p, log_q, draft_tokens, num_drafted, key):
  """Block verification with one of the faults, given by number: they share a program."""

  def has(name):
    return fault == FAULTS.index(name)

  gamma = draft_tokens.shape[0]
  count = jnp.arange(1, gamma + 1)
  ratio = jnp.exp(warp.pick(log_p[:gamma], draft_tokens) - warp.pick(log_q, draft_tokens))
  w = [jnp.float32(1)]
  for i in range(gamma):
    before = jnp.where(has("token criterion"), 1.0, w[-1])
    grown = before * jnp.where(has("product of token criteria"), jnp.minimum(ratio[i], 1), ratio[i])
    w.append(jnp.where(has("never capped"), grown, jnp.minimum(grown, 1)))
  w = jnp.stack(w)
  mass = [jnp.maximum(w[i] * jnp.exp(log_p[i]) - jnp.exp(log_q[i]), 0).sum() for i in range(1, gamma)]
  mass = jnp.stack([*mass, jnp.float32(0)])
  last = jnp.where(has("last draft that is none"), gamma, num_drafted)
  h = jnp.where((w[1:] < 1) & (count < last) & ~has("w alone"), mass / (mass + 1 - w[1:]), w[1:])
  index = jnp.where(has("one eta"), 1, count)
  eta = jax.vmap(lambda i: keys.uniform(keys.fold(key, Purpose.ACCEPT, i)))(index)
  accept = (eta < h) & (count <= num_drafted)
  first = jnp.cumprod(accept.astype(jnp.int32)).sum()
  n = jnp.where(has("first rejection"), first, jnp.where(accept, count, 0).max())
  scale = jnp.where(has("residual of the token rule"), 1.0, w[n])
  scale = jnp.where(has("residual by the next w"), w[jnp.minimum(n + 1, gamma)], scale)
  scale = jnp.where(has("residual by the first w"), w[jnp.minimum(n, 1)], scale)
  at = jnp.where(has("residual of another position") & (n < num_drafted), jnp.maximum(n - 1, 0), n)
  log_weights = residual(log_p, log_q, at, num_drafted, scale)
  return Verdict(n, warp.categorical(keys.fold(key, Purpose.NEXT), log_weights))


def simulate_fault(fault, num_drafted):
  return rounds.simulate(Partial(faulty, jnp.int32(FAULTS.index(fault))), CASES["soft"], num_drafted)


@pytest.mark.parametrize("fault", FAULTS[1:])
def test_faults_are_seen(fault):
  num_drafted = 2 if fault == "last draft that is none" else 3
  assert p_value(simulate_fault(fault, num_drafted), oracle_law("soft", num_drafted)) < 1e-9


def test_the_variant_without_a_fault_is_the_rule():
  assert simulate_fault("none", 2) == rounds.simulate(verify.block, CASES["soft"], 2)
