"""Hugging Face directories: where each canonical tensor comes from, and every way a directory can be wrong."""

import json
import pathlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.models import huggingface
from specjax.models.config import RopeScaling, parameter_shapes
from specjax.models.huggingface import open_huggingface
from tests import checkpoints

LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32)


@pytest.mark.parametrize("name", checkpoints.VARIANTS)
def test_every_tensor_is_read(name: str, tmp_path: pathlib.Path) -> None:
  """Fresh float32 arrays of the canonical shapes, in which every stored number appears once."""
  checkpoints.write(name, tmp_path)
  checkpoint = open_huggingface(tmp_path)
  values = [checkpoint.tensor(tensor) for tensor in parameter_shapes(checkpoint.config)]
  assert [value.shape for value in values] == list(parameter_shapes(checkpoint.config).values())
  assert all(value.dtype == np.float32 and value.flags.c_contiguous and value.flags.writeable for value in values)
  source = [v for k, v in checkpoints.tensors(name).items() if not k.endswith(".attn.bias")]
  if name == "llama_bf16":
    source = [value.astype(ml_dtypes.bfloat16).astype(np.float32) for value in source]
  np.testing.assert_array_equal(
    np.sort(np.concatenate([value.ravel() for value in values])),
    np.sort(np.concatenate([value.ravel() for value in source])),
  )


def test_names_llama(tmp_path: pathlib.Path) -> None:
  checkpoints.write("llama", tmp_path)
  source, checkpoint = checkpoints.tensors("llama"), open_huggingface(tmp_path)
  layer = "model.layers.1."
  for ours, theirs in {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.scale": "model.norm.weight",
    "layers.1.attn_norm.scale": layer + "input_layernorm.weight",
    "layers.1.mlp_norm.scale": layer + "post_attention_layernorm.weight",
    "layers.1.q.weight": layer + "self_attn.q_proj.weight",
    "layers.1.k.weight": layer + "self_attn.k_proj.weight",
    "layers.1.v.weight": layer + "self_attn.v_proj.weight",
    "layers.1.o.weight": layer + "self_attn.o_proj.weight",
    "layers.1.gate.weight": layer + "mlp.gate_proj.weight",
    "layers.1.up.weight": layer + "mlp.up_proj.weight",
    "layers.1.down.weight": layer + "mlp.down_proj.weight",
  }.items():
    np.testing.assert_array_equal(checkpoint.tensor(ours), source[theirs], err_msg=ours)


def test_names_gpt2(tmp_path: pathlib.Path) -> None:
  """Matrices are stored (in, out), and queries, keys and values side by side."""
  checkpoints.write("gpt2", tmp_path)
  source, checkpoint = checkpoints.tensors("gpt2"), open_huggingface(tmp_path)
  width, layer = checkpoint.config.d_model, "transformer.h.2."
  for i, name in enumerate("qkv"):
    fused = source[layer + "attn.c_attn.weight"][:, i * width : (i + 1) * width]
    np.testing.assert_array_equal(checkpoint.tensor(f"layers.2.{name}.weight"), fused.T)
    bias = source[layer + "attn.c_attn.bias"][i * width : (i + 1) * width]
    np.testing.assert_array_equal(checkpoint.tensor(f"layers.2.{name}.bias"), bias)
  for ours, theirs in {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}.items():
    np.testing.assert_array_equal(checkpoint.tensor(f"layers.2.{ours}.weight"), source[f"{layer}{theirs}.weight"].T)
    np.testing.assert_array_equal(checkpoint.tensor(f"layers.2.{ours}.bias"), source[f"{layer}{theirs}.bias"])
  for ours, theirs in {"attn_norm": "ln_1", "mlp_norm": "ln_2"}.items():
    np.testing.assert_array_equal(checkpoint.tensor(f"layers.2.{ours}.scale"), source[f"{layer}{theirs}.weight"])
    np.testing.assert_array_equal(checkpoint.tensor(f"layers.2.{ours}.bias"), source[f"{layer}{theirs}.bias"])
  np.testing.assert_array_equal(checkpoint.tensor("positions.weight"), source["transformer.wpe.weight"])


def test_config(tmp_path: pathlib.Path) -> None:
  def config(name: str) -> Any:
    checkpoints.write(name, tmp_path / name)
    return open_huggingface(tmp_path / name).config

  llama = config("llama")
  assert (llama.num_layers, llama.d_model, llama.num_heads, llama.num_kv_heads, llama.head_dim) == (3, 48, 6, 2, 8)
  assert (llama.d_ff, llama.vocab_size, llama.context_length, llama.norm_eps) == (80, 97, 128, 1e-3)
  assert (llama.norm, llama.mlp, llama.position) == ("rms", "swiglu", "rope")
  assert (llama.rope_theta, llama.rope_scaling, llama.tied_head) == (500.0, LLAMA3, False)
  assert config("llama_sharded") == llama  # the older spelling of the rotary settings
  assert config("llama_linear").rope_scaling == RopeScaling("linear", 4.0)
  assert config("llama_linear").num_kv_heads == 1
  tied = config("llama_tied")
  assert (tied.head_dim, tied.qkv_bias, tied.output_bias, tied.mlp_bias, tied.tied_head) == (10, True, True, True, True)
  qwen2 = config("qwen2")
  assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
  qwen3 = config("qwen3")
  assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 16)
  gpt2 = config("gpt2")
  assert (gpt2.norm, gpt2.mlp, gpt2.position, gpt2.context_length, gpt2.d_ff) == ("layer", "gelu", "learned", 64, 128)
  assert (gpt2.qkv_bias, gpt2.output_bias, gpt2.mlp_bias, gpt2.tied_head) == (True, True, True, True)


@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
def test_names_without_prefix(name: str, tmp_path: pathlib.Path) -> None:
  """As files saved from the bare model have them."""
  checkpoints.write(name, tmp_path)
  before = open_huggingface(tmp_path).tensor("layers.0.q.weight")
  weights = load_file(tmp_path / "model.safetensors")
  save_file({k.removeprefix("model."): v for k, v in weights.items()}, tmp_path / "model.safetensors")
  np.testing.assert_array_equal(open_huggingface(tmp_path).tensor("layers.0.q.weight"), before)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(dtype: Any, tmp_path: pathlib.Path) -> None:
  checkpoints.write("gpt2", tmp_path)
  weights = load_file(tmp_path / "model.safetensors")
  save_file({k: v.astype(dtype) for k, v in weights.items()}, tmp_path / "model.safetensors")
  value = open_huggingface(tmp_path).tensor("layers.0.up.weight")
  expected = weights["transformer.h.0.mlp.c_fc.weight"].astype(dtype).astype(np.float32).T
  np.testing.assert_array_equal(value, expected)


def test_one_tensor_costs_one_tensor_beside_itself(tmp_path: pathlib.Path) -> None:
  settings = dict(checkpoints.VARIANTS["gpt2"].config) | {"vocab_size": 200_000}
  checkpoints.write("gpt2", tmp_path)
  weights = load_file(tmp_path / "model.safetensors")
  weights["transformer.wte.weight"] = np.ones((200_000, 32), np.float32)
  save_file(weights, tmp_path / "model.safetensors")
  (tmp_path / "config.json").write_text(json.dumps(settings))
  checkpoint = open_huggingface(tmp_path)
  tracemalloc.start()
  try:
    value = checkpoint.tensor("embed.weight")
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < 2.1 * value.nbytes


def test_stored_buffers_and_tied_heads_are_ignored(tmp_path: pathlib.Path) -> None:
  checkpoints.write("llama_tied", tmp_path)
  weights = load_file(tmp_path / "model.safetensors")
  weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(5, np.float32)
  weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
  save_file(weights, tmp_path / "model.safetensors")
  assert open_huggingface(tmp_path).config.tied_head

  checkpoints.write("gpt2_bare", tmp_path)  # masks are among its tensors
  weights = load_file(tmp_path / "model.safetensors")
  weights["h.0.attn.masked_bias"] = np.full((), -1e4, np.float32)
  save_file(weights, tmp_path / "model.safetensors")
  open_huggingface(tmp_path)


def test_a_tied_head_that_differs_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(huggingface, "_CHUNK_ROWS", 10)  # the difference is in the last, shorter piece of 97 rows
  checkpoints.write("llama_tied", tmp_path)
  weights = load_file(tmp_path / "model.safetensors")
  head = weights["model.embed_tokens.weight"].copy()
  head[-1, -1] += 1
  save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
    open_huggingface(tmp_path)


def test_tokenizer_hash(tmp_path: pathlib.Path) -> None:
  def hash_of(vocab: dict[str, int] | list[Any], added: dict[str, int]) -> str | None:
    content = {"model": {"vocab": vocab}, "added_tokens": [{"id": i, "content": token} for token, i in added.items()]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return open_huggingface(tmp_path).tokenizer_hash

  checkpoints.write("gpt2", tmp_path)
  assert open_huggingface(tmp_path).tokenizer_hash is None
  plain = hash_of({"a": 0, "b": 1}, {"<s>": 2})
  assert plain == hash_of({"b": 1, "a": 0, "<s>": 2}, {"<s>": 2}) == hash_of([["a", -1.0], ["b", -2.0]], {"<s>": 2})
  assert plain != hash_of({"a": 1, "b": 0}, {"<s>": 2})


Edit = Callable[[dict[str, Any], dict[str, np.ndarray]], Any]
LAYER = "model.layers.1."


@pytest.mark.parametrize(
  ("name", "edit", "message"),
  [
    ("llama", lambda c, w: c.update(model_type="mistral"), r"'mistral'.*Supported are llama, qwen2, qwen3, gpt2"),
    ("llama", lambda c, w: c.pop("model_type"), "model_type None"),
    ("llama", lambda c, w: c.pop("hidden_size"), "'hidden_size'"),
    ("llama", lambda c, w: c.update(num_attention_heads=0), "a size of 0"),
    ("llama", lambda c, w: c.update(hidden_size="x"), "wrong type"),
    ("llama_linear", lambda c, w: c.update(rope_scaling="x"), "wrong type"),
    ("qwen3", lambda c, w: c.update(layer_types=5), "layer_types = 5"),
    ("gpt2", lambda c, w: c.pop("n_embd"), "'n_embd'"),
    ("llama", lambda c, w: c.update(hidden_act="gelu"), "hidden_act = 'gelu'"),
    ("gpt2", lambda c, w: c.update(activation_function="relu"), "activation_function = 'relu'"),
    ("gpt2", lambda c, w: c.update(activation_function="gelu"), "activation_function = 'gelu'"),
    ("gpt2", lambda c, w: c.update(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    ("gpt2", lambda c, w: c.update(scale_attn_weights=False), "scale_attn_weights"),
    ("qwen2", lambda c, w: c.update(use_sliding_window=True), "use_sliding_window = True"),
    ("qwen3", lambda c, w: c.update(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
    ("llama", lambda c, w: c.update(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "'yarn'"),
    ("llama", lambda c, w: c.update(rope_parameters={"rope_type": "linear"}), "'factor'"),
    ("llama_linear", lambda c, w: c.update(rope_scaling={"type": "dynamic", "factor": 4.0}), "'dynamic'"),
    ("llama", lambda c, w: c["rope_parameters"].update(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    ("llama_linear", lambda c, w: c.update(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    ("llama", lambda c, w: c.update(quantization_config={"bits": 4}), "quantization_config"),
    (
      "llama",
      lambda c, w: [w.pop(f"{LAYER}mlp.{name}_proj.weight") for name in ("up", "down")],
      r"2 missing: layers\.1\.mlp\.down_proj\.weight, layers\.1\.mlp\.up_proj\.weight",
    ),
    ("llama", lambda c, w: w.pop("lm_head.weight"), r"1 missing: lm_head\.weight"),
    ("llama", lambda c, w: w.update(extra=np.ones(2, np.float32)), "1 unexpected: extra"),
    ("llama", lambda c, w: c.update(num_hidden_layers=2), r"9 unexpected: layers\.2\.input_layernorm"),
    ("llama", lambda c, w: c.update(attention_bias=True), "12 missing"),
    (
      "llama",
      lambda c, w: c.update(intermediate_size=81),
      r"9 of the wrong shape: .*layers\.0\.mlp\.up_proj\.weight \(80, 48\), expected \(81, 48\)",
    ),
    (
      "llama",
      lambda c, w: w.update({f"{LAYER}mlp.up_proj.weight": np.ones((80, 48), np.int8)}),
      r"layers\.1\.mlp\.up_proj\.weight is stored as I8; supported are F32, F16, BF16",
    ),
  ],
)
def test_refuses(name: str, edit: Edit, message: str, tmp_path: pathlib.Path) -> None:
  settings = json.loads(json.dumps(dict(checkpoints.VARIANTS[name].config)))
  weights = checkpoints.tensors(name)
  edit(settings, weights)
  (tmp_path / "config.json").write_text(json.dumps(settings))
  save_file(weights, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match=message) as error:
    open_huggingface(tmp_path)
  assert str(tmp_path) in str(error.value)


def test_missing_files(tmp_path: pathlib.Path) -> None:
  with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
    open_huggingface(tmp_path)
  checkpoints.write("llama_sharded", tmp_path)
  (tmp_path / "model-00002-of-00003.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match=r"1 files that are not there: model-00002-of-00003\.safetensors"):
    open_huggingface(tmp_path)
  for index in ({}, {"weight_map": ["model.safetensors"]}, {"weight_map": {"lm_head.weight": 1}}):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json has no weight_map"):
      open_huggingface(tmp_path)
  (tmp_path / "model.safetensors.index.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
    open_huggingface(tmp_path)


def test_corrupt_files(tmp_path: pathlib.Path) -> None:
  checkpoints.write("llama", tmp_path)
  path = tmp_path / "model.safetensors"
  content = path.read_bytes()
  for spoilt in (content[:-1], content[:100], content[:4], b"", b"<html>" * 20):
    path.write_bytes(spoilt)
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt or truncated"):
      open_huggingface(tmp_path)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config\.json is not JSON"):
    open_huggingface(tmp_path)
  for content, kind in (("[]", "list"), ("null", "NoneType")):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json holds a {kind}"):
      open_huggingface(tmp_path)
