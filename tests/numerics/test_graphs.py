"""Graphs: what a name stands for, what each feeds through the model, and what is refused."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.models import ops, tabular
from specjax.models.forms import as_checkpoint, from_checkpoint
from specjax.models.load import open_checkpoint
from specjax.numerics import REFERENCE, Graph, logits, unavailable
from specjax.numerics.graphs import prepare
from specjax.warp import Warp
from tests import checkpoints

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
VOCAB = 7
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 23)


@pytest.fixture(scope="module")
def toy():
  return tabular.tabular(jax.random.key(0), VOCAB)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
  directory = tmp_path_factory.mktemp("llama")
  checkpoints.write("llama", directory)
  options = ops.Options(scan_layers=True, cpu_kernels=False)  # compiles fast
  return from_checkpoint(open_checkpoint(directory), dtype=jnp.float32, options=options)


def run(model, graph: Graph, tokens=TOKENS, **settings) -> np.ndarray:
  """Logits at every position, which must come in order and once."""
  chunks = list(logits(model, graph, tokens, **settings))
  first = settings.get("prompt_length", 1) - 1
  np.testing.assert_array_equal(np.concatenate([at for at, _ in chunks]), np.arange(first, len(tokens) - 1))
  return np.concatenate([out for _, out in chunks])


@pytest.mark.parametrize(
  "graph",
  [
    Graph(),
    Graph(width=4),
    Graph(width=4, padding=3),
    Graph(width=None, padding=5),
    Graph(width=None),
    Graph(batch=3, row=0),
    Graph(width=5, batch=3, row=2, slots=25),
    Graph(jit=False, width=8),
    Graph(mesh=(1, 1)),
  ],
  ids=str,
)
def test_every_graph_feeds_the_context(toy, graph: Graph) -> None:
  """A tabular model reads its own cache: a token that is stale, shifted or another row's gives other logits."""
  expected = tabular.laws(toy, jnp.asarray(TOKENS[None], jnp.int32), Warp().per_row(1))[0, :-1]
  got = jax.nn.log_softmax(run(toy, graph), axis=-1)
  np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("prompt_length", [1, 2, 12, 22])
def test_a_prompt_is_read_before(toy, prompt_length: int) -> None:
  whole = run(toy, Graph())
  for width in (1, 3, None):
    np.testing.assert_array_equal(run(toy, Graph(width=width), prompt_length=prompt_length), whole[prompt_length - 1 :])


def test_a_long_prompt_takes_several_passes(toy) -> None:
  tokens = np.random.default_rng(1).integers(0, VOCAB, 150)
  np.testing.assert_array_equal(run(toy, Graph(width=3), tokens, prompt_length=140), run(toy, Graph(), tokens)[139:])


def test_a_model_that_must_be_rewound(toy) -> None:
  recurrent = tabular.recurrent(toy)
  np.testing.assert_array_equal(run(recurrent, Graph(width=4, padding=2)), run(toy, Graph()))


def test_decoding_is_what_the_sampler_does(llama) -> None:
  """Log-probabilities of `sample` under the graph that it ran: reading the prompt in passes, then token by token."""
  prompt = np.arange(6)[None]
  result = specjax.sample(llama, None, prompt, key=jax.random.key(1), num_draft_tokens=0, max_new_tokens=12)
  tokens = np.asarray(result.tokens[0, : result.lengths[0]])
  laws = jax.nn.log_softmax(run(llama, Graph(), tokens, prompt_length=6), axis=-1)
  np.testing.assert_allclose(laws[np.arange(12), tokens[6:]], result.logprobs[0, 6:18], atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama_linear", "llama_tied", "qwen2", "qwen3", "gpt2"])
def test_float64_is_the_model_that_transformers_runs(name: str, tmp_path: pathlib.Path) -> None:
  """Within the bound of tests/models/test_parity.py, which tells every fault of a layer that was tried."""
  checkpoints.write(name, tmp_path)
  with np.load(GOLDEN / f"{checkpoints.VARIANTS[name].golden}.npz") as file:
    tokens, expected = file["tokens"][0], file["logits"][0, :-1]
  options = ops.Options(scan_layers=name in ("llama", "gpt2"), cpu_kernels=name != "llama")
  model = from_checkpoint(open_checkpoint(tmp_path), dtype=jnp.float32, options=options)
  got = run(model, REFERENCE, tokens)
  assert got.dtype == np.float64
  np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * expected.std())


def test_float64_is_more_exact_than_float32(llama) -> None:
  """Two float32 graphs differ from it by as much as from each other, and it from itself by nothing."""
  tokens = np.arange(40)
  exact, decode, whole = (run(llama, graph, tokens) for graph in (REFERENCE, Graph(), Graph(width=None)))
  assert 0 < np.abs(decode - exact).max() < 1e-5
  assert 0 < np.abs(decode - whole).max() < 2 * max(np.abs(decode - exact).max(), np.abs(whole - exact).max())
  # Of bfloat16 weights float64 is as far as float32 is.
  rounded = run(llama, dataclasses.replace(REFERENCE, weights="bfloat16"), tokens)
  assert np.abs(rounded - exact).max() > 1e-2
  np.testing.assert_allclose(run(llama, Graph(weights="bfloat16"), tokens), rounded, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_every_form_holds_the_same_tensors(name: str, tmp_path: pathlib.Path) -> None:
  checkpoints.write(name, tmp_path)
  checkpoint = open_checkpoint(tmp_path)
  for scan_layers in (False, True):
    for cpu_kernels in (False, True):
      options = ops.Options(scan_layers=scan_layers, cpu_kernels=cpu_kernels)
      model = from_checkpoint(checkpoint, dtype=jnp.float32, options=options)
      again = from_checkpoint(as_checkpoint(model), dtype=jnp.float32)
      original = from_checkpoint(checkpoint, dtype=jnp.float32)
      assert again.apply == original.apply
      jax.tree.map(np.testing.assert_array_equal, again.params, original.params)


def test_a_graph_decides_the_form(llama) -> None:
  model = prepare(llama, Graph(activations="bfloat16", scan_layers=False, cpu_kernels=True))
  assert model.apply.options == ops.Options(scan_layers=False, cpu_kernels=True)
  assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("bfloat16")}
  assert prepare(llama, Graph(width=5, batch=2)) is llama
  rounded = prepare(llama, Graph(weights="bfloat16")).params["embed"]["weight"]
  assert rounded.dtype == jnp.float32
  np.testing.assert_array_equal(rounded, rounded.astype(jnp.bfloat16).astype(jnp.float32))


def test_precision_reaches_the_products(llama) -> None:
  """On a CPU sums in float16 are what can be asked for and makes a difference."""
  tokens = np.arange(20)
  full, half = run(llama, Graph(width=8), tokens), run(llama, Graph(width=8, precision="F16_F16_F16"), tokens)
  assert np.abs(full - half).max() > 1e-4


def test_names_tell_graphs_apart() -> None:
  graphs = [Graph(), REFERENCE, Graph(width=None), Graph(width=16), Graph(width=4, padding=12), Graph(batch=2)]
  graphs += [Graph(batch=2, row=1), Graph(jit=False), Graph(mesh=(1, 2)), Graph(batch=2, mesh=(2, 1)), Graph(slots=128)]
  graphs += [Graph(**{axis: value}) for axis in ("scan_layers", "cpu_kernels") for value in (False, True)]
  graphs += [Graph(**{axis: "bfloat16"}) for axis in ("weights", "activations", "precision")]
  assert len({*map(str, graphs)}) == len(graphs)
  assert Graph(width=np.int64(4)) == Graph(width=4)
  assert str(Graph(width=5, batch=8, row=7, activations="bfloat16")) == "verify 5, batch 8 row 7, bfloat16"


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"width": 0}, "width=0 must be a whole number, 1 or more"),
    ({"width": 2.5}, "width=2.5"),
    ({"padding": -1}, "padding=-1 must be a whole number, 0 or more"),
    ({"batch": 4, "row": 4}, "row=4 is outside the batch: allowed 0 to 3"),
    ({"weights": "float8"}, "weights='float8' is unknown; allowed: None, float32, bfloat16, float16"),
    ({"activations": "float64"}, "width=1 must be None"),
    ({"width": None, "activations": "float64", "batch": 2}, "batch left alone"),
    ({"mesh": (0, 1)}, "two numbers of devices"),
    ({"mesh": 3}, "two numbers of devices"),
    ({"mesh": (True, 1)}, "two numbers of devices"),
    ({"jit": "no"}, "jit='no' must be one of True, False"),
    ({"scan_layers": 2}, "scan_layers=2 must be one of None, True, False"),
    ({"precision": ""}, "precision='' must be None or a name"),
    ({"mesh": (2, 1), "batch": 3}, "batch=3 can't be split over the 2 devices"),
  ],
)
def test_graphs_that_no_machine_could_run(settings: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    Graph(**settings)


def test_graphs_that_this_machine_cannot_run(toy, llama) -> None:
  count = jax.device_count()
  many = Graph(mesh=(1, count + 1))
  assert unavailable(llama, many, 9) == f"it takes {count + 1} devices, and this process has {count} (cpu)"
  with pytest.raises(ValueError, match=f"mesh 1x{count + 1} can't run here: it takes {count + 1} devices"):
    logits(llama, many, [1, 2, 3])
  assert "not supported" in (unavailable(llama, Graph(precision="BF16_BF16_BF16"), 9) or "")
  assert "8 slots are too few: these passes over 9 tokens write 10" in (
    unavailable(llama, Graph(width=5, slots=8), 9) or ""
  )
  for graph in (REFERENCE, Graph(activations="bfloat16"), Graph(scan_layers=True)):
    assert "decoders of specjax.models alone" in (unavailable(toy, graph, 9) or "")
  assert "how to split" in (unavailable(toy, Graph(mesh=(1, 2)), 9) or "")
  assert unavailable(llama, Graph(width=5, slots=10), 9) is None


@pytest.mark.parametrize(
  ("tokens", "error", "message"),
  [
    ([3], ValueError, r"shape \(1,\)"),
    ([[1, 2]], ValueError, r"one context, int\[T\]"),
    ([0.5, 1.0], TypeError, "must hold integers"),
    ([1, 97], ValueError, r"tokens\[1\]=97 is outside the vocabulary, 0 to 96"),
    ([1] * 129, ValueError, "129 ids; the model's context holds 128"),
  ],
)
def test_tokens_that_are_no_context(llama, tokens, error: type[Exception], message: str) -> None:
  with pytest.raises(error, match=message):
    logits(llama, Graph(), tokens)


@pytest.mark.parametrize("prompt_length", [0, 4])
def test_a_prompt_leaves_something_to_look_at(toy, prompt_length: int) -> None:
  with pytest.raises(ValueError, match=f"prompt_length={prompt_length} is out of range: allowed 1 to 3"):
    logits(toy, Graph(), [0, 1, 2, 3], prompt_length=prompt_length)
