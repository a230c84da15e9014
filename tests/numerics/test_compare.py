"""Comparisons: errors that a person can compute, flips that were planted, and what was not run."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.files import plain
from specjax.language_model import LanguageModel
from specjax.models import tabular
from specjax.models.config import DecoderConfig
from specjax.models.ops import Options
from specjax.models.transformer import Decoder, as_language_model
from specjax.numerics import Graph, Measurement, compare
from specjax.numerics.comparison import _bootstrap, _share, _units
from specjax.numerics.measure import _rows

EXACT = Graph(width=None)
ROUNDED = Graph(weights="bfloat16")
BIT = 2.0**-8  # bfloat16 holds 1 + 2 BIT, and rounds 1 + BIT to 1 (half to even)


def two_layers(first, second) -> LanguageModel:
  """logits = second[V, d] first[d, V] one_hot(token): no cache, no context."""

  def apply(params, tokens, cache, start):
    hidden = params["first"].T[tokens]
    return jnp.einsum("btd,vd->btv", hidden, params["second"]), cache

  params = {"first": jnp.asarray(first, jnp.float32), "second": jnp.asarray(second, jnp.float32)}
  return LanguageModel(params, apply, lambda params, batch, length: jnp.zeros((batch, length)), len(second))


@pytest.fixture(scope="module")
def decoder() -> LanguageModel:
  config = DecoderConfig("tiny", 40, 256, 2, 32, 4, 2, 8, 48)
  options = Options(scan_layers=True, cpu_kernels=False)  # compiles fast
  return as_language_model(Decoder(config, options=options, rngs=nnx.Rngs(0)))


def test_errors_that_are_computed_by_hand() -> None:
  """Rounding turns column 0 of the first layer, (1 + BIT, 2), into (1, 2), and leaves column 1, (1, 1), alone."""
  model = two_layers([[1 + BIT, 1.0], [2.0, 1.0]], [[1.0, 0.0], [4.0, -1.0]])
  # Token 0: exact logits (1 + BIT, 2 + 4 BIT), rounded (1, 2). Token 1: (1, 3) in both.
  found = compare(model, np.array([0, 1, 0, 1]), [ROUNDED], reference=EXACT).measured[str(ROUNDED)]
  p = 1 / (1 + math.exp(1 + 3 * BIT))
  q = 1 / (1 + math.exp(1))
  kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
  assert found.max_error.tolist() == [4 * BIT, 0, 4 * BIT]
  np.testing.assert_allclose(found.rms_error, [math.sqrt(17 / 2) * BIT, 0, math.sqrt(17 / 2) * BIT], rtol=1e-12)
  np.testing.assert_allclose(found.tv, [q - p, 0, q - p], rtol=1e-12)
  np.testing.assert_allclose(found.kl, [kl, 0, kl], rtol=1e-9)
  assert found.margin.tolist() == [1, 2, 1]
  assert not found.flip.any()
  assert not found.support.any()


def test_planted_near_ties_flip_and_are_counted() -> None:
  """The later token leads by BIT, which rounding takes away: a tie, which the lower id wins. And three that stay."""
  table = np.full((1, 7, 6), -8.0)
  table[:, :, :2] = 0.0, 0.5  # everywhere: margin 0.5, safe
  table[:, 2, :2] = 1.0, 1 + BIT  # behind token 2: flips
  table[:, 3, :2] = 1 + BIT, 1.0  # behind token 3: ties, and the lower id led before
  table[:, 4, :2] = 1.0, 1 + 2 * BIT  # behind token 4: bfloat16 can hold the difference
  tokens = np.array([0, 2, 3, 4, 2, 1, 2, 0])
  found = compare(tabular.from_table(table), tokens, [ROUNDED, EXACT], reference=Graph())
  rounded, summary = found.measured[str(ROUNDED)], found.summary()
  assert rounded.flip.tolist() == [False, True, False, False, True, False, True]
  assert rounded.margin.tolist() == [0.5, 0, 0, 2 * BIT, 0, 0.5, 0]
  assert found.reference.margin.tolist() == [0.5, BIT, BIT, 2 * BIT, BIT, 0.5, BIT]
  assert summary[str(ROUNDED)].flips.estimate == 3 / 7
  assert summary[str(ROUNDED)].at_risk.estimate == 4 / 7
  assert summary[str(EXACT)].flips.estimate == summary[str(EXACT)].at_risk.estimate == 0
  assert summary[str(ROUNDED)].bits == 3 / 7
  assert summary[str(EXACT)].bits == 1


def test_a_support_that_changes() -> None:
  """Behind token 1 rounding makes two tokens tie at the edge of the nucleus, and both are kept."""
  table = np.tile(np.array([4.0, 0.0, -1.0]), (1, 4, 1))
  table[:, 1] = 3.0, 1 + BIT, 1.0
  found = compare(tabular.from_table(table), np.array([0, 1, 0, 1, 2]), [ROUNDED], reference=Graph(), top_p=0.85)
  assert found.measured[str(ROUNDED)].support.tolist() == [0, 1, 0, 1]
  assert found.summary()[str(ROUNDED)].support.estimate == 0.5


def test_tokens_without_mass() -> None:
  table = np.array([[[0.0, -np.inf, 1 + BIT]] * 4])
  found = compare(tabular.from_table(table), np.array([0, 1, 2]), [ROUNDED], reference=Graph()).measured[str(ROUNDED)]
  assert found.max_error.tolist() == [BIT, BIT]
  assert (found.kl > 0).all()
  assert np.isfinite(found.kl).all()


def test_small_divergences_do_not_cancel() -> None:
  """A hundredth of what a sum of p log(p/q) in float64 could resolve beside its rounding."""
  tiny = 2.0**-30
  kl = _rows(np.zeros((1, 2), np.float32), np.array([[tiny, 0.0]]), 0.9)[2]
  np.testing.assert_allclose(kl, tiny**2 / 8, rtol=1e-6)


def test_passes_of_any_size_measure_the_same(decoder) -> None:
  """A pass of more rows than are looked at together, and contexts of different lengths."""
  contexts = [np.arange(39), np.arange(25)]
  whole = compare(decoder, contexts, [Graph(width=None)])
  assert whole.lengths == (38, 24)
  each = [compare(decoder, context, [Graph(width=None)]) for context in contexts]
  together = whole.measured["whole"]
  for field in ("max_error", "kl", "margin", "digest", "sketch"):
    apart = np.concatenate([getattr(own.measured["whole"], field) for own in each])
    np.testing.assert_array_equal(getattr(together, field), apart)
  assert 0 < together.max_error.max() < 1e-5
  assert not whole.reference.max_error.any()


def test_identical_bits_and_why(decoder) -> None:
  blocks = Graph(cpu_kernels=True)
  graphs = [
    Graph(),
    blocks,
    Graph(cpu_kernels=True, slots=512),
    Graph(scan_layers=False),
    Graph(activations="bfloat16"),
  ]
  found = compare(decoder, np.arange(30) % 40, graphs)
  groups = {group.graphs: {a: why for a, _, why in group.reasons} for group in found.identical()}
  assert groups.keys() == {("decode", "decode, unrolled"), ("decode, cpu kernels", "decode, 512 slots, cpu kernels")}
  assert "loop over the layers" in groups["decode", "decode, unrolled"]["decode, unrolled"]
  slots = groups["decode, cpu kernels", "decode, 512 slots, cpu kernels"]
  assert "blocks of 128 slots" in slots["decode, 512 slots, cpu kernels"]
  names, matrix = found.differences()
  assert matrix[names.index("decode"), names.index("decode, unrolled")] == 0
  assert matrix[names.index("decode"), names.index("decode, cpu kernels")] > 0
  apart = matrix[names.index("float64"), names.index("decode, bfloat16")]
  # The sketch is of some logits; over all of them the difference is much the same.
  assert apart == pytest.approx(found.summary()["decode, bfloat16"].rms_error.estimate, rel=0.5)


def test_a_mistake_in_one_bit_is_no_identity() -> None:
  table = np.array([[[0.0, 1.0]] * 3])
  model, other = (tabular.from_table(table + off) for off in (0.0, np.array([0.0, 2.0**-23])))
  tokens = np.array([0, 1, 1])
  digests = [compare(m, tokens, [Graph()], reference=Graph(width=2)).measured["decode"].digest for m in (model, other)]
  assert (digests[0] != digests[1]).all()


def test_what_cannot_run_is_listed(decoder) -> None:
  many = Graph(mesh=(1, jax.device_count() + 1))
  found = compare(decoder, np.arange(9), [many, Graph(width=4), Graph(precision="BF16_BF16_BF16"), Graph(slots=4)])
  assert list(found.measured) == ["verify 4"]
  assert f"takes {jax.device_count() + 1} devices" in found.not_run[str(many)]
  assert "not supported" in found.not_run["decode, precision BF16_BF16_BF16"]
  assert "4 slots are too few" in found.not_run["decode, 4 slots"]


def test_what_the_backend_refuses_while_compiling_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
  def refuse(*_):
    raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no code for that\nmore")

  model = tabular.from_table(np.zeros((1, 3, 2)))
  monkeypatch.setattr(
    "specjax.numerics.comparison.prepare", lambda model, graph: refuse() if graph.batch > 1 else model
  )
  found = compare(model, np.array([0, 1, 1]), [Graph(batch=2), Graph()], reference=EXACT)
  assert found.not_run == {"decode, batch 2 row 0": "UNIMPLEMENTED: no code for that"}
  assert list(found.measured) == ["decode"]


@pytest.mark.parametrize(
  ("tokens", "settings", "message"),
  [
    ([0, 1], {}, "the reference float64 can't run here: the float64 forward is known for"),
    ([0, 1], {"reference": EXACT, "top_p": 1.0}, "top_p=1.0"),
    ([[0, 1], [0, 2]], {"reference": EXACT}, r"tokens\[1\]=2 is outside"),
    ([], {"reference": EXACT}, "holds no context"),
    ([0, 1], {"reference": EXACT, "graphs": [Graph(), Graph(width=1)]}, "decode is given 2 times"),
  ],
)
def test_bad_input(tokens, settings, message: str) -> None:
  model = tabular.from_table(np.zeros((1, 3, 2)))
  with pytest.raises(ValueError, match=message):
    compare(model, tokens, **{"graphs": [Graph()], **settings})


@pytest.mark.parametrize("graphs", [Graph(), ["decode"], "decode"])
def test_what_is_no_graph(graphs) -> None:
  with pytest.raises(TypeError, match="graphs must be a list of"):
    compare(tabular.from_table(np.zeros((1, 3, 2))), [0, 1], graphs, reference=EXACT)


def test_logits_that_are_not_finite_agree_with_nothing() -> None:
  """In the reference they are refused; in a graph every position where they are is at risk, and is counted."""
  broken = tabular.from_table(np.full((1, 4, 3), [0, np.nan, 1], np.float32))
  with pytest.raises(ValueError, match="the reference whole gives logits that are no law at position 0 of context 0"):
    compare(broken, [0, 1, 2], [Graph()], reference=EXACT)

  def apply(params, tokens, cache, start):
    logits = jnp.broadcast_to(params, (*tokens.shape, 3))
    return (logits.at[..., 1].set(jnp.nan) if tokens.shape[1] == 1 else logits), cache

  model = LanguageModel(jnp.arange(3.0), apply, lambda params, batch, length: jnp.zeros((batch, length)), 3)
  found = compare(model, [0, 1, 2, 0], [Graph(), Graph(width=3)], reference=EXACT)
  summary = found.summary()
  assert (summary["decode"].not_finite, summary["decode"].at_risk.estimate) == (3, 1)
  assert (summary["verify 3"].not_finite, summary["verify 3"].at_risk.estimate) == (0, 0)
  assert "decode (not finite at 3)" in str(found)


def test_a_comparison_in_print(decoder) -> None:
  lines = str(compare(decoder, np.arange(9), [Graph(), Graph(width=4), Graph(slots=1)])).splitlines()
  assert lines[0] == "8 positions against float64"
  assert [line.split("  ")[1].strip() for line in lines[1:4]] == ["graph", "decode", "verify 4"]
  assert len({len(line) for line in lines[1:4]}) == 1
  assert lines[4].startswith("not run: decode, 1 slots: 1 slots are too few")


def test_measurements_survive_json(decoder) -> None:
  found = compare(decoder, np.arange(9), [Graph(mesh=(1, 1))]).measured["decode, mesh 1x1"]
  again = Measurement.of_plain(json.loads(json.dumps(plain(found))))
  assert again.graph == found.graph
  for name, value in vars(found).items():
    np.testing.assert_array_equal(getattr(again, name), value)
    assert name == "graph" or getattr(again, name).dtype == value.dtype


def test_intervals_know_that_neighbours_resemble() -> None:
  """Values constant within a block of 16 carry one value's worth: the interval is about 4 times as wide."""
  units = _units([160, 160])
  assert units[-1] == 19
  values = np.random.default_rng(0).normal(size=320)
  blocky = np.repeat(values[:20], 16)
  narrow, wide = _bootstrap(values, units), _bootstrap(blocky, units)
  assert narrow.low < narrow.estimate < narrow.high
  assert 2.5 < (wide.high - wide.low) / (narrow.high - narrow.low) < 6
  assert _units([5] * 8).tolist() == np.repeat(np.arange(8), 5).tolist()
  assert np.isnan(_bootstrap(np.ones(32), _units([32])).low)


def test_intervals_cover() -> None:
  """Of 200 samples whose blocks share a mean, the interval holds the true one in nearly 95 %."""
  rng, units = np.random.default_rng(0), _units([320] * 2)
  hits = 0
  for _ in range(200):
    values = np.repeat(rng.normal(size=40), 16) + rng.normal(size=640)
    interval = _bootstrap(values, units)
    hits += interval.low <= 0 <= interval.high
  assert 0.88 < hits / 200 <= 1


def test_no_event_is_not_certainty() -> None:
  interval = _share(np.zeros(100, bool))
  assert (interval.estimate, interval.low) == (0, 0)
  assert interval.high == pytest.approx(1 - 0.025 ** (1 / 100))


def test_figure(decoder, tmp_path) -> None:
  compare(decoder, np.arange(9), [Graph(), Graph(mesh=(1, 1))]).plot(tmp_path / "a.png", "tiny")
  assert (tmp_path / "a.png").stat().st_size > 10_000
