"""The loop's invariants: caches, lengths, limits, statistics, and what the same program must serve.

The law of the output is in `test_law`; here everything is checked exactly, row by row.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import verify, warp
from specjax.language_model import LanguageModel
from specjax.models import tabular
from specjax.verify import Verdict, declare

GREEDY = specjax.Warp(temperature=0.0)
step = jax.jit(specjax.step, static_argnames="verifier")


@functools.cache
def language(seed: int, vocab_size: int = 5):
  return tabular.tabular(jax.random.key(seed), vocab_size)


def drafter(seed: int = 2, vocab_size: int = 5):
  return specjax.ModelDrafter(language(seed, vocab_size))


def prompts(rows: int, width: int, seed: int = 0, vocab_size: int = 5) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, vocab_size, (rows, width)).astype(np.int32)


def generated(result, row: int, start: int) -> list[int]:
  return np.asarray(result.tokens)[row, start : int(result.lengths[row])].tolist()


@jax.jit
def _laws(model, tokens, settings):
  cache = model.init_cache(model.params, *tokens.shape)
  logits, _ = model.apply(model.params, tokens, cache, jnp.zeros(1, jnp.int32))
  return warp.log_probs(logits, settings)[0]


def teacher_forced(model: LanguageModel, tokens: np.ndarray, settings=GREEDY) -> np.ndarray:
  """log p[L, V] of the warped law at every position of one text."""
  text = np.pad(np.asarray(tokens), (0, 128 - len(tokens)))[None]  # one program for every length
  return np.asarray(_laws(model, text, settings.per_row(1)))[: len(tokens)]


@pytest.mark.parametrize("gamma", [0, 1, 3, 5])
@pytest.mark.parametrize("make", [drafter, specjax.NGramDrafter])
def test_greedy_is_the_teacher_forced_argmax(gamma, make):
  target, prompt = language(1), prompts(6, 3)
  result = specjax.sample(
    target, make(), prompt, key=jax.random.key(0), max_new_tokens=20, num_draft_tokens=gamma, warp=GREEDY
  )
  for row, tokens in enumerate(np.asarray(result.tokens)):
    law = teacher_forced(target, tokens)
    assert tokens[3:].tolist() == law.argmax(-1)[2:-1].tolist(), row


@pytest.mark.parametrize("gamma", [0, 2, 4])
def test_a_row_does_not_depend_on_its_batch(gamma):
  """Ragged prompts, mixed warps, limits and stops: each row equals its run alone, and a permutation permutes."""
  target, width = language(1), 7
  prompt, lengths = prompts(6, width), np.array([1, 4, 7, 2, 7, 3])
  keys = jax.random.split(jax.random.key(3), 6)
  limits = np.array([20, 3, 11, 0, 20, 7])
  settings = {"temperature": np.array([1, 0, 0.7, 1, 1.3, 1], np.float32), "top_k": np.array([0, 0, 3, 0, 0, 2])}

  def run(rows):
    return specjax.sample(
      target, drafter(), prompt[rows], prompt_lengths=lengths[rows], key=keys[np.array(rows)],
      max_new_tokens=limits[rows], num_draft_tokens=gamma, eos_id=4, max_length=128,
      warp=specjax.Warp(**{name: value[rows] for name, value in settings.items()}),
    )  # fmt: skip

  together, order = run(list(range(6))), [3, 5, 0, 4, 2, 1]
  permuted = run(order)
  for row in range(6):
    alone, moved = run([row]), order.index(row)
    for name in ("rounds", "drafted", "accepted", "tested", "accepted_at"):
      values = getattr(together.stats, name)[row]
      np.testing.assert_array_equal(values, getattr(alone.stats, name)[0], name)
      np.testing.assert_array_equal(values, getattr(permuted.stats, name)[moved], name)
    expected = generated(together, row, lengths[row])
    assert expected == generated(alone, 0, lengths[row]) == generated(permuted, moved, lengths[row])


def test_key_of_row_b_is_folded_from_one_key():
  key = jax.random.key(9)
  keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(4))
  one = specjax.sample(language(1), drafter(), prompts(4, 3), key=key, max_new_tokens=12)
  each = specjax.sample(language(1), drafter(), prompts(4, 3), key=keys, max_new_tokens=12)
  np.testing.assert_array_equal(one.tokens, each.tokens)
  assert len({tuple(row) for row in np.asarray(one.tokens)[:, 3:]}) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [1, 3])
def test_draft_equal_to_target_accepts_everything(gamma, temperature):
  """Every round accepts gamma; both caches then hold what a fresh prefill of the same text writes."""
  target, prompt, rounds = language(1), prompts(4, 6), 4
  state = specjax.init(
    target, specjax.ModelDrafter(target), prompt, key=jax.random.key(0), prompt_lengths=[1, 3, 6, 4],
    max_new_tokens=54, num_draft_tokens=gamma, warp=specjax.Warp(temperature),
  )  # fmt: skip
  for _ in range(rounds):
    state, info = step(state, target, specjax.ModelDrafter(target))
    assert info.num_accepted.tolist() == [gamma] * 4
    assert info.num_emitted.tolist() == [gamma + 1] * 4
  for row in range(4):
    length = int(state.length[row])
    # The target has been fed all but the last token; the draft model lacks its own last draft, too.
    np.testing.assert_array_equal(state.target_cache[row, : length - 1], state.tokens[row, : length - 1])
    np.testing.assert_array_equal(state.draft_state[row, : length - 2], state.tokens[row, : length - 2])


@declare(lossless=False)
def scripted(log_p, log_q, draft_tokens, num_drafted, key):
  """Accepts as many drafts as the key says, never mind the laws: none, some, all."""
  bits = jax.random.bits(key, (), jnp.uint32)
  return Verdict(jnp.minimum((bits % (draft_tokens.shape[0] + 1)).astype(jnp.int32), num_drafted), jnp.int32(3))


def test_caches_after_rounds_that_accept_none_some_and_all():
  """At least 3 rounds of every kind: the cache equals a fresh prefill below length-1, and laws are teacher-forced."""
  target, draft, gamma = language(1), language(2), 3
  state = specjax.init(
    target, specjax.ModelDrafter(draft), prompts(8, 7), key=jax.random.key(4),
    prompt_lengths=[1, 4, 7, 2, 3, 5, 6, 7], max_new_tokens=90, num_draft_tokens=gamma, prefill_chunk=4,
  )  # fmt: skip
  seen = set()
  for _ in range(12):
    before = state
    state, info = step(state, target, specjax.ModelDrafter(draft), verifier=scripted)
    seen |= set(info.num_accepted.tolist())
    for row in range(8):
      start, length = int(before.length[row]), int(state.length[row])
      np.testing.assert_array_equal(state.target_cache[row, : length - 1], state.tokens[row, : length - 1])
      np.testing.assert_array_equal(state.draft_state[row, : length - 2], state.tokens[row, : length - 2])
      # The law of every scored position is the one of the text that led there.
      text = np.concatenate([state.tokens[row, :start], info.draft_tokens[row]])
      expected = teacher_forced(target, text, specjax.Warp())[start - 1 :]
      np.testing.assert_allclose(info.log_p[row], expected, atol=1e-6)
      expected_q = teacher_forced(draft, text, specjax.Warp())[start - 1 : -1]
      np.testing.assert_allclose(info.log_q[row], expected_q, atol=1e-6)
  assert seen == set(range(gamma + 1))


def always(draft):
  """A target that always says its previous token plus one, and a drafter that agrees (or never does)."""
  size = 8
  table = jnp.full((1, size + 1, size), -jnp.inf)
  ids = jnp.arange(size)
  target = tabular.from_table(table.at[0, ids, (ids + 1) % size].set(0.0))
  wrong = tabular.from_table(table.at[0, ids, (ids + 2) % size].set(0.0))
  return target, specjax.ModelDrafter(target if draft == "right" else wrong)


@pytest.mark.parametrize("draft", ["right", "wrong"])
@pytest.mark.parametrize("stop", range(1, 8))
def test_stop_token_at_every_offset(stop, draft):
  """Nothing behind a stop token is emitted, counted or scored."""
  target, proposer = always(draft)
  result = specjax.sample(
    target, proposer, [[0]], key=jax.random.key(0), max_new_tokens=20, num_draft_tokens=3, eos_id=stop
  )
  assert generated(result, 0, 1) == list(range(1, stop + 1))
  assert not np.asarray(result.tokens)[0, stop + 1 :].any()
  stats = result.stats
  assert stats.generated.tolist() == [stop]
  full, rest = divmod(stop, 4)
  if draft == "right":
    assert stats.rounds.tolist() == [full + (rest > 0)]
    assert stats.accepted.tolist() == stats.drafted.tolist() == [3 * full + rest]
    assert int(stats.tested.sum()) == int(stats.accepted.sum()) == float(stats.overlap[0])
  else:
    assert stats.rounds.tolist() == [stop]
    assert (stats.accepted.tolist(), stats.drafted.tolist(), stats.overlap.tolist()) == ([0], [3 * stop], [0.0])


@pytest.mark.parametrize("limit", range(10))
def test_limit_at_every_offset(limit):
  """A row drafts no more than it has room for, so that what is counted could have been emitted."""
  target, proposer = always("right")
  result = specjax.sample(target, proposer, [[0]], key=jax.random.key(0), max_new_tokens=limit, num_draft_tokens=3)
  assert result.tokens.shape == (1, 1 + limit)
  assert generated(result, 0, 1) == [t % 8 for t in range(1, limit + 1)]
  full, rest = divmod(limit, 4)
  assert result.stats.rounds.tolist() == [full + (rest > 0)]
  assert result.stats.drafted.tolist() == result.stats.accepted.tolist() == [3 * full + max(rest - 1, 0)]


def test_buffers_of_exactly_the_needed_size():
  """The last round writes up to the last slot; a clamped write would overwrite good rows."""
  target, proposer = always("right")
  settings = {"key": jax.random.key(0), "max_new_tokens": 30, "num_draft_tokens": 4, "prefill_chunk": 1}
  with pytest.raises(ValueError, match=r"max_length=35 is too small: .* take 36 slots"):
    specjax.sample(target, proposer, [[0]], max_length=35, **settings)
  result = specjax.sample(target, proposer, [[0]], max_length=36, **settings)
  assert generated(result, 0, 1) == [t % 8 for t in range(1, 31)]


def test_rows_that_stop_at_different_rounds():
  """A finished row neither ends the batch nor goes on counting."""
  target, proposer = always("right")
  result = specjax.sample(
    target, proposer, [[6], [2], [0]], key=jax.random.key(0), max_new_tokens=[40, 40, 7], num_draft_tokens=1, eos_id=7
  )
  assert [generated(result, row, 1) for row in range(3)] == [[7], [3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]]
  assert result.stats.rounds.tolist() == [1, 3, 4]
  assert result.stats.generated.tolist() == [1, 5, 7]


@pytest.mark.parametrize("gamma", [0, 3])
def test_logprobs_equal_teacher_forcing(gamma):
  settings = specjax.Warp(temperature=0.8, top_p=0.9)
  target, prompt = language(1), prompts(5, 4)
  result = specjax.sample(
    target, drafter(), prompt, key=jax.random.key(1), max_new_tokens=9, num_draft_tokens=gamma, warp=settings
  )
  tokens, logprobs = np.asarray(result.tokens), np.asarray(result.logprobs)
  for row in range(5):
    law = teacher_forced(target, tokens[row], settings)
    expected = law[np.arange(3, 12), tokens[row, 4:]]
    np.testing.assert_allclose(logprobs[row, 4:], expected, atol=1e-6)
    assert not logprobs[row, :4].any()


def test_statistics_from_rounds():
  """Pooled counts, recomputed from every round's info: a ratio of sums, not a mean of ratios."""
  target, gamma, rows = language(1), 3, 5
  prompt, lengths = prompts(rows, 4), np.array([1, 2, 3, 4, 4])
  state = specjax.init(
    target, drafter(), prompt, key=jax.random.key(6), prompt_lengths=lengths, max_new_tokens=15,
    num_draft_tokens=gamma, eos_id=0,
  )  # fmt: skip
  drafted = np.zeros(rows, int)
  tested, accepted_at, overlap = np.zeros((rows, gamma), int), np.zeros((rows, gamma), int), np.zeros(rows)
  while not state.finished.all():
    state, info = step(state, target, drafter())
    for row in range(rows):
      emitted, accepted = int(info.num_emitted[row]), int(info.num_accepted[row])
      stopped_inside = emitted < accepted + 1 or (emitted and emitted <= accepted)
      drafted[row] += min(int(info.num_drafted[row]), emitted) if stopped_inside else int(info.num_drafted[row])
      for i in range(min(int(info.num_drafted[row]), accepted + 1, emitted)):
        tested[row, i] += 1
        accepted_at[row, i] += i < accepted
        overlap[row] += np.minimum(np.exp(info.log_p[row, i]), np.exp(info.log_q[row, i])).sum()
  result = state.result()
  stats = result.stats
  np.testing.assert_array_equal(stats.tested, tested)
  np.testing.assert_array_equal(stats.accepted_at, accepted_at)
  np.testing.assert_array_equal(stats.accepted, accepted_at.sum(-1))
  np.testing.assert_array_equal(stats.drafted, drafted)
  np.testing.assert_allclose(stats.overlap, overlap, rtol=1e-5)
  np.testing.assert_allclose(stats.acceptance_rate, accepted_at.sum() / drafted.sum(), rtol=1e-6)
  np.testing.assert_allclose(stats.pooled_alpha, overlap.sum() / tested.sum(), rtol=1e-5)
  np.testing.assert_allclose(stats.alpha, overlap / tested.sum(-1), rtol=1e-5)
  generated_count = np.asarray(result.lengths) - lengths
  np.testing.assert_allclose(stats.block_efficiency, generated_count.sum() / np.asarray(stats.rounds).sum(), rtol=1e-6)


def test_alpha_is_the_acceptance_rate_of_tested_drafts():
  result = specjax.sample(language(1), drafter(), prompts(4000, 3), key=jax.random.key(0), max_new_tokens=12)
  stats = result.stats
  tested = int(stats.tested.sum())
  assert abs(float(stats.pooled_alpha) - int(stats.accepted.sum()) / tested) < 4 * 0.5 / tested**0.5


def same(left, right):
  """Bit for bit, NaN included."""
  jax.tree.map(np.testing.assert_array_equal, left, right)


LOOP = {
  "key": jax.random.split(jax.random.key(2), 3), "prompt_lengths": [1, 4, 3], "max_new_tokens": [10, 7, 0], "eos_id": 4,
  "warp": specjax.Warp([0.9, 1.0, 0.0]), "max_length": 64, "prefill_chunk": 3,
}  # fmt: skip


@functools.cache
def whole(gamma: int):
  return specjax.sample(language(1), drafter(), prompts(3, 4), num_draft_tokens=gamma, **LOOP)


@pytest.mark.parametrize("gamma", [0, 3])
def test_sample_is_init_and_steps(gamma):
  """The same arguments give the same result, bit for bit. States are donated: no two fields share a buffer."""
  advance = jax.jit(specjax.step, donate_argnums=0)
  result = jax.jit(lambda state: jax.tree.map(jnp.copy, state.result().cut(14)))
  state = specjax.init(language(1), drafter(), prompts(3, 4), num_draft_tokens=gamma, **LOOP)
  before = jax.device_get(result(state))
  while not state.finished.all():
    donated = state
    state, info = advance(state, language(1), drafter() if gamma else None)
    assert donated.tokens.is_deleted()
    after, info = jax.device_get((result(state), info))
    for row, (start, end) in enumerate(zip(before.lengths, after.lengths, strict=True)):
      # What was final stays so, and what is new is what the round says.
      new = [*before.tokens[row, :start], *info.tokens[row, : info.num_emitted[row]]]
      assert after.tokens[row, :end].tolist() == new
    before = after
  same(before, whole(gamma))
  assert before.lengths.tolist() != [11, 11, 3], "no row met its stop token"
  state, info = advance(state, language(1), drafter() if gamma else None)
  same(result(state), before)
  assert info.num_emitted.tolist() == [0, 0, 0]


def test_steps_under_scan_and_a_traced_limit():
  """One program from the prompt to the result: `init` with a limit that is an argument, `scan` over `step`."""
  traces, draft = [], drafter()

  @jax.jit
  def program(target, prompt, lengths, max_new_tokens):
    traces.append(None)
    settings = LOOP | {"prompt_lengths": lengths, "max_new_tokens": max_new_tokens}
    state = specjax.init(target, draft, prompt, num_draft_tokens=3, **settings)
    state, infos = jax.lax.scan(lambda state, _: specjax.step(state, target, draft), state, length=11)
    return state, infos.num_emitted

  state, emitted = program(language(1), prompts(3, 4), np.array([1, 4, 3]), np.array([10, 7, 0]))
  same(state.result().cut(14), whole(3))
  np.testing.assert_array_equal(emitted.sum(0), whole(3).stats.generated)
  assert state.tokens[:, -1].any(), "nothing was written to the garbage slot"
  assert not state.result().tokens[:, 14:].any()
  # Where the limit can't be looked at, the buffer is one, and nothing is overwritten.
  state, _ = program(language(1), prompts(3, 4), np.array([1, 4, 3]), np.array([2**31 - 1, 7, -1]))
  assert state.limit.tolist() == [64 - 3 - 1, 11, 2]
  np.testing.assert_array_equal(state.result().tokens[1, :14], whole(3).tokens[1])
  assert len(traces) == 1


def test_seeds_under_vmap():
  """A state for each seed from one `init` and one `step`; each is what a run of its own gives."""
  target, draft, seeds = language(1), drafter(), jax.random.split(jax.random.key(5), (4, 3))
  start = functools.partial(specjax.init, target, draft, prompts(3, 4), num_draft_tokens=3)
  many = jax.vmap(lambda key: start(**(LOOP | {"key": key})))(seeds)
  advance = jax.jit(jax.vmap(lambda state: specjax.step(state, target, draft)[0]))
  while not many.finished.all():
    many = advance(many)
  for i, seed in enumerate(seeds):
    one = specjax.sample(target, draft, prompts(3, 4), num_draft_tokens=3, **(LOOP | {"key": seed}))
    mine = jax.tree.map(lambda x, i=i: x[i], many.result())
    np.testing.assert_array_equal(mine.tokens[:, :14], one.tokens)
    np.testing.assert_array_equal(mine.lengths, one.lengths)
    np.testing.assert_array_equal(mine.stats.accepted_at, one.stats.accepted_at)
    np.testing.assert_allclose(mine.logprobs[:, :14], one.logprobs, atol=1e-6)


def test_sample_under_an_outer_jit():
  @jax.jit
  def outer(target, draft, prompt, key):
    return specjax.sample(target, draft, prompt, num_draft_tokens=3, **(LOOP | {"key": key}))

  same(outer(language(1), drafter(), prompts(3, 4), LOOP["key"]), whole(3))


@declare(lossless=False)
def impossible(log_p, log_q, draft_tokens, num_drafted, key):
  """By the first draft: 0 too few, 1 more than were drafted, 2 more than fit, 3 no token of the vocabulary, 4 right."""
  verdict, kind = verify.token(log_p, log_q, draft_tokens, num_drafted, key), draft_tokens[0]
  return Verdict(
    num_accepted=jnp.array([-7, 2, 1000, 0, 0])[kind] + jnp.where(kind == 4, verdict.num_accepted, 0),
    next_token=jnp.where(kind == 3, log_p.shape[-1], verdict.next_token),
  )


def test_verdicts_that_cannot_be():
  """The state stays whole, the row goes on token by token, and what it emits is marked; other rows see nothing."""
  state = specjax.init(
    language(1), drafter(), prompts(40, 3), key=jax.random.key(2), num_draft_tokens=3, max_new_tokens=2
  )  # room for one draft
  state, info = jax.device_get(step(state, language(1), drafter(), verifier=impossible))
  kinds, right = info.draft_tokens[:, 0], info.draft_tokens[:, 0] == 4
  assert set(kinds) == set(range(5))
  assert state.length[~right].tolist() == [4] * (~right).sum()
  assert not info.num_accepted[~right].any()
  assert not state.accepted[~right].any()
  assert (state.tokens[kinds == 3, 3] == 5).all()
  assert np.isnan(state.logprobs[~right, 3]).all()
  assert np.isfinite(info.log_p[right]).all()
  assert np.isfinite(state.logprobs[right]).all()
  assert state.length[right].tolist() == (4 + info.num_accepted[right]).tolist()


def test_one_trace_for_all_lengths_limits_and_warps():
  target = language(1)

  @chex.assert_max_traces(n=2)  # the prompt's passes and the rounds', in one program
  def apply(params, tokens, cache, start):
    return target.apply(params, tokens, cache, start)

  model = dataclasses.replace(target, apply=apply)
  calls = []

  @declare(lossless=True)
  def rule(*arguments):
    calls.append(None)
    return verify.token(*arguments)

  for length in range(1, 21):
    settings = specjax.Warp(temperature=length / 10, top_k=length % 3, top_p=1 - length / 40, min_p=length / 100)
    specjax.sample(
      model, specjax.NGramDrafter(), prompts(2, length), key=jax.random.key(length), max_new_tokens=length % 7,
      num_draft_tokens=3, warp=settings, verifier=rule,
    )  # fmt: skip
  assert len(calls) == 1


def recurrent(seed: int, vocab_size: int = 5, width: int = 6) -> LanguageModel:
  """A linear recurrent network: its state can't be overwritten by position, so it must be rewound.

  The cache is the state and the states before it, newest first, as many as a round or a chunk of 4 may take back.
  """
  a, b, c = (jax.random.normal(key, shape) for key, shape in zip(
    jax.random.split(jax.random.key(seed), 3), [(width, width), (vocab_size, width), (width, vocab_size)], strict=True
  ))  # fmt: skip
  history = 12

  def apply(params, tokens, cache, start):
    del start
    a, b, c = params

    def feed(cache, token):
      states, position = cache
      state = states[:, 0] @ (a / jnp.linalg.norm(a)) + b[token]
      return (jnp.concatenate([state[:, None], states[:, :-1]], 1), position + 1), state @ c

    cache, logits = jax.lax.scan(feed, cache, tokens.T)
    return jnp.moveaxis(logits, 0, 1), cache

  def init_cache(params, batch, max_length):
    return jnp.zeros((batch, history, width)), jnp.zeros(batch, jnp.int32)

  def rewind(cache, length):
    states, position = cache
    back = position - length
    index = jnp.minimum(back[:, None] + jnp.arange(history)[None], history - 1)
    return jnp.take_along_axis(states, index[:, :, None], axis=1), length

  return LanguageModel((a, b, c), apply, init_cache, vocab_size, rewind=rewind)


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recurrent_state_is_rewound(gamma, temperature):
  """Log-probs of every generated token equal teacher forcing, for a recurrent target and a recurrent drafter."""
  target, lengths = recurrent(1), np.array([1, 4, 7, 6])
  result = specjax.sample(
    target, specjax.ModelDrafter(recurrent(2)), prompts(4, 7), prompt_lengths=lengths, key=jax.random.key(0),
    max_new_tokens=20, num_draft_tokens=gamma, warp=specjax.Warp(temperature), prefill_chunk=4,
  )  # fmt: skip
  assert 0 < int(result.stats.accepted.sum()) < int(result.stats.tested.sum())
  for row, length in enumerate(lengths):
    tokens = np.asarray(result.tokens)[row, : length + 20]
    law = teacher_forced(target, tokens, specjax.Warp(temperature))
    expected = law[np.arange(length - 1, length + 19), tokens[length:]]
    np.testing.assert_allclose(np.asarray(result.logprobs)[row, length : length + 20], expected, atol=1e-4)
  # The drafter equal to the target accepts everything only if its own state was rewound, too.
  same = specjax.sample(
    target, specjax.ModelDrafter(target), prompts(4, 7), prompt_lengths=lengths, key=jax.random.key(0),
    max_new_tokens=20, num_draft_tokens=gamma, warp=specjax.Warp(0.0), prefill_chunk=4,
  )  # fmt: skip
  assert same.stats.accepted.tolist() == same.stats.drafted.tolist()


def test_nan_logits_show_in_logprobs():
  target = language(1)
  broken = dataclasses.replace(target, params=target.params.at[2].set(jnp.nan))
  result = specjax.sample(broken, drafter(), prompts(3, 4), key=jax.random.key(0), max_new_tokens=6)
  assert np.isnan(np.asarray(result.logprobs)[:, 4:]).any(axis=1).all()
  assert (np.asarray(result.tokens) < 5).all()
