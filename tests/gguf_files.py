"""Small GGUF files, written the way llama.cpp's converter writes them.

`metadata` and `tensors` turn one of the checkpoints of `tests.checkpoints` into what its GGUF file holds; `save` writes
any such pair, so that a test can spoil them first. `byte_level_vocabulary` makes a small tokenizer.
"""

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from tokenizers import pre_tokenizers

from tests import checkpoints

_LLAMA_NAMES = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}
_GPT2_NAMES = {
  "transformer.wte": "token_embd",
  "transformer.wpe": "position_embd",
  "transformer.ln_f": "output_norm",
  "attn.c_attn": "attn_qkv",
  "attn.c_proj": "attn_output",
  "ln_1": "attn_norm",
  "ln_2": "ffn_norm",
  "mlp.c_fc": "ffn_up",
  "mlp.c_proj": "ffn_down",
}


def metadata(name: str) -> dict[str, Any]:
  """The metadata of checkpoint `name`, a key of checkpoints.VARIANTS."""
  c = checkpoints.VARIANTS[name].config
  arch = c["model_type"]
  if arch == "gpt2":
    values = {
      "block_count": c["n_layer"],
      "context_length": c["n_positions"],
      "embedding_length": c["n_embd"],
      "feed_forward_length": 4 * c["n_embd"],
      "attention.head_count": c["n_head"],
      "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
    }
  else:
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    values = {
      "block_count": c["num_hidden_layers"],
      "context_length": c["max_position_embeddings"],
      "embedding_length": c["hidden_size"],
      "feed_forward_length": c["intermediate_size"],
      "attention.head_count": c["num_attention_heads"],
      "attention.head_count_kv": c["num_key_value_heads"],
      "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
      "rope.freq_base": rope.get("rope_theta", c.get("rope_theta")),
    }
    if "head_dim" in c:
      values |= {"attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"]}
    if arch == "llama":
      values["rope.dimension_count"] = _head_dim(c)
    if rope.get("type") == "linear":
      values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
  return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def tensors(name: str) -> dict[str, np.ndarray]:
  """GGUF tensor name -> float32 values of checkpoint `name`."""
  c = checkpoints.VARIANTS[name].config
  is_gpt2 = c["model_type"] == "gpt2"
  result = {}
  for stored, value in checkpoints.tensors(name).items():
    module, kind = stored.rsplit(".", 1)
    if is_gpt2 and ".c_" in stored and kind == "weight":
      value = value.T
    if c["model_type"] == "llama" and module.endswith("q_proj"):
      value = _permute(value, c["num_attention_heads"])
    if c["model_type"] == "llama" and module.endswith("k_proj"):
      value = _permute(value, c["num_key_value_heads"])
    names = _GPT2_NAMES if is_gpt2 else _LLAMA_NAMES
    if layer := re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)", module):
      stored = f"blk.{layer[1]}.{names[layer[2]]}"
    else:
      stored = names[module]
    result[f"{stored}.{kind}"] = np.ascontiguousarray(value)
  scaling = c.get("rope_parameters") or c.get("rope_scaling") or {}
  if scaling.get("rope_type") == "llama3":
    result["rope_freqs.weight"] = _llama3_factors(c, scaling)
  return result


def save(
  path: str | os.PathLike[str],
  values: Mapping[str, Any],
  weights: Mapping[str, np.ndarray],
  type: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> None:
  """Writes a GGUF file. Matrices are stored as `type`, everything else as float32."""
  writer = gguf.GGUFWriter(path, values["general.architecture"])
  for key, value in values.items():
    if key == "general.architecture":  # the writer has written it
      continue
    if isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
    elif isinstance(value, str):
      writer.add_string(key, value)
    else:
      writer.add_array(key, value)
  for name, value in weights.items():
    if value.dtype != np.float32 or value.ndim == 1 or type == GGMLQuantizationType.F32:
      writer.add_tensor(name, value)
    else:
      writer.add_tensor(name, gguf.quantize(value, type), raw_dtype=type)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def byte_level_vocabulary(pre: str, merges: list[str], special: Mapping[str, TokenType]) -> dict[str, Any]:
  """Tokenizer metadata: the 256 bytes in sorted order, then what the merges make, then the special tokens."""
  tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
  types = [TokenType.NORMAL] * len(tokens)
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": pre,
    "tokenizer.ggml.tokens": tokens + list(special),
    "tokenizer.ggml.token_type": [int(kind) for kind in [*types, *special.values()]],
    "tokenizer.ggml.merges": merges,
  }


def _head_dim(config: Mapping[str, Any]) -> int:
  return config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])


def _permute(value: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows of each head from (half, i) to (i, half), as the converter does for llama."""
  halves = value.reshape(num_heads, 2, value.shape[0] // num_heads // 2, *value.shape[1:])
  return halves.swapaxes(1, 2).reshape(value.shape)


def _llama3_factors(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> np.ndarray:
  """What each rotary frequency is divided by."""
  theta, width = scaling.get("rope_theta", config.get("rope_theta")), _head_dim(config)
  context = scaling["original_max_position_embeddings"]
  low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
  factors = []
  for i in range(0, width, 2):
    wavelength = 2 * math.pi * theta ** (i / width)
    if wavelength < context / high:
      factors.append(1.0)
    elif wavelength > context / low:
      factors.append(scaling["factor"])
    else:
      smooth = (context / wavelength - low) / (high - low)
      factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
  return np.array(factors, np.float32)
