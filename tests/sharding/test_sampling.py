"""Sampling from models on a mesh: the same tokens, nothing of the vocabulary gathered, the state where it belongs."""

import os
import pathlib
import pickle
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.sharding.on_devices import GAMMA, NEW, ROWS, SAVED, V, settings
from tests.statistics import assert_follows

KINDS = "all-gather|all-reduce|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast|reduce-scatter"
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"  # compiles in half the time


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
  folder = tmp_path_factory.mktemp("devices")
  root = pathlib.Path(__file__).parents[2]
  environment = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
  subprocess.run([sys.executable, "-m", "tests.sharding.on_devices", folder], check=True, cwd=root, env=environment)
  return {"folder": folder} | pickle.loads((folder / "found.pkl").read_bytes())


def collectives(program: str) -> list[tuple[str, list[tuple[int, ...]]]]:
  """Kind, and the shapes of the results, of every collective in a compiled program's text."""
  lines = re.findall(rf"^.* = .* (?:{KINDS})(?:-start)?\(.*$", program, re.MULTILINE)
  kinds = [re.search(rf" ({KINDS})(?:-start)?\(", line).group(1) for line in lines]
  types = [re.findall(r"\w+\[([\d,]*)\]", line.split(", channel_id")[0]) for line in lines]
  return list(zip(kinds, [[tuple(map(int, filter(None, t.split(",")))) for t in own] for own in types], strict=True))


def too_large(program: str, parts: int = 4) -> list[tuple[str, tuple[int, ...]]]:
  """Collectives that move as much as a device's part of a law, or anything but sums and one candidate a device."""
  return [
    (kind, shape)
    for kind, shapes in collectives(program)
    for shape in shapes
    if max(shape, default=1) >= V // parts or (kind != "all-reduce" and (kind != "all-gather" or shape[-1] != parts))
  ]


@pytest.mark.parametrize("name", ["sample", "token", "block", "match"])
def test_nothing_as_long_as_the_vocabulary_is_gathered(found, name) -> None:
  """Under every warp: settings are dynamic, so that one program holds them all. `sample` is under `coupled`."""
  assert len(collectives(found["programs"][name])) > 10
  assert not too_large(found["programs"][name])


def test_a_gather_would_be_seen(found) -> None:
  """A rule that sorts a law collects it, here by exchanging all parts."""
  assert any(shape[-1] in (V, V // 4) for _, shape in too_large(found["programs"]["planted"]))


def test_what_a_round_exchanges_does_not_grow_with_vocabulary_and_drafts(found) -> None:
  """Their number not at all; their bytes by the block of a law that a token is drawn of, sqrt(V) long."""
  one, other = found["exchanged"]
  assert one["count"] == other["count"] == 12
  assert other["parts"]["draft"] == {"count": 0, "bytes": 0}
  of_laws = [each["bytes"] - each["activations"] for each in (one, other)]
  assert of_laws[0] < of_laws[1] < 2 * of_laws[0]
  assert max(one["longest"], other["longest"]) <= 256
  assert one["host"] == other["host"] == []


def test_the_state_is_split_inside_the_loop(found) -> None:
  """2 layers, 8 rows over 2, 4 heads (2 twice) over 4, 128 slots, 8 dimensions; the draft's 2 heads are whole."""
  carried = [line.split(" while(")[0] for line in found["programs"]["sample"].splitlines() if " while(" in line]
  rounds = [shapes for shapes in carried if "f32[4,128]" in shapes]  # the log-probabilities' buffer
  assert len(rounds) == 1
  assert rounds[0].count("f32[2,4,1,128,8]") == 2  # the target's keys and values
  assert rounds[0].count("f32[1,4,2,128,8]") == 2  # the draft's
  assert not any(re.search(r"\[\d,8,\d,128,8\]|\[8\b", shapes) for shapes in carried)  # nothing has all rows


@pytest.mark.parametrize("name", ["2x1 explicit", "2x2", "2x4", "2x4 explicit, round by round"])
def test_tokens_are_those_of_one_device(found, name) -> None:
  """Greedy rows and drawn ones, ragged, under warps of every kind."""
  one, many = found["generations"]["1 device"], found["generations"][name]
  for field in ("tokens", "rounds", "accepted"):
    np.testing.assert_array_equal(many[field], one[field])
  np.testing.assert_allclose(many["logprobs"], one["logprobs"], atol=1e-4)
  lengths = settings()["prompt_lengths"]
  drawn = {tuple(row[length : length + NEW]) for row, length in zip(one["tokens"], lengths, strict=True)}
  assert len(drawn) == ROWS
  assert 0 < one["accepted"].sum() < GAMMA * one["rounds"].sum()


def test_types_stay_under_explicit_axes(found) -> None:
  types = found["types"]
  assert types["first"] == types["last"]
  assert types["last"].target_cache["k"] == "float32[2,8@data,4@model,128,8]"
  assert types["last"].draft_state["k"] == "float32[1,8@data,2,128,8]"
  assert types["last"].tokens == "int32[8@data,128]"
  assert types["info"].log_p == f"float32[8@data,{GAMMA + 1},{V}@model]"
  assert types["info"].log_q == f"float32[8@data,{GAMMA},{V}@model]"


@pytest.mark.parametrize("draw", ["categorical", "gumbel_argmax"])
def test_random_bits_are_the_same_on_every_mesh(found, draw) -> None:
  whole, split = found["bits"][draw]
  np.testing.assert_array_equal(whole, split)


def test_joint_law_over_a_split_vocabulary(found) -> None:
  assert_follows(map(tuple, found["law"]["pairs"].tolist()), found["law"]["law"])


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("heads", "ValueError: heads can't be split over 8 devices: the model has 4. Use at most 4"),
    ("kv_heads", "ValueError: kv_heads in 2 parts don't go with heads in 4"),
    ("size", "ValueError: model=3 does not divide the 8 devices: choose a divisor, or pass devices="),
    ("too many", "ValueError: model=16 does not divide the 8 devices"),
    ("sizes", "ValueError: data=3 times model=2 is not 8"),
    ("number", "ValueError: model=0 must be a whole number"),
    ("count", "TypeError: devices=4 must be a flat sequence of jax devices, such as jax.devices()[:4]"),
    ("rows of devices", "TypeError: devices=array([["),
    ("no devices", "ValueError: devices=[] must be one device or more, each of them once"),
    ("a device twice", "ValueError: devices=[CpuDevice(id=0), CpuDevice(id=1), CpuDevice(id=0), CpuDevice(id=1)] must"),
    ("no mesh", "TypeError: mesh must be a jax.sharding.Mesh, got tuple"),
    ("other axes", 'ValueError: the mesh has the axes x, and the default rules know data and model: pass rules'),
    ("logical", "ValueError: rules name unknown logical axes: head. Known: batch, vocab"),
    ("mesh axis", "ValueError: rules split heads over 'tensor'; the mesh has the axes data, model"),
    ("twice", "ValueError: rules split two axes of one array over the same mesh axis"),
    ("a number", "TypeError: rules split vocab over 3: it must be a mesh axis, a tuple of them, or None (whole)"),
    ("an axis twice", "ValueError: rules split vocab over ('model', 'model'): each mesh axis can be used once"),
    ("rows and vocab", "ValueError: rules split batch and vocab over the same mesh axis, model, but laws and"),
    ("rows and caches", "ValueError: rules split batch and kv_heads over the same mesh axis, model, but laws and"),
    ("no rules", "TypeError: rules must map logical axes to mesh axes, got 'model'"),
    ("a drafter's mesh", "TypeError: mesh must be a jax.sharding.Mesh, got str"),
    ("a drafter's rules", "ValueError: rules split heads over 'tensor'; the mesh has the axes data, model"),
    ("axes", "ValueError: axes must be a jax.P for each parameter, in the same structure, or one for all (jax.P() is "
     "whole): params['a'] has none, params['b'][0] has none, and 2 more."),
    ("axes of one", "ValueError: axes must be a jax.P for each parameter, in the same structure, or one for all "
     "(jax.P() is whole): params['b'][1] has none."),
    ("no axes", "TypeError: axes['b'][1]='vocab' must be a jax.P of logical axes (jax.P() is whole)."),
    ("unknown axes", "ValueError: axes['b'][1]=P('vocabulary',) has unknown logical axes: 'vocabulary'. Known: "
     "batch, vocab, embed, heads, kv_heads, mlp, layers, None."),
    ("an unknown axis", "ValueError: axes['a']=P(('vocab', 'embed'),) has unknown logical axes: ('vocab', 'embed')"),
    ("a dictionary", "TypeError: model must be a specjax.LanguageModel or a drafter, got dict"),
    ("rows", "ValueError: prompt_tokens has 7 rows, which 2 devices can't share evenly"),
    ("not set", "ValueError: the model lies on a mesh of Explicit axes, {{'data': 2, 'model': 4}}, and no mesh is set"),
    ("draft nowhere", "ValueError: the draft model is on no mesh, the target on {{'data': 2, 'model': 4}}: place both"),
    ("draft elsewhere", "ValueError: the draft model is on {{'data': 4, 'model': 2}}, the target on {{'data': 2"),
    ("another draft", "ValueError: {folder}/states/0 is of another target or drafter, or of another form"),
    ("no state", "ValueError: {folder}/saved is an orbax checkpoint, but not one of specjax.save_state"),
    ("no model", "ValueError: {folder}/states/0 is an orbax checkpoint, but not one of specjax.save_model"),
    ("exists", "ValueError: {folder}/saved exists already: pass overwrite=True"),
    ("damaged", "ValueError: {folder}/damaged can't be read, it is damaged or of another model: "),
    ("rules", "ValueError: rules without a mesh place nothing"),
    ("heads read", "ValueError: heads can't be split over 8 devices: the model has 6"),
    ("another order of axes", "ValueError: the model lies on the mesh {{'data': 2, 'model': 4}}, but jax.set_mesh has "
     "set {{'model': 4, 'data': 2}}: set model.placement.mesh, or place"),
    ("another order of devices", "ValueError: Received incompatible devices for jitted computation"),
    ("another set", "ValueError: the model lies on the mesh {{'data': 2, 'model': 4}}, but jax.set_mesh has set"),
  ],
)  # fmt: skip
def test_what_is_refused(found, name, message) -> None:
  assert found["errors"][name].startswith(message.format(folder=found["folder"]))


def test_parameters_lie_as_given_axes_say(found) -> None:
  """What is a list in the model may be a tuple there; P() is whole."""
  assert found["axes"] == {"a": "P(None, 'model')", "b": ["P()", "P('model',)"]}


@pytest.mark.parametrize("name", ["whole", "repeated"])
def test_sizes_that_devices_do_not_divide(found, name) -> None:
  """6 heads and a width of 50 stay whole, with warnings; 2 KV heads become 4, 97 tokens 128: the same logits."""
  odd = found["odd"][name]
  one, many = odd["logits"]
  np.testing.assert_allclose(many[..., :97], one, atol=1e-5)
  assert (many[..., 97:] == -np.inf).all()
  assert many.shape[-1] == 128
  assert odd["embed"] == ((128, 32), "P('model',)")
  if name == "whole":
    assert set(odd["specs"].values()) == {"P()"}
    assert [words.split(":")[0] for words in odd["warnings"]] == [
      "6 heads don't divide over 4 devices",
      "an MLP width of 50 doesn't divide over 4 devices",
    ]
  else:
    rows, columns = "P('model',)", "P(None, 'model')"
    assert odd["specs"] == {"q": rows, "k": rows, "o": columns, "up": rows, "down": columns}
    assert odd["kv_heads"] == 4
    assert not odd["warnings"]


def test_placing_without_weights(found) -> None:
  """Shapes, types and shardings of jax.ShapeDtypeStructs are those of arrays."""
  assert all(jax.tree.leaves(found["odd"]["repeated"]["abstract"]))


def test_a_generation_goes_on_anywhere(found) -> None:
  """Interrupted between rounds on 2x4 devices, under Explicit types, and resumed on 4x2: the same tokens."""
  one = found["generations"]["1 device"]
  assert {*map(int, found["resumed"])} == {*SAVED}
  for name, resumed in found["resumed"].items():
    for field in ("tokens", "rounds", "accepted"):
      np.testing.assert_array_equal(resumed[field], one[field], err_msg=name)


def test_loading_onto_a_mesh(found) -> None:
  """The tensors are those of a load without a mesh, from either format, in every form; and of one saved and loaded."""
  loaded = found["loaded"]
  assert len(loaded["differences"]) == 6
  assert not any(loaded["differences"].values()), loaded["differences"]
  assert {spec for spec, _ in loaded["forms"].values()} == {"P('model',)"}
  widths = {name: (config.num_kv_heads, config.vocab_size) for name, (_, config) in loaded["forms"].items()}
  assert widths["llama over 2"] == (2, 128)
  assert widths["llama.gguf over 3"] == (6, 384)  # each of 2 KV heads thrice, for 3 devices with 2 query heads each


def test_every_number_is_read_once_and_none_beyond_a_part(found) -> None:
  """Two rows of devices hold the same parts: they are read once. The largest part is half the embedding."""
  reads = found["loaded"]["reads"]
  assert reads["read"] == reads["numbers"]
  assert reads["largest"] == 64 * 48  # of 97 tokens, padded to 128
