"""The joint law of whole generations under every lossless rule but `token` (see `test_law`), against enumeration.

One program for each rule and gamma serves ragged prompts, several warps and limits at once, with stop tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import keys, verify, warp
from specjax.keys import Purpose
from specjax.models import tabular
from specjax.verify import Verdict, declare
from specjax.verify.base import residual
from tests.statistics import assert_follows, continuations, p_value
from tests.test_law import PROMPTS, language

V, LENGTH, STOP, ROWS = 3, 5, (2,), 60_000
WARPS = [specjax.Warp(), specjax.Warp(temperature=0.7, top_p=0.9), specjax.Warp(temperature=0.0)]


def drafter(kind):
  return specjax.NGramDrafter() if kind == "ngram" else specjax.ModelDrafter(language(2))


def generate(rule, draft, gamma, *, seed=0):
  """Continuations of every prompt under every warp: [((prompt, warp), tokens of its rows)]."""
  groups = [(prompt, setting) for prompt in PROMPTS for setting in WARPS]
  width = max(map(len, PROMPTS))
  padded = np.array([[*prompt, *[V - 1] * (width - len(prompt))] for prompt, _ in groups], np.int32)
  lengths = np.resize([len(prompt) for prompt, _ in groups], ROWS)
  settings = jax.tree.map(lambda *values: np.resize(np.array(values), ROWS), *(setting for _, setting in groups))
  result = specjax.sample(
    language(1), draft, np.resize(padded, (ROWS, width)), prompt_lengths=lengths, key=jax.random.key(seed),
    num_draft_tokens=gamma, max_new_tokens=LENGTH, warp=settings, eos_id=STOP, verifier=rule, max_length=24,
    prefill_chunk=8,
  )  # fmt: skip
  rows = continuations(result, lengths)
  return [(group, rows[i :: len(groups)]) for i, group in enumerate(groups)], result


@pytest.mark.parametrize(
  ("rule", "kind", "gamma"),
  [("block", "model", 2), ("block", "model", 4), ("block", "ngram", 3), ("match", "model", 2), ("match", "ngram", 3),
   ("coupled", "model", 2), ("coupled", "model", 4), ("coupled", "ngram", 3), ("coupled", "model", 0)],
)  # fmt: skip
def test_generations_follow_the_targets_law(rule, kind, gamma):
  groups, result = generate(rule, drafter(kind), gamma)
  assert verify.get(rule).lossless
  assert not gamma or (np.asarray(result.stats.accepted_at).sum(0) > 0).all()
  for (prompt, setting), observed in groups:
    assert_follows(observed, tabular.law(language(1), prompt, LENGTH, warp=setting, stop_ids=STOP))


def test_block_accepts_more_of_whole_generations():
  """The same drafts at gamma 4: more tokens a target pass than by the token rule."""
  efficiency = [generate(rule, drafter("model"), 4)[1].stats.block_efficiency for rule in ("token", "block")]
  assert efficiency[1] > efficiency[0] + 0.02


def test_match_accepts_less():
  rates = [generate(rule, drafter("model"), 2)[1].stats.acceptance_rate for rule in ("match", "token")]
  assert rates[0] < rates[1] - 0.05


@declare(lossless=False, noise="position")
def block_by_position(log_p, log_q, draft_tokens, num_drafted, key):
  """Block verification with noise keyed by absolute position.

  Every draw has bits of its own, and one round is exact; but positions behind a rejection are judged once more by an
  eta that has already said something.
  """
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


def test_noise_by_position_is_wrong_for_block():
  groups, _ = generate(block_by_position, drafter("model"), 4)
  (prompt, setting), observed = groups[0]
  assert p_value(observed, tabular.law(language(1), prompt, LENGTH, warp=setting, stop_ids=STOP)) < 1e-9
