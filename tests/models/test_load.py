"""What a name or a path stands for, and that every kind of source gives the same model."""

import json
import pathlib
import re
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import fetch
from specjax.models import load
from specjax.models.load import load_model, resolve
from specjax.models.tokenizer import load_tokenizer
from tests import checkpoints, gguf_files


def logits_of(path: pathlib.Path) -> np.ndarray:
  model = load_model(path, scan_layers=True)  # compiles faster
  tokens = jnp.asarray(checkpoints.tokens("llama"))
  cache = model.init_cache(model.params, *tokens.shape)
  return np.asarray(jax.jit(model.apply)(model.params, tokens, cache, jnp.zeros(len(tokens), jnp.int32))[0])


def test_gguf_and_directory_are_the_same_model(tmp_path: pathlib.Path) -> None:
  """Equal but for the rotary factors, which GGUF stores and a directory's config implies."""
  checkpoints.write("llama", tmp_path)
  gguf_files.save(tmp_path / "model.gguf", gguf_files.metadata("llama"), gguf_files.tensors("llama"))
  np.testing.assert_allclose(logits_of(tmp_path / "model.gguf"), logits_of(tmp_path), rtol=0, atol=1e-4)


def test_dtype_and_layers(tmp_path: pathlib.Path) -> None:
  checkpoints.write("qwen2", tmp_path)
  scanned = load_model(tmp_path, dtype=jnp.bfloat16, scan_layers=True)
  unrolled = load_model(tmp_path, dtype=jnp.float32, scan_layers=False)
  assert {leaf.dtype for leaf in jax.tree.leaves(scanned.params)} == {jnp.dtype(jnp.bfloat16)}
  assert {leaf.dtype for leaf in jax.tree.leaves(unrolled.params)} == {jnp.dtype(jnp.float32)}
  assert len(jax.tree.leaves(scanned.params)) < len(jax.tree.leaves(unrolled.params))


def test_a_known_name_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  monkeypatch.setattr(load, "fetch", lambda artefact: tmp_path / artefact.name)
  assert resolve("smollm2-135m") == tmp_path / fetch.SMOLLM2.name


def test_paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / "org").mkdir()
  (tmp_path / "org" / "model").mkdir()
  monkeypatch.chdir(tmp_path)
  assert resolve("org/model") == pathlib.Path("org/model")  # before any thought of a repository
  monkeypatch.setenv("HOME", str(tmp_path))
  assert resolve("~/org") == tmp_path / "org"


@pytest.mark.parametrize("name", ["", "smollm3", "no/such/path", "./no/path", "/no/path", "no/such.gguf", "../x"])
def test_unknown_names_list_the_known(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  for function in (load_model, load_tokenizer):
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(repr(name))} is neither .*smollm2-135m"):
      function(name)


def test_directories_that_are_no_model(tmp_path: pathlib.Path) -> None:
  with pytest.raises(FileNotFoundError, match=r"no model directory: it has no config\.json\.$"):
    load_model(tmp_path)
  (tmp_path / "a.gguf").touch()
  with pytest.raises(FileNotFoundError, match=r"It holds a\.gguf: give the path of the file"):
    load_model(tmp_path)
  (tmp_path / "_CHECKPOINT_METADATA").touch()
  with pytest.raises(ValueError, match="no orbax checkpoint, or a damaged one"):
    load_model(tmp_path)


def test_a_file_that_is_no_model(tmp_path: pathlib.Path) -> None:
  (tmp_path / "model.bin").write_bytes(b"PK\x03\x04")
  for function in (load_model, load_tokenizer):
    with pytest.raises(ValueError, match=r"model\.bin is not a GGUF file"):
      function(tmp_path / "model.bin")


def hub(monkeypatch: pytest.MonkeyPatch, snapshot_download: Any) -> None:
  module = types.ModuleType("huggingface_hub")
  module.snapshot_download = snapshot_download  # pyrefly: ignore[missing-attribute]
  monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_repository_without_the_hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(FileNotFoundError, match=r"'org/name' is no local path.*pip install -e '\.\[hub\]'"):
    load_model("org/name")


def test_repository_where_the_hub_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
  def snapshot_download(*args: Any, **kwargs: Any) -> str:
    raise ConnectionError("no route to host")

  hub(monkeypatch, snapshot_download)
  with pytest.raises(
    FileNotFoundError, match=r"'org/name' .*could not be downloaded: ConnectionError: no route to host"
  ):
    load_model("org/name")


def test_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  checkpoints.write("gpt2", tmp_path)
  calls = []

  def snapshot_download(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
    calls.append((repository, set(allow_patterns), ignore_patterns))
    return str(tmp_path)

  hub(monkeypatch, snapshot_download)
  assert load_model("org/name-1.5_x").vocab_size == checkpoints.VOCAB_SIZE
  with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
    load_tokenizer("org/name-1.5_x")
  # Nothing that could run code (*.bin, *.py), nothing in sub-folders, and no weights for a tokenizer.
  assert calls == [
    ("org/name-1.5_x", {"*.json", "*.jinja", "*.safetensors"}, ["*/*"]),
    ("org/name-1.5_x", {"*.json", "*.jinja"}, ["*/*"]),
  ]


def test_errors_of_a_reader_come_through(tmp_path: pathlib.Path) -> None:
  checkpoints.write("gpt2", tmp_path)
  settings = json.loads((tmp_path / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "t5"}))
  with pytest.raises(ValueError, match="'t5'"):
    load_model(tmp_path)
