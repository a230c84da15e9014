"""Token verification on hand-made laws: one round, every outcome."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify, warp
from tests.statistics import assert_follows

DRAWS = 200_000


@functools.partial(jax.jit, static_argnames="draws")
def rounds(p, q, key, num_drafted, draws=DRAWS):
  """`draws` rounds under context-free laws p[gamma+1, V], q[gamma, V]: drafts from q, then the verdict."""
  log_p, log_q = jnp.log(p), jnp.log(q)

  def once(key):
    draft_key, verify_key = jax.random.split(key)
    keys = jax.random.split(draft_key, q.shape[0])
    drafts = jax.vmap(warp.categorical)(keys, log_q)
    return drafts, verify.token(log_p, log_q, drafts, num_drafted, verify_key)

  return jax.vmap(once)(jax.random.split(key, draws))


def outcomes(p, q, num_drafted=None, seed=0):
  """(accepted drafts..., next token) of every round."""
  p, q = jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)
  num_drafted = jnp.int32(q.shape[0] if num_drafted is None else num_drafted)
  drafts, verdict = rounds(p, q, jax.random.key(seed), num_drafted)
  columns = (
    np.asarray(drafts).tolist(),
    np.asarray(verdict.num_accepted).tolist(),
    np.asarray(verdict.next_token).tolist(),
  )
  return [(*row[:n], token) for row, n, token in zip(*columns, strict=True)]


def law_of_round(p, q, num_drafted=None):
  """The same outcomes by the definition: accept with min(1, p/q), residual norm(max(p - q, 0)), bonus from p."""
  p, q = np.asarray(p, float), np.asarray(q, float)
  gamma = len(q) if num_drafted is None else num_drafted
  law: dict[tuple[int, ...], float] = {}
  for n in range(gamma + 1):
    for accepted in itertools.product(range(p.shape[1]), repeat=n):
      reached = np.prod([min(p[i, t], q[i, t]) for i, t in enumerate(accepted)])
      weights = p[n] if n == gamma else np.maximum(p[n] - q[n], 0)  # the mass of a rejection is that of the residual
      for token, weight in enumerate(weights):
        if reached * weight > 0:
          law[*accepted, token] = law.get((*accepted, token), 0.0) + reached * weight
  return law


P3 = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]]
Q3 = [[0.6, 0.3, 0.1], [0.5, 0.2, 0.3]]


@pytest.mark.parametrize(
  ("p", "q"),
  [
    (P3, Q3),
    ([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], [[1.0, 0.0, 0.0]]),  # a one-hot draft: only the one-hot law is right
    ([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0]], [[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]]),
    ([[0.0, 0.0, 0.4, 0.6], [0.1, 0.2, 0.3, 0.4]], [[0.5, 0.5, 0.0, 0.0]]),  # disjoint supports
    (P3, P3[:2]),  # q = p
  ],
  ids=["soft", "one-hot draft", "another row rejects", "disjoint", "equal"],
)
def test_outcomes_of_a_round(p, q):
  assert_follows(outcomes(p, q), law_of_round(p, q))


@pytest.mark.parametrize("num_drafted", [0, 1, 2])
def test_drafts_that_do_not_exist(num_drafted):
  assert_follows(outcomes(P3, Q3, num_drafted), law_of_round(P3, Q3, num_drafted))


def test_wide_vocabulary():
  """V = 16, q the reverse of p: shared bits of draft, acceptance and residual would show here."""
  p = np.arange(1, 17) ** 2.0
  p = np.stack([p, p]) / p.sum()
  q = p[:1, ::-1]
  assert_follows(outcomes(p, q, seed=1), law_of_round(p, q))


def test_a_token_without_mass_is_never_accepted():
  """u = 0 is drawn: a test of `u <= p/q` would accept it."""
  p, q = jnp.log(jnp.array([[0.0, 1.0], [0.0, 1.0]])), jnp.log(jnp.array([[0.5, 0.5]]))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("specjax.keys.uniform", lambda key: jnp.float32(0))
    verdict = verify.token(p, q, jnp.array([0]), jnp.int32(1), jax.random.key(0))
  assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 1)


def test_an_empty_residual_draws_from_p():
  """p = q and a rejection that only rounding can bring: no NaN, and p is what is left to draw from."""
  law = [0.25, 0.25, 0.5]
  log = jnp.log(jnp.array([law, law]))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("specjax.keys.uniform", lambda key: jnp.float32(1))
    draw = jax.vmap(lambda key: verify.token(log, log[:1], jnp.array([0]), jnp.int32(1), key))
    verdict = draw(jax.random.split(jax.random.key(0), 50_000))
  assert not verdict.num_accepted.any()
  assert_follows(np.asarray(verdict.next_token).tolist(), dict(enumerate(law)))


def test_a_small_ratio_is_accepted_as_often_as_it_should():
  """p/q = 1e-8: the decision agrees with float64 at the u on either side of it."""
  p, q = jnp.array([[1e-8, 1.0], [1e-8, 1.0]]), jnp.array([[1.0, 0.0]])
  for u, accepted in ((0.99e-8, 1), (1.01e-8, 0)):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr("specjax.keys.uniform", lambda key, u=u: jnp.float32(u))
      verdict = verify.token(jnp.log(p), jnp.log(q), jnp.array([0]), jnp.int32(1), jax.random.key(0))
    assert int(verdict.num_accepted) == accepted


def test_padded_vocabulary_is_never_drawn():
  """V = 8k + 1 of which the last ids do not exist, all drafts rejected."""
  p = np.zeros((2, 17))
  p[:, 3] = 1
  q = np.zeros((1, 17))
  q[0, 5] = 1
  assert set(outcomes(p, q)) == {(3,)}


def test_names_and_declarations():
  assert verify.get("token") is verify.token
  with pytest.raises(ValueError, match=r"'tokens' is unknown\. Known: block, coupled, match, token;"):
    verify.get("tokens")
  with pytest.raises(TypeError, match="lossless"):
    verify.get(lambda *_: None)
