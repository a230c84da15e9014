"""Reads a decoder from a GGUF file: its metadata as a config, its tensors under canonical names.

llama, qwen2, qwen3 and gpt2. What a model may do that this family does not (experts, sliding windows, other rotary
scalings, ...) is refused. The container itself is read by `gguf_file`, the tokenizer by `tokenizer`.
"""

import functools
import os
import re
from typing import Any

import numpy as np

from specjax.models.checkpoint import Checkpoint, Index, check_tensors, hash_tokens
from specjax.models.config import DecoderConfig, RopeScaling, parameter_shapes
from specjax.models.gguf_file import GgufFile, open_file, read_tensor

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")

_MODULES = {
  "embed": "token_embd",
  "positions": "position_embd",
  "norm": "output_norm",
  "head": "output",
  "q": "attn_q",
  "k": "attn_k",
  "v": "attn_v",
  "o": "attn_output",
  "q_norm": "attn_q_norm",
  "k_norm": "attn_k_norm",
  "attn_norm": "attn_norm",
  "mlp_norm": "ffn_norm",
  "gate": "ffn_gate",
  "up": "ffn_up",
  "down": "ffn_down",
}

# Metadata that would change the mathematics, with the value at which it does not.
_NEUTRAL = {
  "attention.causal": True,
  "attention.scale": 0.0,
  "attention.sliding_window": 0,
  "expert_count": 0,
  "rope.scaling.attn_factor": 1.0,
}


def open_gguf(path: str | os.PathLike[str]) -> Checkpoint:
  """Opens a GGUF file of versions 2 or 3, in any quantisation that the `gguf` package dequantises.

  Names and shapes of all tensors are checked here; tensors are read one by one, later.

  Raises:
    ValueError: not a GGUF file, truncated, an unknown architecture or quantisation, metadata that asks for what this
      family of models does not do, or missing, unexpected or wrongly shaped tensors, all of which are listed.
  """
  file = open_file(path)
  config = _config(file)
  found = {name: info.shape for name, info in file.tensors.items()}
  expected = {
    _stored_name(config, name): _stored_shape(config, name, s) for name, s in parameter_shapes(config).items()
  }
  if "rope_freqs.weight" in found and config.position == "rope":
    expected["rope_freqs.weight"] = (config.head_dim // 2,)
  check_tensors(file.path, found, expected)
  tokens = file.metadata.get("tokenizer.ggml.tokens")
  return Checkpoint(
    config=config,
    tensor=functools.partial(_read, file, config),
    tokenizer_hash=None if tokens is None else hash_tokens(real_tokens(tokens)),
  )


def real_tokens(tokens: list[str]) -> dict[int, str]:
  """id -> token, without the entries that converters add to reach the embedding's size."""
  return {i: token for i, token in enumerate(tokens) if token != f"[PAD{i}]"}


def _config(file: GgufFile) -> DecoderConfig:
  architecture = file.metadata.get("general.architecture")
  if architecture not in ARCHITECTURES:
    raise ValueError(
      f"{file.path} has the architecture {architecture!r}, which is not supported. Supported are "
      f"{', '.join(ARCHITECTURES)}."
    )
  get = functools.partial(_metadata, file, architecture)
  for key, neutral in _NEUTRAL.items():
    if (value := get(key, neutral)) != neutral:
      raise ValueError(f"{file.path} has {architecture}.{key} = {value!r}, which is not supported (only {neutral!r}).")
  d_model, num_heads = get("embedding_length"), get("attention.head_count")
  head_dim = get("attention.key_length", d_model // num_heads)
  is_gpt2 = architecture == "gpt2"
  for key in ("attention.value_length", "rope.dimension_count"):
    if (value := get(key, head_dim)) != head_dim:
      raise ValueError(
        f"{file.path} has {architecture}.{key} = {value}; only the head dimension {head_dim} is supported."
      )
  if "token_embd.weight" not in file.tensors:
    raise ValueError(f"{file.path} has no tensor 'token_embd.weight', so it holds no language model.")
  return DecoderConfig(
    architecture=architecture,
    vocab_size=file.tensors["token_embd.weight"].shape[0],
    context_length=get("context_length"),
    num_layers=get("block_count"),
    d_model=d_model,
    num_heads=num_heads,
    num_kv_heads=get("attention.head_count_kv", num_heads),
    head_dim=head_dim,
    d_ff=get("feed_forward_length"),
    norm="layer" if is_gpt2 else "rms",
    norm_eps=get("attention.layer_norm_epsilon" if is_gpt2 else "attention.layer_norm_rms_epsilon"),
    mlp="gelu" if is_gpt2 else "swiglu",
    position="learned" if is_gpt2 else "rope",
    rope_theta=get("rope.freq_base", 10_000.0),
    rope_scaling=None if is_gpt2 else _rope_scaling(file, architecture),
    # GGUF has no metadata for these: the tensors are there or not.
    qkv_bias=is_gpt2 or "blk.0.attn_q.bias" in file.tensors,
    output_bias="blk.0.attn_output.bias" in file.tensors,
    mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    qk_norm=architecture == "qwen3",
    tied_head="output.weight" not in file.tensors,
  )


def _metadata(file: GgufFile, architecture: str, key: str, *default: Any) -> Any:
  """The value of `{architecture}.{key}`: one number, even where it is stored as one a layer."""
  key = f"{architecture}.{key}"
  if key not in file.metadata:
    if not default:
      raise ValueError(f"{file.path} has no metadata {key!r}, which {architecture} needs.")
    return default[0]
  value = file.metadata[key]
  if isinstance(value, list):
    if len(set(value)) != 1:
      raise ValueError(f"{file.path} has {key} = {value}; layers that differ from one another are not supported.")
    return value[0]
  return value


def _rope_scaling(file: GgufFile, architecture: str) -> RopeScaling | None:
  get = functools.partial(_metadata, file, architecture)
  # As llama.cpp reads it: the older key is still met, and a factor without a type means linear.
  factor = get("rope.scaling.factor", get("rope.scale_linear", 0.0)) or 1.0
  kind = get("rope.scaling.type", "linear")
  if kind not in ("none", "linear"):
    raise ValueError(f"{file.path} has {architecture}.rope.scaling.type = {kind!r}; supported are 'none' and 'linear'.")
  is_linear = kind == "linear" and factor != 1.0
  if "rope_freqs.weight" in file.tensors:
    if is_linear:
      raise ValueError(f"{file.path} scales its rotary frequencies twice: by {factor} and by rope_freqs.weight.")
    return RopeScaling(kind="factors", factors=tuple(read_tensor(file, "rope_freqs.weight").tolist()))
  return RopeScaling(kind="linear", factor=factor) if is_linear else None


def _is_fused(config: DecoderConfig, name: str) -> bool:
  """Whether this is one third of gpt2's attn_qkv."""
  return config.architecture == "gpt2" and re.fullmatch(r"layers\.\d+\.[qkv]\.(weight|bias)", name) is not None


def _stored_name(config: DecoderConfig, name: str) -> str:
  *layer, module, kind = name.split(".")
  block = f"blk.{layer[1]}." if layer else ""
  stored = "attn_qkv" if _is_fused(config, name) else _MODULES[module]
  return f"{block}{stored}.{kind.replace('scale', 'weight')}"


def _stored_shape(config: DecoderConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  return (3 * shape[0], *shape[1:]) if _is_fused(config, name) else shape


def _read(file: GgufFile, config: DecoderConfig, name: str, index: Index | None = None) -> np.ndarray:
  """One canonical tensor, or a part of it, float32."""
  module, stored = name.split(".")[-2], _stored_name(config, name)
  shape = parameter_shapes(config)[name]
  rows, *columns = index or tuple(slice(0, size) for size in shape)
  if _is_fused(config, name):
    first = "qkv".index(module) * shape[0]
    return read_tensor(file, stored, (slice(first + rows.start, first + rows.stop), *columns))
  if config.architecture == "llama" and module in ("q", "k"):
    first, last = rows.start // config.head_dim, -(-rows.stop // config.head_dim)  # a head's rows are reordered
    heads = read_tensor(file, stored, (slice(first * config.head_dim, last * config.head_dim), *columns))
    start = rows.start - first * config.head_dim
    return _half_split(heads, last - first)[start : start + rows.stop - rows.start]
  return read_tensor(file, stored, (rows, *columns))


def _half_split(value: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows of each head from the order in which rotary pairs are neighbours, (i, half), to the canonical (half, i).

  Converters reorder the rows of llama's queries and keys, and of no other architecture's.
  """
  pairs = value.reshape(num_heads, -1, 2, *value.shape[1:])
  return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)
