"""From laws to texts: closed forms against definitions, and predicted curves against texts that were sampled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import specjax
from specjax import keys
from specjax.models import tabular
from specjax.numerics import (
  Curve,
  Graph,
  Run,
  explain,
  first_difference,
  flip_probability,
  judge,
  measured,
  predicted,
  replay,
  shared_noise,
)
from specjax.warp import Warp, gumbel_argmax, log_probs

ROWS, NEW = 400, 8
STOP, NEVER = 7, 35
LAW = jax.jit(log_probs)
LEVEL = 1 - 1e-4  # of an interval at each of NEW lengths


def by_definition(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  """P(both draw v) of arXiv 2408.07978, in O(V^2)."""
  out = np.zeros(len(p))
  for v in np.flatnonzero((p > 0) & (q > 0)):
    out[v] = 1 / np.maximum(p / p[v], q / q[v]).sum()
  return out


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_shared_noise_is_the_definition(spread: float) -> None:
  log_p = np.random.default_rng(0).normal(size=(3, 9)) * 3
  log_q = log_p + spread * np.random.default_rng(1).normal(size=(3, 9))
  log_p[0, 2], log_q[0, 4], log_q[1, 2] = -np.inf, -np.inf, -2000
  found = shared_noise(log_p, log_q)
  for i in range(3):
    p, q = scipy.special.softmax(log_p[i]), scipy.special.softmax(log_q[i])
    both = by_definition(p, q)
    np.testing.assert_allclose(found.differs[i], 1 - both.sum(), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(p * found.kept[i], both, rtol=1e-12, atol=1e-15)


def test_small_differences_are_exact() -> None:
  """Two tokens, q(0) = p(0) (1 + e): they differ with probability p(0) e to first order, even for e = 1e-13."""
  p = np.array([0.3, 0.7])
  for e in (1e-4, 1e-13):
    log_q = np.log(p) + np.log1p([e, -e * 3 / 7])
    assert float(shared_noise(np.log(p), log_q).differs) == pytest.approx(0.3 * e, rel=3e-3 if e > 1e-13 else 0.01)
  assert float(shared_noise(np.log(p), np.log(p)).differs) == 0


def test_shared_noise_is_what_the_sampler_does() -> None:
  log_p = np.log(scipy.special.softmax(np.random.default_rng(0).normal(size=12) * 2)).astype(np.float32)
  log_q = log_probs(log_p + np.random.default_rng(1).normal(size=12).astype(np.float32), Warp(top_k=9))
  draws = jax.vmap(gumbel_argmax, (0, None))
  row_keys = keys.row_keys(jax.random.key(0), 20_000)
  a, b = (np.asarray(draws(jax.random.clone(row_keys), x)) for x in (log_p, log_q))
  found = shared_noise(log_p, log_q)
  assert scipy.stats.binomtest(int((a != b).sum()), len(a), float(found.differs)).pvalue > 1e-4
  likely = int(np.bincount(a).argmax())
  kept = scipy.stats.binomtest(int((b[a == likely] == likely).sum()), int((a == likely).sum()), found.kept[likely])
  assert kept.pvalue > 1e-4
  assert found.kept[likely] < 0.95


def test_flips() -> None:
  changes = [-0.5, -0.25, 0.0, 1.0]
  # Ties that appear count half; one that was there before and stays is decided as before.
  np.testing.assert_array_equal(flip_probability([0.0, 0.1, 0.25, 0.5, 2.0], changes), [0.5, 0.5, 0.375, 0.125, 0.0])


def test_first_difference() -> None:
  assert first_difference([1, 2, 3], [1, 5, 3]) == 1
  assert first_difference([1, 2], [1, 2, 3]) is None
  assert first_difference([], [1]) is None


def test_kaplan_meier_by_hand() -> None:
  """Pairs that differ at token 1 (the second), at none of 2, at none of 3, at token 2."""
  curve = measured([3, 2, 3, 3], [1, None, None, 2])
  np.testing.assert_array_equal(curve.at_risk, [4, 4, 4, 2])
  np.testing.assert_allclose(curve.survival, [1, 1, 3 / 4, 3 / 8])
  # Nothing has differed in 4 texts: 1 - S may still be up to 1 - .025^(1/4).
  assert curve.low[1] == pytest.approx(0.025**0.25)
  reach = 1.959964 * np.sqrt(1 / (4 * 3)) / abs(np.log(0.75))
  assert curve.low[2] == pytest.approx(0.75 ** np.exp(reach))
  assert curve.high[2] == pytest.approx(0.75 ** np.exp(-reach))
  ended = measured([1, 1], [0, 0])
  assert (ended.survival[1], ended.low[1]) == (0, 0)
  assert ended.high[1] == pytest.approx(1 - 0.025**0.5)


def test_the_upper_bound_falls_as_survival_does() -> None:
  """Where the last pair differs nothing is left to estimate from; the bound before still holds."""
  curve = measured([2] * 100, [0] * 99 + [1])
  assert curve.survival.tolist() == pytest.approx([1, 0.01, 0])
  assert (np.diff(curve.high) <= 0).all()
  assert curve.high[1] < 0.06
  with pytest.raises(TypeError, match=r"differences holds 1\.5"):
    measured([3], [1.5])


def test_predicted_by_hand() -> None:
  """The second text is so unlikely to be the same after its first token that it hardly counts at the second."""
  curve = predicted([[0.2, 0.1, 0.5], [0.4, 0.9, np.nan]], [[1.0, 1.0, 1.0], [0.25, 1.0, np.nan]], [3, 2])
  second = (1 * 0.1 + 0.25 * 0.9) / 1.25
  np.testing.assert_allclose(curve.survival, np.cumprod([1, 1 - 0.3, 1 - second, 0.5]))
  np.testing.assert_array_equal(curve.at_risk, [2, 2, 2, 1])
  assert (curve.low <= curve.survival).all()
  assert (curve.survival <= curve.high).all()
  certain = predicted([[1.0, 0.0]], [[0.0, 1.0]], [2])
  np.testing.assert_array_equal(certain.survival, [1, 0, 0])


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: shared_noise([0.0, 1.0], [0.0]), r"shape \(2,\) and log_q \(1,\)"),
    (lambda: shared_noise([np.nan, 1.0], [0.0, 1.0]), "log_p, of shape"),
    (lambda: shared_noise([0.0, 1.0], [-np.inf, -np.inf]), "log_q, of shape"),
    (lambda: flip_probability([-1.0], [0.0]), "0 or more"),
    (lambda: flip_probability([1.0], []), "one or more"),
    (lambda: measured([2], [2]), "a difference at token 2 of a pair that has 2"),
    (lambda: predicted([[0.1]], [[0.9]], [2]), "from 0 to 1"),
    (lambda: predicted([[1.5]], [[0.9]], [1]), "differs must hold probabilities"),
    (lambda: predicted([[0.1]], [[np.nan]], [1]), "kept must hold probabilities"),
    (lambda: predicted([[0.1]], [[0.9]], [0.5]), "lengths must be whole numbers"),
    (lambda: predicted([[0.1]], [[0.9]], [1], level=95), "level=95 must be above 0 and below 1"),
    (lambda: measured([-3], [None]), "lengths must be whole numbers of tokens, 0 or more"),
    (lambda: measured([3], [1], level=95), "level=95"),
    (lambda: flip_probability([np.nan], [-0.5]), "no NaN"),
    (lambda: flip_probability([0.1], [np.nan]), "no NaN"),
  ],
)
def test_bad_input(call, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    call()


@pytest.fixture(scope="module")
def pair() -> tuple[specjax.LanguageModel, specjax.LanguageModel]:
  """A language of 4,000 contexts, and the same with logits that are a little off."""
  model = tabular.tabular(jax.random.key(0), 36, spread=2.0)
  model = dataclasses.replace(model, params=model.params.at[..., NEVER].set(-np.inf))
  noise = 0.15 * jax.random.normal(jax.random.key(1), model.params.shape)
  return model, dataclasses.replace(model, params=model.params + noise)


def sampled(model, drafter, gamma: int, warp: Warp, eos_id: int) -> tuple[list[Run], specjax.SampleResult]:
  """Of prompts of 1 to 70 tokens. One program for each gamma."""
  rng = np.random.default_rng(0)
  settings = {"num_draft_tokens": gamma, "key": jax.random.key(3), "warp": warp, "verifier": "coupled"}
  result = specjax.sample(
    model,
    drafter,
    rng.integers(0, NEVER, (ROWS, 70)),
    prompt_lengths=rng.integers(1, 71, ROWS),
    max_new_tokens=NEW,
    eos_id=eos_id,
    **settings,
  )
  return Run.from_result(result, **settings), result


def logits(model, runs: list[Run]) -> np.ndarray:
  return np.concatenate([block for (block,) in replay(model, runs, 1)], axis=1)


def observe(a: list[Run], b: list[Run]) -> Curve:
  pairs = list(zip(a, b, strict=True))
  lengths = [min(len(x.tokens), len(y.tokens)) for x, y in pairs]
  return measured(lengths, [first_difference(x.tokens, y.tokens) for x, y in pairs], level=LEVEL)


def assert_agree(seen: Curve, said: Curve) -> None:
  assert len(seen.survival) == len(said.survival) == NEW + 1
  outside = np.flatnonzero((said.survival < seen.low) | (said.survival > seen.high))
  assert not outside.size, f"at {outside}: predicted {said.survival}, measured {seen.survival}"


def test_shared_noise_predicts_the_texts(pair) -> None:
  """T = 0.7, some texts ended by a stop token; the other graph samples speculatively."""
  warp = Warp(temperature=0.7, top_p=0.95)
  (plain, _), (other, _) = (
    sampled(pair[0], None, 0, warp, STOP),
    sampled(pair[1], specjax.NGramDrafter(), 2, warp, STOP),
  )
  lengths = np.array([len(run.tokens) for run in plain])
  assert 0.05 < (lengths < NEW).mean() < 0.6
  tokens = np.array([np.pad(run.tokens, (0, NEW - len(run.tokens))) for run in plain])
  p, q = (log_probs(logits(model, plain), warp.per_row(ROWS)) for model in pair)
  shared = shared_noise(p, q)
  kept = np.take_along_axis(shared.kept, tokens[..., None], axis=-1)[..., 0]
  said, seen = predicted(shared.differs, kept, lengths), observe(plain, other)
  assert_agree(seen, said)
  assert 0.2 < said.survival[-1] < 0.6
  # Texts that ended the same way are no evidence that they would have stayed the same.
  alike = np.mean([first_difference(a.tokens, b.tokens) is None for a, b in zip(plain, other, strict=True)])
  assert alike > seen.survival[-1] + 0.03


def test_margins_predict_greedy_texts(pair) -> None:
  """Of the error nothing is known but its distribution in other texts than those that are predicted."""
  warp = Warp(temperature=0.0)
  # A stop token that no law has.
  (plain, _), (other, _) = (
    sampled(pair[0], None, 0, warp, NEVER),
    sampled(pair[1], specjax.NGramDrafter(), 2, warp, NEVER),
  )
  a, b = (logits(model, plain) for model in pair)
  first = a.argsort(-1)[..., :-3:-1]
  margins, others = (np.take_along_axis(z, first, axis=-1) @ [1.0, -1.0] for z in (a, b))
  half = np.arange(ROWS) < ROWS // 2
  differs = np.zeros((ROWS, NEW))
  for own in (half, ~half):
    changes = (others - margins)[~own].ravel()
    differs[own] = flip_probability(margins[own].ravel(), changes).reshape(-1, NEW)
  said = predicted(differs, 1 - differs, np.full(ROWS, NEW))
  assert_agree(observe(plain, other), said)
  assert 0.2 < said.survival[-1] < 0.8


def test_replay_goes_through_the_sampler_s_passes(pair) -> None:
  """The log-probabilities that `sample` returned, at every token of texts of several lengths."""
  runs, result = sampled(pair[0], None, 0, Warp(top_k=9), STOP)
  ends = np.array([len(run.tokens) for run in runs])
  assert len(set(ends)) > 3
  given = np.asarray(result.logprobs)
  found = list(replay(pair[0], runs, 1, 4))
  assert [[block.shape for block in blocks] for blocks in found] == [[(ROWS, 4, 36)] * 2] * 2
  for blocks in zip(*found, strict=True):
    log_p = np.asarray(LAW(np.concatenate(blocks, axis=1), Warp(top_k=9).per_row(ROWS)))
    for b, run in enumerate(runs):
      own, start = log_p[b, np.arange(ends[b]), run.tokens], len(run.prompt)
      np.testing.assert_allclose(own, given[b, start : start + ends[b]], rtol=1e-6, atol=2e-6)  # of a sum's rounding


def test_differences_are_explained(pair) -> None:
  """What the sampler's noise decides is known, token by token; an error within a law's edge, too."""
  warp = Warp(temperature=0.7, top_p=0.95)
  (a, _), (b, _) = sampled(pair[0], None, 0, warp, STOP), sampled(pair[1], specjax.NGramDrafter(), 2, warp, STOP)
  pairs = [(x, y) for x, y in zip(a, b, strict=True) if first_difference(x.tokens, y.tokens) is not None]
  edges = 0
  for x, y in pairs[:60]:
    at = first_difference(x.tokens, y.tokens)
    own, off = (next(replay(model, [x], NEW))[0][0, at] for model in pair)
    right = judge(x, y, own, own, off)
    assert (right.kind, right.at, [e.repeated for e in right.evidence]) == ("numerics", at, [True, True])
    first, second = right.evidence
    assert first.margin == 0
    laws = [np.asarray(LAW(logits[None], warp.per_row(1)))[0] for logits in (own, off)]
    if np.isfinite(laws[1][first.token]) and np.isfinite(laws[0][second.token]):
      assert second.margin is not None
      assert 0 < second.margin <= 2 * second.error
      assert f"run b's token is {second.margin:.2g} short of the best under this noise" in str(right)
      # Not drawn again, but errors elsewhere are as large as it takes, or not.
      for share, kind in ((0.6, "numerics"), (0.4, "fault")):
        elsewhere = own - share * second.margin * warp.temperature * (np.arange(36) == own[:NEVER].argmin())
        assert judge(x, y, own, own, elsewhere).kind == kind
    else:
      edges += 1
      assert "at the edge of the support" in str(right)
    assert right.differs == float(shared_noise(*laws).differs)
    # Under the first model alone, without an error, the second run has not the token that its noise gives.
    wrong = judge(x, y, own, own, own)
    assert (wrong.kind, wrong.faulty) == ("fault", (1,))
    # Its noise unknown, it is another draw.
    assert judge(x, dataclasses.replace(y, key=None), own, own, off).kind == "another draw"
  assert 0 < edges < 50


def test_a_wrong_draw_under_shared_noise_is_a_fault(pair) -> None:
  run = sampled(pair[0], None, 0, Warp(temperature=1.5), STOP)[0][5]
  for token in (0, 4, 8, run.tokens[2]):
    changed = run.tokens.copy()
    changed[2] = token
    found = explain(run, dataclasses.replace(run, tokens=changed), pair[0])
    assert found.kind == ("same" if token == run.tokens[2] else "fault")
    assert found.faulty == (() if token == run.tokens[2] else (1,))


def test_runs_know_their_noise_and_law() -> None:
  model, key, warp = tabular.tabular(jax.random.key(0), 5), jax.random.key(1), Warp(temperature=np.array([0.5, 0.0]))
  nothing = dict.fromkeys(("rounds", "drafted", "accepted", "tested", "accepted_at", "overlap"), jnp.zeros(2))
  result = specjax.SampleResult(
    jnp.array([[1, 2, 3], [4, 0, 0]]),
    jnp.array([3, 1]),
    jnp.zeros((2, 3)),
    specjax.Stats(generated=jnp.array([2, 0]), **nothing),
  )
  first, second = Run.from_result(result, num_draft_tokens=2, key=key, warp=warp, verifier="coupled")
  assert (first.prompt.tolist(), first.tokens.tolist()) == ([1], [2, 3])
  assert (second.prompt.tolist(), second.tokens.tolist()) == ([4], [])
  assert (first.warp.temperature, second.warp.temperature) == (0.5, 0.0)
  assert (first.greedy, second.greedy) == (False, True)
  assert first.graph == Graph(width=3, batch=2)
  assert second.key == jax.random.fold_in(key, 1)
  with pytest.raises(ValueError, match="key has shape"):
    Run([0], [1], key=jax.random.split(key))
  with pytest.raises(TypeError, match="encode text first"):
    Run([0], np.array(["a"]))
  with pytest.raises(ValueError, match="a prompt has one or more"):
    Run([], [1])
  with pytest.raises(ValueError, match=r"tokens\[1\]=9 is outside"):
    next(replay(model, [Run([0], [9])], 1))
  with pytest.raises(ValueError, match="width 2 must divide the largest, 3"):
    next(replay(model, [Run([0], [1])], 2, 3))
  with pytest.raises(ValueError, match="0 runs and 1 widths"):
    next(replay(model, [], 1))
  with pytest.raises(ValueError, match=r"key has shape \(3,\); allowed: a single key, or one key for each of 2 rows"):
    Run.from_result(
      result, num_draft_tokens=2, key=jax.random.split(jax.random.key(2), 3), warp=warp, verifier="coupled"
    )
  own = np.array([1, 2])
  run = Run([0], own, Warp(temperature=np.array([0.5])))
  own[0] = 3
  assert run.tokens.tolist() == [1, 2]
  assert run.warp.temperature == 0.5
