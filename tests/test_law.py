"""The joint law of whole generations from `specjax.sample`, against enumeration of the target's own law.

Toy languages depend on the last two tokens and on the position, and read them from a cache, so faults in acceptance,
residual, bonus, keys, caches, lengths or warps all move the law. tests/audit/test_mutants.py shows that such tests see
them.

Compiling takes longer than sampling, so what can be data is: languages are over the battery's four tokens, batches of
one size, and there is one program for each rule and gamma.
"""

import functools
import itertools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import specjax
from specjax import verify
from specjax.audit import battery
from specjax.models import tabular
from tests.rounds import match_probabilities
from tests.statistics import assert_exact, assert_follows, assert_probable, continuations

ROWS = 90_000
LOSSLESS = [name for name, rule in verify.RULES.items() if rule.lossless]


@functools.cache
def sampled(rule, gamma):
  """The battery's texts."""
  request = battery.arguments(battery.ALL, num_draft_tokens=gamma, rows=ROWS)
  return jax.device_get(specjax.sample(**request, verifier=rule))


# Texts have four tokens, so a block of four drafts never fills: one rule shows that the last slot stays unused.
@pytest.mark.parametrize(("rule", "gamma"), [*itertools.product(LOSSLESS, range(4)), ("token", 4)])
def test_joint_law(rule, gamma):
  """Every pair of target and draft, and n-gram drafts, under every warp; prompts of three lengths; a stop or none."""
  assert_exact(battery.fits(sampled(rule, gamma), battery.ALL), detectable=0.035)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_coupled_texts_are_those_of_plain_sampling(gamma):
  """Bit for bit, in every situation of the battery."""
  plain, result = sampled("coupled", 0), sampled("coupled", gamma)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  np.testing.assert_array_equal(result.lengths, plain.lengths)


def test_only_coupled_texts_are():
  """The comparison above sees what drafts do to texts."""
  assert (sampled("token", 2).tokens != sampled("token", 0).tokens).any(-1).mean() > 0.3


def generate(target, draft, prompts, *, gamma, max_new_tokens, rule="token"):
  """Rows of one batch cycle through the prompts; returns continuations by prompt, and the result. Same program."""
  request = battery.arguments(battery.ALL, num_draft_tokens=gamma, rows=ROWS)
  every, width = len(battery.ALL), max(map(len, prompts))
  model = specjax.ModelDrafter(tabular.interleave([draft] * every))
  lengths = np.resize([len(prompt) for prompt in prompts], ROWS)
  result = specjax.sample(
    **request
    | {
      "target": tabular.interleave([target] * every),
      "drafter": battery.InTurn((model, specjax.NGramDrafter()), np.zeros(every, np.int32)),
      # The padding is a token that the languages know: reading it would be a fault that shows.
      "prompt_tokens": np.resize([[*prompt, *[1] * (width - len(prompt))] for prompt in prompts], (ROWS, width)),
      "prompt_lengths": lengths,
      "max_new_tokens": max_new_tokens,
      "warp": specjax.Warp(),
    },
    verifier=rule,
  )
  out = continuations(result, lengths)
  return [out[i :: len(prompts)] for i in range(len(prompts))], result


# Two tokens, so that a law over many rounds has few outcomes.
TARGET, DRAFT = (battery.Language(seed, spread=1.0, never=(2, 3)).model() for seed in (3, 4))
PROMPTS = (0,), (1, 0, 1)


@functools.cache
def law(prompt):
  """Of seven tokens."""
  return tabular.law(TARGET, prompt, 7)


@functools.cache
def many_rounds(rule, gamma):
  """At gamma 4 full rounds, at least two of them."""
  return generate(TARGET, DRAFT, PROMPTS, rule=rule, gamma=gamma, max_new_tokens=7)


@pytest.mark.parametrize(("rule", "gamma"), [("token", 1), ("token", 2), ("token", 4), ("block", 2)])
def test_many_rounds(rule, gamma):
  groups, result = many_rounds(rule, gamma)
  assert (result.stats.accepted_at[:, gamma - 1] > 0).any()
  for prompt, observed in zip(PROMPTS, groups, strict=True):
    assert_follows(observed, law(prompt))


def test_block_takes_fewer_target_passes():
  token, block = (many_rounds(rule, 2)[1].stats.block_efficiency for rule in ("token", "block"))
  assert block > token + 0.02


def test_limits_cut_at_every_offset():
  """Rows that end after 0 to 6 tokens in one batch: each follows the law of its own length."""
  prompt, limits = PROMPTS[1], list(range(7))
  groups, _ = generate(TARGET, DRAFT, [prompt] * 7, gamma=4, max_new_tokens=np.resize(limits, ROWS).astype(np.int32))
  for limit, observed in zip(limits, groups, strict=True):
    shorter = defaultdict(float)
    for outcome, probability in law(prompt).items():
      shorter[outcome[:limit]] += probability
    assert_follows(observed, shorter)


def test_rows_and_rounds_are_independent():
  """Neighbouring rows, and the tokens of one row under a law without memory, are independent."""
  table = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.3, 0.2, 0.0])), TARGET.params.shape)
  groups, _ = generate(
    tabular.from_table(table), battery.Language(2, never=(3,)).model(), [(0,)], gamma=2, max_new_tokens=4
  )
  rows = groups[0]
  single = {(t,): p for t, p in enumerate([0.5, 0.3, 0.2])}
  pairs = {(a, b): single[(a,)] * single[(b,)] for a, b in itertools.product(range(3), repeat=2)}
  assert_follows(((a[0], b[0]) for a, b in zip(rows[::2], rows[1::2], strict=True)), pairs)
  assert_follows(((row[0], row[3]) for row in rows), pairs)


def test_acceptance_of_coupled_drafts():
  """Laws without memory: tested drafts are accepted as often as the formula says, in every round and at every index."""
  p, q = np.array([0.5, 0.3, 0.2, 0]), np.array([0.1, 0.3, 0.6, 0])
  with np.errstate(divide="ignore"):
    target, draft = (tabular.from_table(np.broadcast_to(np.log(law), TARGET.params.shape)) for law in (p, q))
  _, result = generate(target, draft, [(0,)], rule="coupled", gamma=2, max_new_tokens=14)
  tested, accepted = (np.asarray(x).sum(0) for x in (result.stats.tested, result.stats.accepted_at))
  for hits, trials in zip(accepted, tested, strict=True):
    fit = scipy.stats.binomtest(int(hits), int(trials), match_probabilities(p, q).sum())
    assert_probable(fit.pvalue, lambda hits=hits, trials=trials: f"{hits} of {trials} accepted")


def test_drafts_of_other_vocabularies():
  """Rows in turn have a draft model of fewer tokens than the target, and one of more: the target's law stands."""
  target, fewer, more = (tabular.tabular(jax.random.key(seed), size) for seed, size in ((7, 5), (8, 3), (9, 7)))
  prompt, rows = (2, 0), 80_000
  drafter = battery.InTurn((specjax.ModelDrafter(fewer), specjax.ModelDrafter(more)), np.arange(2))
  result = specjax.sample(
    target, drafter, np.resize(prompt, (rows, 2)), key=jax.random.key(0), num_draft_tokens=2, max_new_tokens=3,
    max_length=8, prefill_chunk=2,
  )  # fmt: skip
  texts = continuations(result, [2] * rows)
  for own in (texts[::2], texts[1::2]):
    assert_follows(own, tabular.law(target, prompt, 3))


def test_check_rule_says_yes_to_the_token_rule():
  """Here, where its programs are."""
  report = battery.check_rule("token", rows=ROWS)
  assert report.exact
  assert report.false_alarm < 1e-6
  assert "No deviation" in str(report)
  assert "declares" not in str(report)
  assert list(report.fits) == ["gamma 1", "gamma 3"]
  for fits in report.fits.values():
    assert sum(fit.observations for fit in fits.values()) == ROWS
