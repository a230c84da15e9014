"""GGUF files against the Hugging Face checkpoints they were made from, and every way a file can be wrong."""

import dataclasses
import pathlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from specjax.models import gguf_file
from specjax.models.config import RopeScaling, parameter_shapes
from specjax.models.gguf import open_gguf
from specjax.models.huggingface import open_huggingface
from specjax.models.transformer import rotations
from tests import checkpoints, gguf_files

NAMES = ("llama", "llama_linear", "llama_tied", "qwen2", "qwen3", "gpt2")


@pytest.mark.parametrize("name", NAMES)
def test_holds_what_its_source_holds(name: str, tmp_path: pathlib.Path) -> None:
  """The same tensors, bit for bit, and the same config, but for numbers that GGUF rounds to float32."""
  gguf_files.save(tmp_path / "model.gguf", gguf_files.metadata(name), gguf_files.tensors(name))
  checkpoints.write(name, tmp_path)
  ours, source = open_gguf(tmp_path / "model.gguf"), open_huggingface(tmp_path)

  for tensor, shape in parameter_shapes(source.config).items():
    value = ours.tensor(tensor)
    assert value.shape == shape
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, source.tensor(tensor), err_msg=tensor)
  assert ours.config.norm_eps == np.float32(source.config.norm_eps)
  assert dataclasses.replace(ours.config, norm_eps=source.config.norm_eps, rope_scaling=None) == dataclasses.replace(
    source.config, rope_scaling=None
  )


def test_rotary_factors_stand_for_llama3_scaling(tmp_path: pathlib.Path) -> None:
  gguf_files.save(tmp_path / "model.gguf", gguf_files.metadata("llama"), gguf_files.tensors("llama"))
  checkpoints.write("llama", tmp_path)
  ours, source = open_gguf(tmp_path / "model.gguf").config, open_huggingface(tmp_path).config
  assert ours.rope_scaling is not None
  assert ours.rope_scaling.kind == "factors"
  assert source.rope_scaling is not None
  assert source.rope_scaling.kind == "llama3"
  positions = jnp.arange(64)[None]
  for a, b in zip(rotations(ours, positions), rotations(source, positions), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize(
  ("extra", "scaling"),
  [
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
    ({"llama.rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
    ({"llama.rope.scale_linear": 4.0}, RopeScaling("linear", 4.0)),
    ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
    ({}, None),
  ],
)
def test_linear_scaling(extra: dict[str, Any], scaling: RopeScaling | None, tmp_path: pathlib.Path) -> None:
  values = {k: v for k, v in gguf_files.metadata("llama_linear").items() if "scaling" not in k}
  gguf_files.save(tmp_path / "model.gguf", values | extra, gguf_files.tensors("llama_linear"))
  assert open_gguf(tmp_path / "model.gguf").config.rope_scaling == scaling


@pytest.mark.parametrize("type", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_quantised_weights_come_close(type: str, tmp_path: pathlib.Path) -> None:
  """gpt2 is 32 and 128 wide, whole blocks of every type here; 3 bits and more keep the values apart."""
  weights = gguf_files.tensors("gpt2")
  gguf_files.save(tmp_path / "model.gguf", gguf_files.metadata("gpt2"), weights, GGMLQuantizationType[type])
  checkpoint = open_gguf(tmp_path / "model.gguf")
  up = checkpoint.tensor("layers.1.up.weight")
  scale = weights["blk.1.ffn_up.weight"].std()
  error = np.abs(up - weights["blk.1.ffn_up.weight"]).max() / scale
  assert 0 < error < {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.02}.get(type, 0.3)
  np.testing.assert_array_equal(checkpoint.tensor("layers.1.up.bias"), weights["blk.1.ffn_up.bias"])


def test_every_type_is_dequantised_in_pieces(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Read in pieces that do not divide the tensor, each type that the package knows equals one call for the whole."""
  types = [type for type in GGMLQuantizationType if gguf_file._can_dequantise(type)]
  assert {"Q8_0", "Q5_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "F16", "BF16", "F32"} <= {type.name for type in types}
  rng = np.random.default_rng(0)
  writer = gguf.GGUFWriter(tmp_path / "types.gguf", "none")
  raw = {}
  for type in types:
    row_bytes = 512 // gguf.GGML_QUANT_SIZES[type][0] * gguf.GGML_QUANT_SIZES[type][1]
    raw[type.name] = rng.integers(0, 256, (11, row_bytes), np.uint8)
    writer.add_tensor(type.name, raw[type.name], raw_dtype=type)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()

  monkeypatch.setattr(gguf_file, "_CHUNK_BYTES", 1000)
  file = gguf_file.open_file(tmp_path / "types.gguf")
  assert list(file.tensors) == list(raw)
  for name, info in file.tensors.items():
    assert info.shape == (11, 512)
    with np.errstate(all="ignore"):  # random bits make infinite and undefined scales too
      expected = gguf.dequantize(raw[name], GGMLQuantizationType[name])
      np.testing.assert_array_equal(gguf_file.read_tensor(file, name), expected, err_msg=name)


def test_one_tensor_costs_little_beside_itself(tmp_path: pathlib.Path) -> None:
  weights = {"big": np.ones((2048, 2048), np.float32)}
  gguf_files.save(tmp_path / "big.gguf", {"general.architecture": "none"}, weights, GGMLQuantizationType.Q4_1)
  file = gguf_file.open_file(tmp_path / "big.gguf")
  tracemalloc.start()
  try:
    value = gguf_file.read_tensor(file, "big")
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak - value.nbytes < 10 << 20  # 16 MB and more if it were dequantised at once


def test_tokenizer_hash_ignores_padding(tmp_path: pathlib.Path) -> None:
  def hash_of(tokens: list[str] | None) -> str | None:
    values = gguf_files.metadata("qwen2") | ({"tokenizer.ggml.tokens": tokens} if tokens else {})
    gguf_files.save(tmp_path / "model.gguf", values, gguf_files.tensors("qwen2"))
    return open_gguf(tmp_path / "model.gguf").tokenizer_hash

  assert hash_of(None) is None
  plain = hash_of(["a", "b", "c"])
  assert plain == hash_of(["a", "b", "c", "[PAD3]", "[PAD4]"])
  assert len({plain, hash_of(["a", "c", "b"]), hash_of(["a", "b", "c", "d"]), hash_of(["a", "bc"])}) == 4


Edit = Callable[[dict[str, Any], dict[str, np.ndarray]], Any]


@pytest.mark.parametrize(
  ("edit", "message"),
  [
    (lambda values, weights: weights.pop("blk.1.attn_q.weight"), r"1 missing: blk\.1\.attn_q\.weight"),
    (
      lambda values, weights: [weights.pop(f"blk.{i}.ffn_up.weight") for i in range(3)],
      r"3 missing: blk\.0\.ffn_up\.weight, blk\.1\.ffn_up\.weight, blk\.2\.ffn_up\.weight",
    ),
    (
      lambda values, weights: weights.update({"blk.0.extra.weight": np.ones(3, np.float32)}),
      r"1 unexpected: blk\.0\.extra\.weight",
    ),
    (
      lambda values, weights: weights.update({"blk.0.ffn_up.weight": np.ones((80, 40), np.float32)}),
      r"1 of the wrong shape: blk\.0\.ffn_up\.weight \(80, 40\), expected \(80, 48\)",
    ),
    (lambda values, weights: weights.pop("token_embd.weight"), "token_embd"),
    (lambda values, weights: values.update({"llama.block_count": 4}), r"9 missing: blk\.3\."),
    (lambda values, weights: values.pop("llama.block_count"), r"no metadata 'llama\.block_count'"),
    (
      lambda values, weights: weights.update({"blk.0.ffn_up.weight": np.ones((80, 48), np.int32)}),
      r"'blk\.0\.ffn_up\.weight' is stored as I32.*Q4_K",
    ),
    (lambda values, weights: values.update({"llama.rope.scaling.type": "yarn"}), "yarn"),
    (lambda values, weights: values.update({"llama.rope.scaling.factor": 2.0}), "twice"),
    (lambda values, weights: values.update({"llama.rope.scaling.attn_factor": 1.5}), "attn_factor = 1.5"),
    (lambda values, weights: values.update({"llama.rope.dimension_count": 4}), "dimension_count = 4"),
    (lambda values, weights: values.update({"llama.attention.value_length": 4}), "value_length = 4"),
    (lambda values, weights: values.update({"llama.expert_count": 8}), "expert_count = 8"),
    (lambda values, weights: values.update({"llama.attention.sliding_window": 64}), "sliding_window = 64"),
    (lambda values, weights: values.update({"llama.attention.head_count_kv": [2, 2, 1]}), r"\[2, 2, 1\]"),
    (lambda values, weights: values.update({"split.count": 3}), "one of 3 parts"),
    (lambda values, weights: values.update({"split.count": "x"}), r"split\.count='x'"),
  ],
)
def test_refuses(edit: Edit, message: str, tmp_path: pathlib.Path) -> None:
  values, weights = gguf_files.metadata("llama"), gguf_files.tensors("llama")
  edit(values, weights)
  gguf_files.save(tmp_path / "model.gguf", values, weights)
  with pytest.raises(ValueError, match=message) as error:
    open_gguf(tmp_path / "model.gguf")
  assert str(tmp_path / "model.gguf") in str(error.value)


def test_a_number_a_layer_is_one_number_if_all_agree(tmp_path: pathlib.Path) -> None:
  values = gguf_files.metadata("llama") | {"llama.attention.head_count_kv": [2, 2, 2]}
  gguf_files.save(tmp_path / "model.gguf", values, gguf_files.tensors("llama"))
  assert open_gguf(tmp_path / "model.gguf").config.num_kv_heads == 2


def test_unknown_architecture_names_the_known(tmp_path: pathlib.Path) -> None:
  gguf_files.save(tmp_path / "model.gguf", {"general.architecture": "mamba"}, {"x": np.ones((2, 2), np.float32)})
  with pytest.raises(ValueError, match=r"'mamba', which is not supported\. Supported are llama, qwen2, qwen3, gpt2"):
    open_gguf(tmp_path / "model.gguf")


def test_every_truncation_is_an_error(tmp_path: pathlib.Path) -> None:
  """A file cut off anywhere is refused when it is opened, with a message that says so."""
  path = tmp_path / "model.gguf"
  gguf_files.save(path, gguf_files.metadata("gpt2"), gguf_files.tensors("gpt2"))
  content = path.read_bytes()
  cuts = [*range(4, 6000, 13), *range(6000, len(content), 9973), len(content) - 32]
  for cut in cuts:
    path.write_bytes(content[:cut])
    with pytest.raises(ValueError, match="truncated"):
      open_gguf(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"<html>not found</html>"])
def test_not_gguf(content: bytes, tmp_path: pathlib.Path) -> None:
  (tmp_path / "model.gguf").write_bytes(content)
  with pytest.raises(ValueError, match=r"model\.gguf is not a GGUF file"):
    open_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_and_byte_orders(version: int, tmp_path: pathlib.Path) -> None:
  (tmp_path / "model.gguf").write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(64))
  with pytest.raises(ValueError, match=f"GGUF version {version}"):
    open_gguf(tmp_path / "model.gguf")
