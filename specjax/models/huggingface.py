"""Reads a decoder from a Hugging Face directory: config.json, and one or many safetensors files.

llama, qwen2, qwen3 and gpt2. Settings that this family of models does not have (sliding windows, other rotary scalings,
other activations, quantised weights, ...) are refused. The tokenizer is read by `tokenizer`.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np
import safetensors

from specjax.models.checkpoint import Checkpoint, Index, Shape, check_tensors, hash_tokens
from specjax.models.config import DecoderConfig, RopeScaling, parameter_shapes

MODEL_TYPES = ("llama", "qwen2", "qwen3", "gpt2")

_DTYPES = ("F32", "F16", "BF16")
_CHUNK_ROWS = 4096

_LLAMA_MODULES = {
  "embed": "embed_tokens",
  "norm": "norm",
  "head": "lm_head",
  "q": "self_attn.q_proj",
  "k": "self_attn.k_proj",
  "v": "self_attn.v_proj",
  "o": "self_attn.o_proj",
  "q_norm": "self_attn.q_norm",
  "k_norm": "self_attn.k_norm",
  "attn_norm": "input_layernorm",
  "mlp_norm": "post_attention_layernorm",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
}
_GPT2_MODULES = {
  "embed": "wte",
  "positions": "wpe",
  "norm": "ln_f",
  "head": "lm_head",
  "q": "attn.c_attn",
  "k": "attn.c_attn",
  "v": "attn.c_attn",
  "o": "attn.c_proj",
  "attn_norm": "ln_1",
  "mlp_norm": "ln_2",
  "up": "mlp.c_fc",
  "down": "mlp.c_proj",
}

# Buffers that older files carry along: causal masks and rotary frequencies, which the config determines.
_BUFFERS = re.compile(r"(h\.\d+\.attn\.(bias|masked_bias)|.*rotary_emb\.inv_freq)")

# Settings that would change the mathematics, with the values at which they do not. Absent counts as the first.
_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
  "llama": {"hidden_act": ("silu", "swish")},
  "qwen2": {"hidden_act": ("silu", "swish"), "use_sliding_window": (False, None)},
  "qwen3": {"hidden_act": ("silu", "swish"), "use_sliding_window": (False, None)},
  "gpt2": {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
  },
}


@dataclasses.dataclass(frozen=True)
class _Stored:
  file: pathlib.Path
  name: str  # as it is in the file, prefix included
  shape: Shape
  dtype: str


def open_huggingface(directory: str | os.PathLike[str]) -> Checkpoint:
  """Opens a directory with config.json and model.safetensors, or model.safetensors.index.json and its shards.

  Tensors are float32, float16 or bfloat16. Names and shapes of all of them are checked here; they are read one by one,
  later, except that a stored output head which the config ties to the embedding is compared with it.

  Raises:
    FileNotFoundError: no config.json, no safetensors, or a shard that the index names is not there.
    ValueError: a corrupt file, an unknown model type, a setting that is not supported, or missing, unexpected or
      wrongly shaped tensors, all of which are listed.
  """
  directory = pathlib.Path(directory)
  settings = _read_json(directory / "config.json")
  config = _config(directory / "config.json", settings)
  stored = {_without_prefix(tensor.name): tensor for tensor in _list_tensors(directory)}
  stored = {name: tensor for name, tensor in stored.items() if not _BUFFERS.fullmatch(name)}
  tied_copy = stored.pop("lm_head.weight", None) if config.tied_head else None
  shapes = parameter_shapes(config)
  expected = {_stored_name(config, name): _stored_shape(config, name, shape) for name, shape in shapes.items()}
  check_tensors(directory, {name: tensor.shape for name, tensor in stored.items()}, expected)
  for tensor in stored.values():
    if tensor.dtype not in _DTYPES:
      raise ValueError(f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}; supported are {', '.join(_DTYPES)}.")
  if tied_copy is not None:
    _check_tied(directory, tied_copy, stored[_stored_name(config, "embed.weight")])
  return Checkpoint(config, functools.partial(_read, stored, config, shapes), _tokenizer_hash(directory))


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  if not path.is_file():
    raise FileNotFoundError(f"{path.parent} is no model directory: it has no {path.name}.")
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  if not isinstance(content, dict):
    raise ValueError(f"{path} holds a {type(content).__name__}; it must hold an object.")
  return content


def _tokenizer_hash(directory: pathlib.Path) -> str | None:
  path = directory / "tokenizer.json"
  if not path.is_file():
    return None
  content = _read_json(path)
  vocab = content["model"]["vocab"]
  # Unigram models list [token, score], in the order of ids; all others map tokens to ids.
  tokens = {i: token for token, i in vocab.items()} if isinstance(vocab, dict) else dict(enumerate(t for t, _ in vocab))
  return hash_tokens(tokens | {added["id"]: added["content"] for added in content.get("added_tokens", [])})


def _config(path: pathlib.Path, settings: Mapping[str, Any]) -> DecoderConfig:
  kind = settings.get("model_type")
  if kind not in MODEL_TYPES:
    raise ValueError(f"{path} has model_type {kind!r}, which is not supported. Supported are {', '.join(MODEL_TYPES)}.")
  for key, allowed in _NEUTRAL[kind].items():
    if (value := settings.get(key, allowed[0])) not in allowed:
      raise ValueError(f"{path} has {key} = {value!r}, which is not supported for {kind} (only {allowed[0]!r}).")
  layers = settings.get("layer_types") or []
  if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
    raise ValueError(f"{path} has layer_types = {layers!r}; only full_attention is supported.")
  if settings.get("quantization_config"):
    raise ValueError(f"{path} has a quantization_config; only float32, float16 and bfloat16 weights are supported.")
  make = _gpt2_config if kind == "gpt2" else _llama_config
  try:
    return make(path, settings)
  except KeyError as error:
    raise ValueError(f"{path} has no {error}, which {kind} needs.") from None
  except (AttributeError, TypeError, ZeroDivisionError) as error:
    raise ValueError(f"{path} has a value of the wrong type or a size of 0 ({error}).") from error


def _llama_config(path: pathlib.Path, settings: Mapping[str, Any]) -> DecoderConfig:
  kind, num_heads, d_model = settings["model_type"], settings["num_attention_heads"], settings["hidden_size"]
  default_head_dim = 128 if kind == "qwen3" else d_model // num_heads
  attention_bias = kind != "qwen2" and settings.get("attention_bias", False)
  theta, scaling = _rope(path, settings)
  return DecoderConfig(
    architecture=kind,
    vocab_size=settings["vocab_size"],
    context_length=settings["max_position_embeddings"],
    num_layers=settings["num_hidden_layers"],
    d_model=d_model,
    num_heads=num_heads,
    num_kv_heads=settings.get("num_key_value_heads") or num_heads,
    head_dim=settings.get("head_dim") or default_head_dim,
    d_ff=settings["intermediate_size"],
    norm_eps=settings.get("rms_norm_eps", 1e-6),
    rope_theta=theta,
    rope_scaling=scaling,
    qkv_bias=kind == "qwen2" or attention_bias,
    output_bias=attention_bias,
    mlp_bias=kind == "llama" and settings.get("mlp_bias", False),
    qk_norm=kind == "qwen3",
    tied_head=settings.get("tie_word_embeddings", False),
  )


def _gpt2_config(path: pathlib.Path, settings: Mapping[str, Any]) -> DecoderConfig:
  del path  # every value is either there or has a default
  d_model, num_heads = settings["n_embd"], settings["n_head"]
  return DecoderConfig(
    architecture="gpt2",
    vocab_size=settings["vocab_size"],
    context_length=settings["n_positions"],
    num_layers=settings["n_layer"],
    d_model=d_model,
    num_heads=num_heads,
    num_kv_heads=num_heads,
    head_dim=d_model // num_heads,
    d_ff=settings.get("n_inner") or 4 * d_model,
    norm="layer",
    norm_eps=settings.get("layer_norm_epsilon", 1e-5),
    mlp="gelu",
    position="learned",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied_head=settings.get("tie_word_embeddings", True),
  )


def _rope(path: pathlib.Path, settings: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Base and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
  rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
  theta = rope.get("rope_theta", settings.get("rope_theta", 10_000.0))
  rotated = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
  if rotated != 1.0:
    raise ValueError(f"{path} has partial_rotary_factor = {rotated}; only 1.0 is supported.")
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return theta, None
  if kind == "linear":
    return theta, RopeScaling(kind="linear", factor=rope["factor"])
  if kind == "llama3":
    return theta, RopeScaling(
      kind="llama3",
      factor=rope["factor"],
      low_freq_factor=rope["low_freq_factor"],
      high_freq_factor=rope["high_freq_factor"],
      original_context=rope["original_max_position_embeddings"],
    )
  raise ValueError(f"{path} has the rotary scaling {kind!r}; supported are 'default', 'linear' and 'llama3'.")


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Generator[Any, None, None]:
  # Opened anew for every tensor: an open file keeps all its pages that were read mapped, as large as the model.
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      yield file
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path} is corrupt or truncated: {error}") from error


def _list_tensors(directory: pathlib.Path) -> Iterator[_Stored]:
  for path in _weight_files(directory):
    with _open(path) as file:
      for name in file.keys():  # noqa: SIM118, not a dict
        part = file.get_slice(name)
        yield _Stored(path, name, tuple(part.get_shape()), part.get_dtype())


def _weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
  single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
  if single.is_file():
    return [single]
  if not index.is_file():
    raise FileNotFoundError(f"{directory} has neither {single.name} nor {index.name}.")
  names = _read_json(index).get("weight_map")
  if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
    raise ValueError(f"{index} has no weight_map, which must say for each tensor the file that holds it.")
  files = sorted({directory / name for name in names.values()})
  if missing := [file.name for file in files if not file.is_file()]:
    raise FileNotFoundError(f"{index} names {len(missing)} files that are not there: {', '.join(missing)}.")
  return files


def _without_prefix(name: str) -> str:
  """Files saved from the bare model lack the prefix that those of the language model have."""
  return name.removeprefix("model.").removeprefix("transformer.")


def _stored_name(config: DecoderConfig, name: str) -> str:
  *layer, module, kind = name.split(".")
  is_gpt2 = config.architecture == "gpt2"
  block = f"{'h' if is_gpt2 else 'layers'}.{layer[1]}." if layer else ""
  return f"{block}{(_GPT2_MODULES if is_gpt2 else _LLAMA_MODULES)[module]}.{kind.replace('scale', 'weight')}"


def _is_conv1d(stored_name: str) -> bool:
  """gpt2's layers store their matrices (in, out)."""
  return re.fullmatch(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight", stored_name) is not None


def _stored_shape(config: DecoderConfig, name: str, shape: Shape) -> Shape:
  stored = _stored_name(config, name)
  if ".c_attn." in stored:
    shape = (3 * shape[0], *shape[1:])
  return shape[::-1] if _is_conv1d(stored) else shape


def _read(
  stored: Mapping[str, _Stored],
  config: DecoderConfig,
  shapes: Mapping[str, Shape],
  name: str,
  index: Index | None = None,
) -> np.ndarray:
  """One canonical tensor, or a part of it, float32."""
  stored_name, shape = _stored_name(config, name), shapes[name]
  tensor, is_transposed = stored[stored_name], _is_conv1d(stored_name)
  rows, *columns = index or tuple(slice(0, size) for size in shape)
  if ".c_attn." in stored_name:
    first = shape[0] * "qkv".index(name.split(".")[-2])
    rows = slice(first + rows.start, first + rows.stop)
  own = (*columns, rows) if is_transposed else (rows, *columns)
  with _open(tensor.file) as file:
    value = file.get_slice(tensor.name)[own]
  return np.ascontiguousarray(value.T if is_transposed else value, np.float32)


def _check_tied(directory: pathlib.Path, head: _Stored, embedding: _Stored) -> None:
  """Raises ValueError unless the stored head is the embedding, which is what a tied model uses in its place."""
  with _open(head.file) as head_file, _open(embedding.file) as embedding_file:
    a, b = head_file.get_slice(head.name), embedding_file.get_slice(embedding.name)
    rows = embedding.shape[0]
    pieces = (slice(i, min(i + _CHUNK_ROWS, rows)) for i in range(0, rows, _CHUNK_ROWS))
    if head.shape == embedding.shape and all(np.array_equal(a[piece], b[piece]) for piece in pieces):
      return
  raise ValueError(
    f"{directory / 'config.json'} ties the output head to the embedding, but {head.name} differs from "
    f"{embedding.name}. If the stored head is the right one, set tie_word_embeddings to false; if not, remove it."
  )
