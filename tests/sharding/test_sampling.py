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

from tests.sharding.on_devices import GAMMA, NEW, ROWS, V, settings
from tests.statistics import assert_follows

KINDS = "all-gather|all-reduce|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast|reduce-scatter"
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"  # compiles in half the time


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
  path = tmp_path_factory.mktemp("devices") / "found.pkl"
  root = pathlib.Path(__file__).parents[2]
  environment = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
  subprocess.run([sys.executable, "-m", "tests.sharding.on_devices", path], check=True, cwd=root, env=environment)
  return pickle.loads(path.read_bytes())


def collectives(program: str) -> list[tuple[str, list[tuple[int, ...]]]]:
  """Kind, and the shapes of the results, of every collective in a compiled program's text."""
  lines = re.findall(rf"^.* = .* (?:{KINDS})(?:-start)?\(.*$", program, re.MULTILINE)
  kinds = [re.search(rf" ({KINDS})(?:-start)?\(", line).group(1) for line in lines]
  types = [re.findall(r"\w+\[([\d,]*)\]", line.split(", channel_id")[0]) for line in lines]
  return list(zip(kinds, [[tuple(map(int, filter(None, t.split(",")))) for t in own] for own in types], strict=True))


def of_the_vocabulary(program: str, parts: int = 4) -> list[tuple[str, tuple[int, ...]]]:
  """Collectives that move a part of a law as long as a device's own, or that could: nothing else is so large."""
  large = []
  for kind, shapes in collectives(program):
    for shape in shapes:
      long = max(shape, default=1) >= V // parts
      # Sums over devices may have a model's width; what is gathered or exchanged has an entry a device and position.
      many = kind != "all-reduce" and np.prod(shape, dtype=int) > ROWS * (GAMMA + 1) * parts
      large += [(kind, shape)] if long or many else []
  return large


@pytest.mark.parametrize("name", ["sample", "token", "block", "match"])
def test_nothing_as_long_as_the_vocabulary_is_gathered(found, name) -> None:
  """Under every warp: settings are dynamic, so that one program holds them all. `sample` is under `coupled`."""
  assert len(collectives(found["programs"][name])) > 10
  assert not of_the_vocabulary(found["programs"][name])


def test_a_gather_would_be_seen(found) -> None:
  """A rule that sorts a law collects it, here by exchanging all parts."""
  assert any(shape[-1] in (V, V // 4) for _, shape in of_the_vocabulary(found["programs"]["planted"]))


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
    ("size", "ValueError: data=2 times model=3 is not 8"),
    ("number", "ValueError: model=0 must be a whole number"),
    ("no mesh", "TypeError: mesh must be a jax.sharding.Mesh, got tuple"),
    ("other axes", 'ValueError: the mesh has the axes x, and the default rules know data and model: pass rules'),
    ("logical", "ValueError: rules name unknown logical axes: head. Known: batch, vocab"),
    ("mesh axis", "ValueError: rules split heads over 'tensor'; the mesh has the axes data, model"),
    ("twice", "ValueError: rules split two axes of one array over the same mesh axis"),
    ("no rules", "TypeError: rules must map logical axes to mesh axes, got 'model'"),
    ("no model", "TypeError: model must be a specjax.LanguageModel or a drafter, got dict"),
    ("rows", "ValueError: prompt_tokens has 7 rows, which 2 devices can't share evenly"),
    ("not set", "ValueError: the model lies on a mesh of Explicit axes, {'data': 2, 'model': 4}, and no mesh is set"),
    ("another set", "ValueError: the model lies on the mesh {'data': 2, 'model': 4}, but jax.set_mesh has set"),
  ],
)  # fmt: skip
def test_what_is_refused(found, name, message) -> None:
  assert found["errors"][name].startswith(message)


@pytest.mark.parametrize("name", ["whole", "repeated"])
def test_sizes_that_devices_do_not_divide(found, name) -> None:
  """6 heads and a width of 50 stay whole, with warnings; 2 KV heads become 4, 97 tokens 128: the same logits."""
  odd = found["odd"][name]
  one, many = odd["logits"]
  np.testing.assert_allclose(many[..., :97], one, atol=1e-5)
  assert (many[..., 97:] == -np.inf).all()
  assert many.shape[-1] == 128
  assert odd["embed"] == ((128, 32), "P('model', None)")
  if name == "whole":
    assert set(odd["specs"].values()) == {"P(None, None)"}
    assert [words.split(":")[0] for words in odd["warnings"]] == [
      "6 heads don't divide over 4 devices",
      "an MLP width of 50 doesn't divide over 4 devices",
    ]
  else:
    rows, columns = "P('model', None)", "P(None, 'model')"
    assert odd["specs"] == {"q": rows, "k": rows, "o": columns, "up": rows, "down": columns}
    assert odd["kv_heads"] == 4
    assert not odd["warnings"]


def test_placing_without_weights(found) -> None:
  """Shapes, types and shardings of jax.ShapeDtypeStructs are those of arrays."""
  assert all(jax.tree.leaves(found["odd"]["repeated"]["abstract"]))
