"""Explanations of constructed differences: numerics, another draw, faults, and runs that can't be compared."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import keys
from specjax.models import tabular
from specjax.models.config import DecoderConfig
from specjax.models.ops import Options
from specjax.models.transformer import Decoder, as_language_model
from specjax.numerics import REFERENCE, Graph, Run, compare, explain, judge, shared_noise
from specjax.warp import Warp

GREEDY = Warp(temperature=0.0)


def table(*logits: float) -> specjax.LanguageModel:
  """These logits behind any text."""
  return tabular.from_table(np.broadcast_to(np.array(logits, np.float32), (1, len(logits) + 1, len(logits))))


def greedy(*tokens: int, **more) -> Run:
  return Run([0, 1], list(tokens), GREEDY, **more)


def drawn(*tokens: int, **more) -> Run:
  return Run([0, 1], list(tokens), **more)


@pytest.mark.parametrize(("a", "b", "kind"), [((1, 2), (1, 2), "same"), ((1, 2), (1, 2, 0), "prefix")])
def test_runs_that_differ_in_no_token(a, b, kind: str) -> None:
  found = explain(greedy(*a), greedy(*b), table(0, 1, 2))
  assert (found.kind, found.at, found.evidence) == (kind, None if kind == "same" else 2, ())
  assert {"same": "all 2 tokens are the same", "prefix": "run a ends after 2 tokens"}[kind] in str(found)
  assert explain(greedy(*b), greedy(*a), table(0, 1, 2)).kind == kind


def test_ends_at_a_stop_token() -> None:
  model = table(0, 1, 2)
  overrun = explain(greedy(1, 2), greedy(1, 2, 0), model, eos_id=2)
  assert (overrun.kind, overrun.at, overrun.faulty) == ("fault", 2, (1,))
  assert "with the stop token 2; run b has 3 and goes on behind it" in str(overrun)
  stripped = explain(greedy(1), greedy(1, 2), model, eos_id=2)
  assert (stripped.kind, stripped.at) == ("prefix", 1)
  assert "the last of them the stop token 2" in str(stripped)
  for a, b in (((2, 0), (2, 1)), ((1, 2, 0, 0), (1, 2, 0, 1)), ((2, 0), (2, 0, 0)), ((2, 0), (2, 0))):
    both = explain(greedy(*a), greedy(*b), model, eos_id=2)
    assert (both.kind, both.faulty, both.at) == ("fault", (0, 1), a.index(2) + 1)
    assert f"token {a.index(2)} of both, 2, ends a text" in str(both)
  assert explain(greedy(1, 2), greedy(1, 2), model, eos_id=2).kind == "same"


def test_an_exact_tie_is_numerics() -> None:
  found = explain(greedy(1, 2), greedy(1, 1), table(0, 3, 3))
  assert (found.kind, found.at, found.faulty, found.differs) == ("numerics", 1, (), None)
  assert [e.margin for e in found.evidence] == [0, 0]
  assert [e.repeated for e in found.evidence] == [False, True]  # our argmax takes the lowest id
  assert "tie exactly" in str(found)


def test_a_greedy_token_below_the_best_is_a_fault() -> None:
  """Nothing is off in a table, so that not even a margin of 1e-3 can be turned around."""
  found = explain(greedy(1, 2), greedy(1, 1), table(0, 3, 3.001))
  assert (found.kind, found.at, found.faulty) == ("fault", 1, (1,))
  assert found.evidence[1].margin == pytest.approx(1e-3, rel=1e-3)
  assert found.evidence[1].log_p == pytest.approx(3 - np.log(1 + np.exp(3) + np.exp(3.001)), rel=1e-5)
  assert "run b's token is 0.001 short of argmax" in str(found)
  assert "not known" in str(found)
  twice = explain(greedy(0), greedy(1), table(0, 3, 3.001))
  assert twice.faulty == (0, 1)


def test_the_error_decides_what_is_a_fault() -> None:
  """The same margin, .3: errors of .2 can turn it around, of .1 not."""
  runs = greedy(2, graph=Graph(width=4)), greedy(1)
  reference, own = np.array([0, 3, 3.3]), np.array([0, 3, 3.3])
  for error, kind in ((0.2, "numerics"), (0.1, "fault")):
    found = judge(*runs, reference, own, reference + np.array([0, 0, error]))
    assert (found.kind, found.evidence[1].error) == (kind, pytest.approx(error))
    assert not found.evidence[1].repeated
  # Fed again the graph gives the token: nothing is left to explain.
  flipped = judge(*runs, reference, own, np.array([0, 3.2, 3.1]))
  assert (flipped.kind, flipped.evidence[1].repeated) == ("numerics", True)


def test_another_draw() -> None:
  model = table(0, 1, 2)
  found = explain(drawn(2, 0), drawn(2, 1), model)
  assert (found.kind, found.at) == ("another draw", 1)
  p = np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
  assert found.differs == pytest.approx(1 - (p**2).sum())
  assert [np.exp(e.log_p) for e in found.evidence] == pytest.approx(p[:2])
  assert [e.margin for e in found.evidence] == [None, None]
  assert "not known to share their noise" in str(found)
  row = keys.row_keys(jax.random.key(0), 2)
  other_keys = explain(drawn(2, key=row[0]), drawn(0), model)
  assert other_keys.kind in ("another draw", "fault")
  laws = explain(Run([0], [0]), Run([0], [1], Warp(temperature=0.5)), model)
  assert "asked for different laws" in str(laws)
  mixed = explain(drawn(1), greedy(2), model)
  assert mixed.kind == "another draw"
  assert mixed.differs == pytest.approx(1 - p[2])


@pytest.mark.parametrize(
  ("settings", "token", "inside"),
  [
    ({"top_k": 2}, 1, False),
    ({"top_k": 2}, 2, True),
    ({"top_k": 2}, 3, True),
    ({"top_p": 0.6}, 3, True),  # ties are kept together
    ({"top_p": 0.5}, 1, False),
    ({"top_p": 0.97}, 1, True),
    ({"top_k": 3, "top_p": 0.97}, 1, False),  # of what top-k left, the first two have .976
    ({"min_p": 0.05}, 1, False),
    ({"min_p": 0.04}, 1, True),
    ({"top_p": 0.99}, 0, False),
    ({}, 0, True),
  ],
)
def test_a_token_outside_the_support_is_a_fault(settings, token: int, inside: bool) -> None:
  """At temperature 2 tokens 2 and 3 tie with .967 of the mass together, 1 has .024 and 0 .009."""
  model = table(0, 2, 8, 8)
  other = 2 if token != 2 else 3
  warp = Warp(temperature=2.0, **settings)
  found = explain(Run([1], [other], warp), Run([1], [token], warp), model)
  assert found.kind == ("another draw" if inside else "fault")
  assert found.faulty == (() if inside else (1,))
  if not inside:
    assert "run b's token has no mass" in str(found)


def test_a_forbidden_token_is_a_fault() -> None:
  found = explain(drawn(2), drawn(0), table(-np.inf, 0, 1))
  assert (found.kind, found.faulty, found.evidence[1].log_p) == ("fault", (1,), -np.inf)


def test_errors_move_the_edge_of_a_support() -> None:
  """The third token is .3 below the second, so that top-k 2 may keep it if errors are .15, and not if they are .1."""
  reference = np.array([3.0, 2.0, 1.7])
  runs = Run([0], [0], Warp(top_k=2)), Run([0], [2], Warp(top_k=2))
  for error, kind in ((0.16, "another draw"), (0.1, "fault")):
    assert judge(*runs, reference, reference, reference - np.array([0, error, 0])).kind == kind
  # The first token has .665 of the mass; with errors of .1 it may have less than .63, and then the second is kept too.
  runs = Run([0], [0], Warp(top_p=0.63)), Run([0], [1], Warp(top_p=0.63))
  reference = np.array([3.0, 2.0, 1.0])
  for error, kind in ((0.1, "another draw"), (0.05, "fault")):
    assert judge(*runs, reference, reference, reference + np.array([error, 0, 0])).kind == kind


def _logits(model, tokens) -> np.ndarray:
  cache = model.init_cache(model.params, 1, 16)
  return np.asarray(model.apply(model.params, np.asarray(tokens, np.int32)[None], cache, np.zeros(1, np.int32))[0])[
    0, -1
  ]


@pytest.fixture(scope="module")
def decoder() -> specjax.LanguageModel:
  config = DecoderConfig(
    architecture="toy", vocab_size=64, context_length=32, num_layers=1, d_model=32, num_heads=2, num_kv_heads=1,
    head_dim=16, d_ff=48,
  )  # fmt: skip
  return as_language_model(Decoder(config, options=Options(True, False), rngs=nnx.Rngs(0)))


def test_a_decoder_is_fed_again_in_the_graphs_named(decoder) -> None:
  prompt = [5, 9, 2]
  best = int(_logits(decoder, prompt).argmax())
  worst = int(_logits(decoder, prompt).argmin())
  runs = Run(prompt, [best], GREEDY, Graph()), Run(prompt, [worst], GREEDY, Graph(width=4, activations="bfloat16"))
  found = explain(*runs, decoder)
  assert (found.kind, found.faulty, found.reference) == ("fault", (1,), REFERENCE)
  assert 0 < found.evidence[0].error < 1e-5 < 1e-3 < found.evidence[1].error
  assert "verify 4, bfloat16, error" in str(found)
  same = explain(*runs, decoder, reference=Graph(width=None))
  assert same.evidence[1].margin == pytest.approx(found.evidence[1].margin, abs=1e-5)
  with pytest.raises(ValueError, match="run b's graph, decode, mesh 1x64, can't run here: it takes 64 devices"):
    explain(runs[0], dataclasses.replace(runs[1], graph=Graph(mesh=(1, 64))), decoder)


class Words:
  def decode(self, ids) -> str:
    return "-".join(f"w{i}" for i in ids)


def test_padded_ids_are_no_tokens() -> None:
  """`specjax.sharding.shard` pads a vocabulary that its devices don't divide."""
  config = DecoderConfig("tiny", 24, 64, 1, 16, 2, 2, 8, 16, vocab_padding=3)
  options = Options(scan_layers=True, cpu_kernels=False)
  model = as_language_model(Decoder(config, options=options, rngs=nnx.Rngs(0)))
  found = compare(model, [1, 2, 4, 3], [Graph(), Graph(width=3)])
  assert not found.not_run
  assert found.measured["decode"].max_error.max() < 1e-4
  with pytest.raises(ValueError, match="22 is outside the vocabulary, 0 to 20"):
    compare(model, [1, 2, 22, 3], [Graph()])
  assert explain(greedy(19), greedy(20), model).kind in ("fault", "numerics")
  with pytest.raises(ValueError, match=r"run a.*22 is outside the vocabulary, 0 to 20"):
    explain(greedy(22), greedy(20), model)


def test_a_probability_that_nothing_draws_is_a_fault() -> None:
  found = explain(drawn(2), drawn(0), table(-40, 0, 1))
  assert (found.kind, found.faulty) == ("fault", (1,))
  assert "run b's token has a probability of 1.1e-18" in str(found)
  assert explain(drawn(2), drawn(0), table(-20, 0, 1)).kind == "another draw"
  # Errors of 10 could have made it likely.
  assert judge(drawn(2), drawn(0), [-40, 0, 1], [-40, 0, 1], [-30, 0, 1]).kind == "another draw"


def test_one_key_is_one_noise_under_two_warps() -> None:
  logits, key = np.linspace(0, 1, 8), keys.row_keys(jax.random.key(112), 1)[0]
  a, b = drawn(2, key=key), Run([0, 1], [4], Warp(temperature=0.97), key=key)
  shared = shared_noise(logits, logits / 0.97).differs
  assert judge(a, b, logits, logits, logits).differs == pytest.approx(shared, rel=1e-4)
  assert shared < 0.01


def test_a_token_beyond_an_edge_that_errors_move_has_no_margin() -> None:
  key, warp, r = keys.row_keys(jax.random.key(1), 1)[0], Warp(top_k=2), np.array([3.0, 2.0, 1.95, 0.0])
  found = judge(Run([0], [0], warp, None, key), Run([0], [2], warp, None, key), r, r, r + np.array([0, 0, 0, 0.2]))
  assert (found.kind, found.evidence[1].edge, found.evidence[1].margin) == ("numerics", True, None)
  assert "at the edge of the support" in str(found)
  assert "the best" not in str(found).splitlines()[2]


def test_text_is_shown() -> None:
  assert "token 0 'w0', p = 0.09" in str(explain(drawn(0), drawn(2), table(0, 1, 2), tokenizer=Words()))


@pytest.mark.parametrize(
  ("a", "b", "message"),
  [
    (Run([0, 1], [2]), Run([0, 2], [2]), "different prompts .token 1 is 1 in one, 2 in the other"),
    (Run([0, 1], [2]), Run([0], [2]), "different prompts .they have 2 and 1 tokens"),
    (Run([0], [2]), Run([0], [64]), r"run b, its prompt of 1 tokens included: tokens\[1\]=64 is outside"),
    (Run([0], [-1]), Run([0], [2]), r"run a, .* tokens\[1\]=-1 is outside"),
    (Run([70], []), Run([70], []), r"run a, .* tokens\[0\]=70 is outside"),
    (Run([0], [1] * 31), Run([0], [1] * 32), "run b, .* has 33 ids; the model's context holds 32"),
  ],
)
def test_bad_runs(decoder, a: Run, b: Run, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    explain(a, b, decoder)


def test_bad_logits() -> None:
  with pytest.raises(ValueError, match="run b's graph gives logits that are not finite"):
    judge(greedy(0), greedy(1), [0.0, 1.0], [0.0, 1.0], [np.nan, 1.0])
  with pytest.raises(ValueError, match="don't differ"):
    judge(greedy(0), greedy(0), [0.0, 1.0], [0.0, 1.0], [0.0, 1.0])
  with pytest.raises(ValueError, match="the logit of 1 is -inf in run a's graph"):
    judge(greedy(0), greedy(1), [0.0, 1.0], [0.0, -np.inf], [0.0, 1.0])
  with pytest.raises(ValueError, match=r"run a's graph gives logits of shape \(1,\)"):
    judge(greedy(0), greedy(1), [0.0, 1.0], [0.0], [0.0, 1.0])
  with pytest.raises(ValueError, match="run b's token 2 is outside the vocabulary, 0 to 1"):
    judge(greedy(0), greedy(2), [0.0, 1.0], [0.0, 1.0], [0.0, 1.0])
  with pytest.raises(ValueError, match="different prompts"):
    judge(greedy(0), Run([1], [1], GREEDY), [0.0, 1.0], [0.0, 1.0], [0.0, 1.0])
  with pytest.raises(TypeError, match=r"got list, Run, LanguageModel"):
    explain([0], greedy(1), table(0, 1))
  with pytest.raises(TypeError, match="or None, got str"):
    explain(greedy(0), greedy(1), table(0, 1), reference="float64")
