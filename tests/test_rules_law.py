"""What only several rounds show: that block verification may not reuse its bits, and what it gains.

The joint law of every lossless rule is in `test_law`.
"""

import functools

import jax.numpy as jnp

import specjax
from specjax import keys, verify, warp
from specjax.keys import Purpose
from specjax.models import tabular
from specjax.verify import Verdict, declare
from specjax.verify.base import residual
from tests import rounds, test_law
from tests.statistics import assert_follows, p_value
from tests.test_law import language


@declare(lossless=False, noise="position")
def block_by_position(log_p, log_q, draft_tokens, num_drafted, key):
  """Block verification with noise keyed by absolute position: those behind a rejection are judged by it once more."""
  gamma = draft_tokens.shape[0]
  ratio = jnp.exp(warp.pick(log_p[:gamma], draft_tokens) - warp.pick(log_q, draft_tokens))
  w = [jnp.float32(1)]
  for i in range(gamma):
    w.append(jnp.minimum(w[-1] * ratio[i], 1))
  w, n = jnp.stack(w), jnp.int32(0)
  for i in range(1, gamma + 1):
    mass = jnp.maximum(w[i] * jnp.exp(log_p[i]) - jnp.exp(log_q[min(i, gamma - 1)]), 0).sum()
    h = jnp.where((w[i] < 1) & (i < num_drafted), mass / (mass + 1 - w[i]), w[i])
    eta = keys.uniform(keys.fold(key[i - 1], Purpose.ACCEPT))
    n = jnp.where((eta < h) & (i <= num_drafted), i, n)
  log_weights = residual(log_p, log_q, n, num_drafted, w[n])
  return Verdict(n, warp.categorical(keys.fold(key[n], Purpose.NEXT), log_weights))


PROMPT, LENGTH, TARGET, DRAFT = (1, 0, 1), 7, language(3, 2, 1.0), language(4, 2, 1.0)


@functools.cache
def generate(rule):
  """Seven tokens of a two-token language at gamma 2: continuations, and the result."""
  groups, result = test_law.generate(
    TARGET, specjax.ModelDrafter(DRAFT), [PROMPT], num_draft_tokens=2, max_new_tokens=LENGTH, verifier=rule
  )
  return groups[0], result


def exact_law():
  return tabular.law(TARGET, PROMPT, LENGTH)


def test_many_rounds_of_block():
  assert_follows(generate(verify.block)[0], exact_law())


def test_block_takes_fewer_target_passes():
  token, block = (generate(rule)[1].stats.block_efficiency for rule in (verify.token, verify.block))
  assert block > token + 0.02


def test_noise_by_position_is_wrong_for_block():
  """One round is exact, but not the next."""
  laws = rounds.CASES["soft"]
  assert_follows(rounds.simulate(block_by_position, laws), rounds.enumerate_outcomes(rounds.block_oracle, laws))
  assert p_value(generate(block_by_position)[0], exact_law()) < 1e-9
