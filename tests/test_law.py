"""The joint law of whole generations from `specjax.sample`, against enumeration of the target's own law.

Toy languages depend on the last two tokens and on the position, and read them from a cache, so faults in acceptance,
residual, bonus, keys, caches, lengths or warps all move the law. `test_mutants` shows that the test can see them.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import verify, warp
from specjax.models import tabular
from specjax.verify import Verdict, declare
from tests.statistics import assert_follows, continuations, p_value

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
DRAFTERS = {
  "model": lambda: specjax.ModelDrafter(language(2)),
  "ngram": lambda: specjax.NGramDrafter(),
  "same": lambda: specjax.ModelDrafter(language(1)),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("gamma", range(5))
def test_ragged_prompts(gamma, drafter):
  groups, _ = generate(language(1), DRAFTERS[drafter](), PROMPTS, num_draft_tokens=gamma, max_new_tokens=4)
  for prompt, observed in zip(PROMPTS, groups, strict=True):
    assert_follows(observed, tabular.law(language(1), prompt, 4))


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_many_rounds(gamma):
  """Seven tokens of a two-token language: at gamma 4 full rounds, at least two of them."""
  target, drafter = language(3, 2, 1.0), specjax.ModelDrafter(language(4, 2, 1.0))
  prompts = [(0,), (1, 0, 1)]
  groups, result = generate(target, drafter, prompts, num_draft_tokens=gamma, max_new_tokens=7)
  assert (result.stats.accepted_at[:, gamma - 1] > 0).any()
  for prompt, observed in zip(prompts, groups, strict=True):
    assert_follows(observed, tabular.law(target, prompt, 7))


@pytest.mark.parametrize("gamma", [0, 1, 3])
@pytest.mark.parametrize("stop", [(0,), (1, 2)])
def test_stop_tokens(gamma, stop):
  groups, _ = generate(language(1), DRAFTERS["model"](), PROMPTS, num_draft_tokens=gamma, max_new_tokens=4, eos_id=stop)
  for prompt, observed in zip(PROMPTS, groups, strict=True):
    assert_follows(observed, tabular.law(language(1), prompt, 4, stop_ids=stop))


WARPS = {
  "cold": specjax.Warp(temperature=0.6),
  "hot": specjax.Warp(temperature=1.7),
  "top_k": specjax.Warp(top_k=2),
  "top_p": specjax.Warp(top_p=0.75),
  "min_p": specjax.Warp(min_p=0.3),
  "all": specjax.Warp(temperature=1.5, top_k=3, top_p=0.8, min_p=0.15),
  "greedy": specjax.Warp(temperature=0.0),
}


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("name", WARPS)
def test_warps(name, drafter):
  target, draft = language(5, 4), {"model": specjax.ModelDrafter(language(6, 4)), "ngram": specjax.NGramDrafter()}
  prompts = [(3,), (0, 2, 1)]
  groups, _ = generate(target, draft[drafter], prompts, num_draft_tokens=3, max_new_tokens=4, warp=WARPS[name])
  for prompt, observed in zip(prompts, groups, strict=True):
    assert_follows(observed, tabular.law(target, prompt, 4, warp=WARPS[name]))


def test_warps_mixed_in_one_batch():
  """Each row follows its own law: temperatures (0, 1, .7), filters on some rows only."""
  target, drafter, prompt = language(5, 4), specjax.ModelDrafter(language(6, 4)), (3, 1)
  warps = [
    specjax.Warp(0.0), specjax.Warp(1.0), specjax.Warp(0.7), specjax.Warp(1.5, top_p=0.8), specjax.Warp(1.0, top_k=2)
  ]  # fmt: skip
  mixed = jax.tree.map(lambda *values: np.resize(np.array(values), ROWS), *warps)
  groups, _ = generate(target, drafter, [prompt] * len(warps), num_draft_tokens=2, max_new_tokens=3, warp=mixed)
  for setting, observed in zip(warps, groups, strict=True):
    assert_follows(observed, tabular.law(target, prompt, 3, warp=setting))


def test_limits_cut_at_every_offset():
  """Rows that end after 0 to 6 tokens in one batch: each follows the law of its own length."""
  target, drafter, prompt = language(3, 2, 1.0), specjax.ModelDrafter(language(4, 2, 1.0)), (1, 0)
  limits = list(range(7))
  groups, _ = generate(
    target, drafter, [prompt] * 7, num_draft_tokens=4, max_new_tokens=np.resize(limits, ROWS).astype(np.int32)
  )
  for limit, observed in zip(limits, groups, strict=True):
    assert_follows(observed, tabular.law(target, prompt, limit))


def forbidding(seed: int, forbidden: int):
  """A language that never says `forbidden`."""
  table = language(seed).params
  return tabular.from_table(table.at[..., forbidden].set(-jnp.inf))


SUPPORTS = {
  "draft lacks a token": (lambda: language(1), lambda: forbidding(2, 1)),
  "target lacks a token": (lambda: forbidding(1, 1), lambda: language(2)),
  "disjoint": (lambda: forbidding(1, 0), lambda: tabular.from_table(language(2).params.at[..., 1:].set(-jnp.inf))),
  "near zero": (lambda: language(1, spread=12.0), lambda: language(2, spread=12.0)),
}


@pytest.mark.parametrize("name", SUPPORTS)
def test_supports(name):
  target, draft = (make() for make in SUPPORTS[name])
  groups, _ = generate(target, specjax.ModelDrafter(draft), PROMPTS, num_draft_tokens=2, max_new_tokens=4)
  for prompt, observed in zip(PROMPTS, groups, strict=True):
    assert_follows(observed, tabular.law(target, prompt, 4))


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
  groups, _ = generate(target, DRAFTERS["model"](), [(0,)], num_draft_tokens=2, max_new_tokens=4)
  rows = groups[0]
  single = {(t,): p for t, p in enumerate([0.5, 0.3, 0.2])}
  pairs = {(a, b): single[(a,)] * single[(b,)] for a, b in itertools.product(range(3), repeat=2)}
  assert_follows(((a[0], b[0]) for a, b in zip(rows[::2], rows[1::2], strict=True)), pairs)
  assert_follows(((row[0], row[3]) for row in rows), pairs)


@declare(lossless=False)
def shared_bits(log_p, log_q, draft_tokens, num_drafted, key):
  """Draws u and the next token from the same key."""
  gamma = draft_tokens.shape[0]
  u = jnp.broadcast_to(jax.random.uniform(key), (gamma,))
  ratio = jnp.exp(warp.pick(log_p[:gamma], draft_tokens) - warp.pick(log_q, draft_tokens))
  n = jnp.cumprod(((u < ratio) & (jnp.arange(gamma) < num_drafted)).astype(jnp.int32)).sum()
  q = jnp.where(n < num_drafted, jnp.exp(log_q[jnp.minimum(n, gamma - 1)]), 0.0)
  residual = jnp.maximum(jnp.exp(log_p[n]) - q, 0.0)
  # A clone, as jax refuses the reuse that this fault consists of.
  return Verdict(n, jax.random.categorical(jax.random.clone(key), jnp.log(residual)).astype(jnp.int32))


@declare(lossless=False)
def wrong_residual(log_p, log_q, draft_tokens, num_drafted, key):
  """Draws the next token from p after a rejection, too."""
  verdict = verify.token(log_p, log_q, draft_tokens, num_drafted, key)
  key = jax.random.fold_in(key, 99)
  return Verdict(verdict.num_accepted, warp.categorical(key, log_p[verdict.num_accepted]))


@declare(lossless=False)
def residual_of_first_row(log_p, log_q, draft_tokens, num_drafted, key):
  """Indexes the residual by row 0 whatever was rejected."""
  verdict = verify.token(log_p, log_q, draft_tokens, num_drafted, key)
  residual = jnp.maximum(jnp.exp(log_p[verdict.num_accepted]) - jnp.exp(log_q[0]), 0.0)
  token = warp.categorical(jax.random.fold_in(key, 99), jnp.log(residual))
  return Verdict(verdict.num_accepted, jnp.where(verdict.num_accepted < num_drafted, token, verdict.next_token))


@declare(lossless=False)
def lenient(log_p, log_q, draft_tokens, num_drafted, key):
  """Accepts with min(1, p / .8 q)."""
  return verify.token(log_p, log_q + jnp.log(0.8), draft_tokens, num_drafted, key)


@pytest.mark.parametrize("rule", [shared_bits, wrong_residual, residual_of_first_row, lenient])
def test_wrong_rules_are_seen(rule):
  groups, _ = generate(
    language(1), DRAFTERS["model"](), PROMPTS[1:2], num_draft_tokens=2, max_new_tokens=4, verifier=rule
  )
  assert p_value(groups[0], tabular.law(language(1), PROMPTS[1], 4)) < 1e-9


def shifted(model, by: int):
  """The model with its cache written `by` slots off."""

  def apply(params, tokens, cache, start):
    logits, new_cache = model.apply(params, tokens, cache, start)
    return logits, jnp.where(jnp.arange(cache.shape[1])[None] < by, cache, jnp.roll(new_cache, by, axis=1))

  return dataclasses.replace(model, apply=apply)


def stale(model):
  """The model that keeps what a rejected round wrote: only slots never written before are."""

  def apply(params, tokens, cache, start):
    cache, used = cache
    logits, new = model.apply(params, tokens, cache, start)
    new = jnp.where(jnp.arange(cache.shape[1])[None] < used[:, None], cache, new)
    return logits, (new, jnp.maximum(used, start + tokens.shape[1]))

  def init_cache(params, batch, max_length):
    return model.init_cache(params, batch, max_length), jnp.zeros(batch, jnp.int32)

  return dataclasses.replace(model, apply=apply, init_cache=init_cache)


@pytest.mark.parametrize("fault", ["shifted", "stale"])
def test_wrong_caches_are_seen(fault):
  target = shifted(language(1), 1) if fault == "shifted" else stale(language(1))
  groups, _ = generate(target, DRAFTERS["model"](), PROMPTS[1:2], num_draft_tokens=2, max_new_tokens=4)
  assert p_value(groups[0], tabular.law(language(1), PROMPTS[1], 4)) < 1e-9
