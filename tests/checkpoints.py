"""Small random Hugging Face checkpoint directories, the same bytes on every machine.

`write("llama", directory)` makes what `save_pretrained` would: config.json and model.safetensors, with transformers'
own tensor names and layouts. Nothing here is left at a value that hides a fault: norm scales and biases are random,
head counts and widths differ from one another, rotary bases and epsilons are not the defaults, and the queries are
large enough for the position of a token to matter. The configs are written in both of the styles met in the wild:
"rope_parameters" and "dtype" (transformers 5), "rope_theta", "rope_scaling" and "torch_dtype" (before).

This module needs numpy and safetensors alone, and computes no logits: tests/golden holds those.
"""

import dataclasses
import json
import math
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

VOCAB_SIZE = 97  # odd, so that a reader or a kernel which pads the vocabulary is seen

_LLAMA3_SCALING = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  # With 32 every branch of the rule is taken: wavelengths under 8 are kept, those over 32 divided by 8.
  "original_max_position_embeddings": 32,
}
_LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_act": "silu",
  "hidden_size": 48,
  "intermediate_size": 80,
  "max_position_embeddings": 128,
  "num_attention_heads": 6,
  "num_hidden_layers": 3,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-3,
  "tie_word_embeddings": False,
  "vocab_size": VOCAB_SIZE,
}
_GPT2 = {
  "activation_function": "gelu_new",
  "architectures": ["GPT2LMHeadModel"],
  "layer_norm_epsilon": 1e-3,
  "model_type": "gpt2",
  "n_embd": 32,
  "n_head": 4,
  "n_inner": None,
  "n_layer": 3,
  "n_positions": 64,
  "tie_word_embeddings": True,
  "vocab_size": VOCAB_SIZE,
}


@dataclasses.dataclass(frozen=True)
class Variant:
  """One checkpoint. Variants with the same `golden` hold the same weights and so share one file of golden logits."""

  config: Mapping[str, Any]
  golden: str
  dtype: type[np.generic] = np.float32
  shards: int = 1
  bare: bool = False  # gpt2 as first published: no "transformer." before the names, causal masks among the tensors


VARIANTS: dict[str, Variant] = {
  # No head_dim in the config: hidden_size / num_attention_heads.
  "llama": Variant(
    _LLAMA | {"dtype": "float32", "rope_parameters": _LLAMA3_SCALING | {"rope_theta": 500.0}}, golden="llama"
  ),
  "llama_sharded": Variant(
    _LLAMA | {"torch_dtype": "float32", "rope_theta": 500.0, "rope_scaling": _LLAMA3_SCALING},
    golden="llama",
    shards=3,
  ),
  "llama_linear": Variant(
    _LLAMA
    | {
      "num_key_value_heads": 1,
      "torch_dtype": "float32",
      "rope_theta": 2000.0,
      "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    golden="llama_linear",
  ),
  "llama_bf16": Variant(
    _LLAMA | {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"}},
    golden="llama_bf16",
    dtype=ml_dtypes.bfloat16,
  ),
  "llama_tied": Variant(
    _LLAMA
    | {
      "attention_bias": True,
      "mlp_bias": True,
      "tie_word_embeddings": True,
      "head_dim": 10,
      "hidden_size": 32,
      "num_attention_heads": 4,
      "dtype": "float32",
      "rope_parameters": {"rope_theta": 300.0, "rope_type": "default"},
    },
    golden="llama_tied",
  ),
  # As published qwen2 checkpoints have it: a sliding window is named and switched off.
  "qwen2": Variant(
    _LLAMA
    | {
      "architectures": ["Qwen2ForCausalLM"],
      "model_type": "qwen2",
      "hidden_size": 40,
      "num_attention_heads": 4,
      "max_window_layers": 3,
      "sliding_window": 16,
      "use_sliding_window": False,
      "tie_word_embeddings": True,
      "torch_dtype": "float32",
      "rope_theta": 700.0,
    },
    golden="qwen2",
  ),
  "qwen3": Variant(
    _LLAMA
    | {
      "architectures": ["Qwen3ForCausalLM"],
      "model_type": "qwen3",
      "attention_bias": False,
      "head_dim": 16,
      "hidden_size": 36,
      "num_key_value_heads": 3,
      "sliding_window": None,
      "use_sliding_window": False,
      "layer_types": ["full_attention"] * 3,
      "dtype": "float32",
      "rope_parameters": {"rope_theta": 900.0, "rope_type": "default"},
    },
    golden="qwen3",
  ),
  "gpt2": Variant(_GPT2 | {"dtype": "float32"}, golden="gpt2"),
  "gpt2_bare": Variant(_GPT2 | {"torch_dtype": "float32"}, golden="gpt2", bare=True),
}


def write(name: str, directory: str | os.PathLike[str], shards: int | None = None) -> None:
  """Writes checkpoint `name`, a key of VARIANTS, into `directory`, which is created if need be.

  shards: number of files; default: the variant's own.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  variant = VARIANTS[name]
  (directory / "config.json").write_text(json.dumps(dict(variant.config), indent=2, sort_keys=True) + "\n")
  weights = {tensor: value.astype(variant.dtype) for tensor, value in tensors(name).items()}
  if (shards := shards or variant.shards) == 1:
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
  else:
    _write_shards(weights, directory, shards)


def tokens(name: str, batch: int = 2, length: int = 40) -> np.ndarray:
  """int32[batch, length]: the token ids that the golden logits of variant `name` belong to."""
  raw = _random_bits(f"{VARIANTS[name].golden}/tokens", batch * length)
  return (raw % VOCAB_SIZE).astype(np.int32).reshape(batch, length)


def tensors(name: str) -> dict[str, np.ndarray]:
  """Checkpoint tensor name -> float32 values of variant `name`.

  Each tensor has a seed of its own, so adding or renaming one leaves the rest as they were.
  """
  variant = VARIANTS[name]
  shapes = _gpt2_shapes(variant.config) if variant.config["model_type"] == "gpt2" else _llama_shapes(variant.config)
  values = {tensor: _random(f"{variant.golden}/{tensor}", shape) for tensor, shape in shapes.items()}
  if not variant.bare:
    return values
  context = variant.config["n_positions"]
  mask = np.tril(np.ones((1, 1, context, context), np.float32))
  masks = {f"h.{i}.attn.bias": mask for i in range(variant.config["n_layer"])}
  return {tensor.removeprefix("transformer."): value for tensor, value in values.items()} | masks


def _random_bits(seed: str, count: int) -> np.ndarray:
  """uint64[count]. The raw stream is what numpy promises to keep; its distributions may change between versions."""
  return np.random.PCG64(zlib.crc32(seed.encode())).random_raw(count)


def _random(seed: str, shape: tuple[int, ...]) -> np.ndarray:
  """float32 noise, scaled so that activations stay near 1 and logits between 1 and 5 through every layer."""
  uniform = (_random_bits(seed, math.prod(shape)) >> 11) * 2.0**-53
  noise = (uniform.reshape(shape) - 0.5) * np.sqrt(12.0)  # mean 0, variance 1
  name = seed.rsplit("/", 1)[1]
  if name.endswith("bias"):
    noise *= 0.3
  elif len(shape) == 1:  # a norm's scale
    noise = 1.0 + 0.3 * noise
  elif "embed_tokens" in name or "wte" in name or "wpe" in name:
    noise *= 0.4
  elif "q_proj" in name or "k_proj" in name or "c_attn" in name:
    noise *= 1.5 / np.sqrt(_fan_in(name, shape))  # attention that is neither flat nor one-hot
  else:
    noise *= (2.0 if "lm_head" in name else 1.0) / np.sqrt(_fan_in(name, shape))
  return noise.astype(np.float32)


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
  is_conv1d = ".c_" in name  # gpt2 stores its matrices (in, out), every other family (out, in)
  return shape[0] if is_conv1d else shape[1]


def _llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  d_model, d_ff = config["hidden_size"], config["intermediate_size"]
  head_dim = config.get("head_dim", d_model // config["num_attention_heads"])
  heads, kv_heads = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
  is_qwen2, is_qwen3 = config["model_type"] == "qwen2", config["model_type"] == "qwen3"
  output_bias = config.get("attention_bias", False)
  qkv_bias = output_bias or is_qwen2

  def linear(name: str, out: int, width: int, use_bias: bool) -> dict[str, tuple[int, ...]]:
    bias: dict[str, tuple[int, ...]] = {f"{name}.bias": (out,)} if use_bias else {}
    return {f"{name}.weight": (out, width), **bias}

  shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, d_model)}
  for i in range(config["num_hidden_layers"]):
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (d_model,)}
    layer |= linear("self_attn.q_proj", heads, d_model, qkv_bias)
    layer |= linear("self_attn.k_proj", kv_heads, d_model, qkv_bias)
    layer |= linear("self_attn.v_proj", kv_heads, d_model, qkv_bias)
    layer |= linear("self_attn.o_proj", d_model, heads, output_bias)
    if is_qwen3:
      layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    layer |= {"post_attention_layernorm.weight": (d_model,)}
    layer |= linear("mlp.gate_proj", d_ff, d_model, config.get("mlp_bias", False))
    layer |= linear("mlp.up_proj", d_ff, d_model, config.get("mlp_bias", False))
    layer |= linear("mlp.down_proj", d_model, d_ff, config.get("mlp_bias", False))
    shapes |= {f"model.layers.{i}.{tensor}": shape for tensor, shape in layer.items()}
  shapes |= {"model.norm.weight": (d_model,)}
  if not config["tie_word_embeddings"]:
    shapes["lm_head.weight"] = (VOCAB_SIZE, d_model)
  return shapes


def _gpt2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  d_model = config["n_embd"]

  def norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (d_model,), f"{name}.bias": (d_model,)}

  def conv1d(name: str, width: int, out: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width, out), f"{name}.bias": (out,)}

  shapes = {"wte.weight": (VOCAB_SIZE, d_model), "wpe.weight": (config["n_positions"], d_model)}
  for i in range(config["n_layer"]):
    layer = norm("ln_1") | conv1d("attn.c_attn", d_model, 3 * d_model) | conv1d("attn.c_proj", d_model, d_model)
    layer |= norm("ln_2") | conv1d("mlp.c_fc", d_model, 4 * d_model) | conv1d("mlp.c_proj", 4 * d_model, d_model)
    shapes |= {f"h.{i}.{tensor}": shape for tensor, shape in layer.items()}
  shapes |= norm("ln_f")
  return {f"transformer.{tensor}": shape for tensor, shape in shapes.items()}


def _write_shards(weights: dict[str, np.ndarray], directory: pathlib.Path, shards: int) -> None:
  """Splits the tensors over several files by turns, so that one layer's tensors lie in more than one file."""
  names = sorted(weights)
  weight_map: dict[str, str] = {}
  for i in range(shards):
    file_name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
    part = names[i::shards]
    save_file({name: weights[name] for name in part}, directory / file_name, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(part, file_name)
  total_size = sum(value.nbytes for value in weights.values())
  index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
  (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
