"""What a decoder-only transformer is, as data: one frozen, hashable record that every reader fills in.

The family covers llama, qwen2, qwen3 and gpt2 by configuration. Parameters carry one set of names whatever file they
came from; `parameter_shapes` lists them, and a checkpoint reader is a map from its own names to these.

This module knows no file format and runs no model.
"""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Stretches the rotary wavelengths beyond the context a model was trained on.

  `kind="linear"` divides every frequency by `factor`. `kind="llama3"` keeps the frequencies whose wavelength is under
  `original_context / high_freq_factor`, divides those above `original_context / low_freq_factor` by `factor`, and
  interpolates between (Llama 3.1, section "long context"). `kind="factors"` divides frequency i by `factors[i]`, the
  form in which GGUF stores the llama-3 rule.
  """

  kind: Literal["linear", "llama3", "factors"]
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_context: int = 8192
  factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Shape and variant of a decoder.

  `architecture` is a label for messages; the model's mathematics is decided by the other fields alone.
  """

  architecture: str
  vocab_size: int
  context_length: int
  num_layers: int
  d_model: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  d_ff: int
  norm: Literal["rms", "layer"] = "rms"
  norm_eps: float = 1e-5
  mlp: Literal["swiglu", "gelu"] = "swiglu"  # gelu: the tanh approximation, as gpt2 uses
  position: Literal["rope", "learned"] = "rope"
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  qkv_bias: bool = False
  output_bias: bool = False  # bias of the attention output projection
  mlp_bias: bool = False
  qk_norm: bool = False  # RMS norm of every query and key head, before the rotation
  tied_head: bool = True
  # How a model was widened to be split over devices: see `widened`.
  kv_repeats: int = 1  # num_kv_heads holds each key and value head so many times
  vocab_padding: int = 0  # the last ids of vocab_size stand for no token: their logits are -inf

  def __post_init__(self):
    for name in (
      "vocab_size",
      "context_length",
      "num_layers",
      "d_model",
      "num_heads",
      "num_kv_heads",
      "head_dim",
      "d_ff",
    ):
      if not isinstance(size := getattr(self, name), int) or size < 1:
        raise ValueError(f"{name}={size!r} must be a whole number, 1 or more.")
    if not 0 <= self.vocab_padding < self.vocab_size:
      raise ValueError(f"vocab_padding={self.vocab_padding} must be 0 to {self.vocab_size - 1}.")
    if self.kv_repeats < 1 or self.num_kv_heads % self.kv_repeats:
      raise ValueError(f"kv_repeats={self.kv_repeats} must divide num_kv_heads={self.num_kv_heads}.")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}.")

  @property
  def num_ids(self) -> int:
    """Ids that stand for tokens: the vocabulary without its padding."""
    return self.vocab_size - self.vocab_padding


def widened(config: DecoderConfig, kv_repeats: int = 1, vocab_size: int | None = None) -> DecoderConfig:
  """The same function with sizes that devices divide: of the model as its checkpoint has it, or another width of it.

  kv_repeats: each key and value head is held so many times, side by side. vocab_size: the ids added have logits of
  -inf. The defaults give the checkpoint's own sizes.
  """
  own_heads, own_ids = config.num_kv_heads // config.kv_repeats, config.num_ids
  size = own_ids if vocab_size is None else vocab_size
  return dataclasses.replace(
    config, num_kv_heads=own_heads * kv_repeats, kv_repeats=kv_repeats, vocab_size=size, vocab_padding=size - own_ids
  )


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
  """Canonical parameter name -> shape. Every matrix is (out, in), as checkpoints store it.

  Rotary heads are in the half-split order (dimension i is rotated with i + head_dim/2), as in Hugging Face files.
  """
  c = config
  heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

  def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.scale": (width,)}
    return shapes | ({f"{name}.bias": (width,)} if c.norm == "layer" else {})

  def linear(name: str, out: int, width: int, use_bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, width)}
    return shapes | ({f"{name}.bias": (out,)} if use_bias else {})

  shapes: dict[str, tuple[int, ...]] = {"embed.weight": (c.vocab_size, c.d_model)}
  if c.position == "learned":
    shapes["positions.weight"] = (c.context_length, c.d_model)
  for i in range(c.num_layers):
    layer = norm("attn_norm", c.d_model)
    layer |= linear("q", heads, c.d_model, c.qkv_bias)
    layer |= linear("k", kv_heads, c.d_model, c.qkv_bias)
    layer |= linear("v", kv_heads, c.d_model, c.qkv_bias)
    layer |= linear("o", c.d_model, heads, c.output_bias)
    if c.qk_norm:
      layer |= {"q_norm.scale": (c.head_dim,), "k_norm.scale": (c.head_dim,)}
    layer |= norm("mlp_norm", c.d_model)
    if c.mlp == "swiglu":
      layer |= linear("gate", c.d_ff, c.d_model, c.mlp_bias)
    layer |= linear("up", c.d_ff, c.d_model, c.mlp_bias)
    layer |= linear("down", c.d_model, c.d_ff, c.mlp_bias)
    shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
  shapes |= norm("norm", c.d_model)
  if not c.tied_head:
    shapes["head.weight"] = (c.vocab_size, c.d_model)
  return shapes
