"""Means and variances against enumeration in float64, and the memory that scoring takes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.audit import Samples, dependence, scores
from specjax.audit.scores import Moments
from tests.audit.engines import draft, part, samples, target

RNG = np.random.default_rng(0)
B, T, V = 2, 3, 7
LOGITS, DRAFT_LOGITS = (3 * RNG.standard_normal((B, T, V)).astype(np.float32) for _ in range(2))
DRAWN = RNG.integers(0, V, (B, T)).astype(np.int32)
RECENT = np.array([[[1, 2, 1, -1]] * T, [[3, 3, 3, 3]] * T], np.int32)
EARLIER = np.array([[[4, -1]] * T, [[-1, -1]] * T], np.int32)
WATCHED = {"repeat": RECENT, "copy": EARLIER, "echo": EARLIER[..., ::-1]}
STOPS = np.array([0, 5], np.int32)


SCORE = jax.jit(scores.score_positions)


def law(logits, temperature=1.0, top_k=0):
  scaled = logits.astype(np.float64) / temperature
  if top_k:
    scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
  p = np.exp(scaled - scaled.max())
  return p / p.sum()


def moments(f, p, x):
  mean = (p * f).sum()
  second, third, fourth = ((p * (f - mean) ** n).sum() for n in (2, 3, 4))
  return f[x] - mean, second, third, fourth - 3 * second**2


@pytest.mark.parametrize(
  "settings", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 4}, {"temperature": 0.8, "top_k": 1}]
)
def test_moments_are_exact(settings):
  warp = specjax.Warp(**settings).per_row(B)
  got = jax.device_get(SCORE(LOGITS, DRAFT_LOGITS, DRAWN, WATCHED, STOPS, warp))
  for b, t in np.ndindex(B, T):
    p, q, x = law(LOGITS[b, t], **settings), law(DRAFT_LOGITS[b, t], **settings), DRAWN[b, t]
    with np.errstate(divide="ignore", invalid="ignore"):
      ratio = np.where(q > 0, np.clip(np.log(q) - np.log(p), -scores.DRAFT_CLIP, scores.DRAFT_CLIP), -scores.DRAFT_CLIP)
      expected = {
        "surprise": np.minimum(-np.log(p), scores.SURPRISE_CLIP),
        "argmax": (np.arange(V) == p.argmax()) * 1.0,
        "repeat": np.isin(np.arange(V), RECENT[b, t]) * 1.0,
        "copy": np.isin(np.arange(V), EARLIER[b, t]) * 1.0,
        "echo": np.isin(np.arange(V), EARLIER[b, t]) * 1.0,
        "stop": np.isin(np.arange(V), STOPS) * 1.0,
        "draft": ratio,
      }
      shared = np.minimum(p, q)
    assert set(got.moments) == set(expected)
    for name, f in expected.items():
      own = [leaf[b, t] for leaf in got.moments[name]]
      np.testing.assert_allclose(own[:4], moments(f, p, x), atol=3e-5, rtol=2e-5, err_msg=name)
      deviations = (f - (p * f).sum())[p > 0]
      assert own[4] <= deviations.min() + 1e-5
      assert own[5] >= deviations.max() - 1e-5
    assert got.overlap[b, t] == pytest.approx(shared.sum(), abs=1e-6)
    left = np.maximum(p - q, 0)
    for found, weights in ((got.accepted, shared), (got.residual, left)):
      own = [m[b, t] for m in found[:4]]
      np.testing.assert_allclose(own, moments(ratio, weights / weights.sum(), x), atol=3e-5, rtol=2e-5)
    assert got.above[b, t] == pytest.approx(p[p > p[x]].sum(), abs=1e-6)
    assert got.tied[b, t] == pytest.approx(p[p == p[x]].sum(), abs=1e-6)
    raw = LOGITS[b, t][x] - math.log(np.exp(LOGITS[b, t].astype(np.float64)).sum())
    assert got.raw_log_p[b, t] == pytest.approx(raw, abs=1e-5)
    scaled = law(LOGITS[b, t], settings.get("temperature", 1.0))[x]
    assert got.scaled_log_p[b, t] == pytest.approx(math.log(scaled), abs=1e-5)
    assert got.single[b, t] == ((p > 0).sum() == 1)
    least = LOGITS[b, t][p > 0].min()
    assert got.margin[b, t] == pytest.approx(max(least - LOGITS[b, t][x], 0), abs=1e-6)


def test_excess_over_top_p():
  p = np.array([0.5, 0.3, 0.15, 0.05])
  logits = np.full((B, T, V), -np.inf, np.float32)
  logits[..., :4] = np.log(p)
  drawn = np.tile(np.array([[0, 2, 3]], np.int32), (B, 1))
  warp = specjax.Warp(top_p=0.7).per_row(B)
  got = SCORE(logits, DRAFT_LOGITS, drawn, WATCHED, STOPS, warp)
  np.testing.assert_allclose(got.excess[0, 1:], [0.1, 0.25], atol=1e-6)
  np.testing.assert_allclose(got.margin[0], [0.0, math.log(0.3 / 0.15), math.log(0.3 / 0.05)], atol=1e-6)
  np.testing.assert_array_equal(np.isneginf(got.log_p[0]), [False, True, True])


def test_scores_come_in_the_order_of_the_samples():
  """Generations of all lengths, in several buckets and batches, against the engine's own log-probabilities."""
  made = part(samples(), slice(0, 9))
  cut = [3, 40, 1, 17, 0, 25, 40, 2, 31]
  made = Samples(
    prompts=[np.resize(p, 3 if i % 2 else 110) for i, p in enumerate(made.prompts)],
    tokens=[t[:n] for t, n in zip(made.tokens, cut, strict=True)],
  )
  warp = specjax.Warp(np.linspace(0.5, 1.5, 9)).per_row(9)
  got = scores.score(target(), made, warp, np.zeros(0, np.int32), draft())

  @jax.jit
  def log_law(sequence, temperature):
    cache = target().init_cache(target().params, *sequence.shape)
    logits, _ = target().apply(target().params, sequence, cache, jnp.zeros(1, jnp.int32))
    return jax.nn.log_softmax(logits[0] / temperature, -1)

  at = 0
  for i, (prompt, tokens) in enumerate(zip(made.prompts, made.tokens, strict=True)):
    sequence = np.zeros((1, 256), np.int32)
    sequence[0, : len(prompt) + len(tokens)] = np.concatenate([prompt, tokens])
    p = np.asarray(log_law(sequence, warp.temperature[i]))
    expected = [p[len(prompt) + j - 1, token] for j, token in enumerate(tokens)]
    np.testing.assert_allclose(got.log_p[at : at + len(tokens)], expected, atol=1e-5)
    at += len(tokens)
  assert at == len(got.log_p) == made.num_tokens


def test_earlier_choices():
  made = Samples([[1], [2], [1], [1], [1]], [[5, 6, 7], [5, 6], [5, 8], [5, 6, 9], [4, 6]])
  choices = dependence.earlier_choices(made)
  assert set(choices) == {2, 3, 4}  # the others' prompts are new
  seen = {i: [sorted(t for t in row if t >= 0) for row in choices[i].tolist()] for i in choices}
  assert seen[2] == [[5], [6]]
  assert seen[3] == [[5], [6, 8], [7]]
  assert seen[4] == [[5], []]


def test_no_array_over_positions_and_vocabulary():
  """Whatever the length of the sequences, arrays over the vocabulary are of one chunk."""
  rows, slots = 4, 1024
  batch = scores.Batch(
    tokens=np.zeros((rows, slots), np.int32),
    lengths=np.full(rows, slots, np.int32),
    first=np.ones(rows, np.int32),
    earlier=np.zeros((rows, slots, dependence.EARLIER), np.int32),
    aligned=np.zeros((rows, slots, dependence.ALIGNED), np.int32),
    warp=specjax.Warp(top_p=0.9).per_row(rows),
    stop_ids=np.zeros(1, np.int32),
  )
  vocabulary = 2048
  model = wide(vocabulary)
  jaxpr = jax.make_jaxpr(lambda: scores._score_batch(model, model, batch, expected=False))()
  largest = max(math.prod(shape) for shape in shapes(jaxpr.jaxpr))
  assert largest == rows * scores.CHUNK * vocabulary


def wide(vocabulary: int) -> specjax.LanguageModel:
  def apply(params, tokens, cache, start):
    return jnp.broadcast_to(params[None, None], (*tokens.shape, vocabulary)), cache

  return specjax.LanguageModel(jnp.zeros(vocabulary), apply, lambda params, batch, length: jnp.zeros(()), vocabulary)


def shapes(jaxpr):
  for equation in jaxpr.eqns:
    yield from (variable.aval.shape for variable in equation.outvars)
    for value in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr") or hasattr(v, "eqns")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from shapes(inner)


def test_moments_of_one_score_fit_together():
  got = scores.score(target(), part(samples(), slice(0, 8)), specjax.Warp().per_row(8), np.zeros(0, np.int32), draft())
  for name, m in got.moments.items():
    assert isinstance(m, Moments)
    assert (m.deviation <= m.high + 1e-5).all(), name
    assert (m.deviation >= m.low - 1e-5).all(), name
