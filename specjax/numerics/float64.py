"""The decoder family in numpy's float64: the reference that the graphs' errors are measured from.

Written from the definition of the layers and not from the jax code: one context, no cache, no compilation. Slow, and
only for measuring.
"""

from collections.abc import Callable, Iterator

import numpy as np
import scipy.special

from specjax.language_model import LanguageModel
from specjax.models.config import DecoderConfig
from specjax.models.forms import as_checkpoint

Tensor = Callable[[str], np.ndarray]
CHUNK = 64  # positions of logits at a time


def logits(model: LanguageModel, tokens: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (positions int[t], logits float64[t, V]) behind every token of tokens int[T], in order.

  model: a decoder of `specjax.models`, in any form; its parameters are taken as they are. Holds one layer's weights and
  two activations [T, d_ff] in float64. Raises TypeError for another model.
  """
  checkpoint = as_checkpoint(model)
  c, read = checkpoint.config, checkpoint.tensor

  def tensor(name: str) -> np.ndarray:
    return read(name).astype(np.float64)

  embed = read("embed.weight")
  x = embed[tokens].astype(np.float64)
  if c.position == "learned":
    x = x + tensor("positions.weight")[: len(tokens)]
  for layer in range(c.num_layers):
    x = _block(c, lambda name, layer=layer: tensor(f"layers.{layer}.{name}"), x)
  x = _norm(c, tensor, "norm", c.norm, x)
  head = (embed if c.tied_head else read("head.weight")).astype(np.float64)
  for start in range(0, len(tokens), CHUNK):
    out = x[start : start + CHUNK] @ head.T
    yield np.arange(start, start + len(out)), out


def _block(c: DecoderConfig, tensor: Tensor, x: np.ndarray) -> np.ndarray:
  """One layer over x[T, d]."""
  y = _norm(c, tensor, "attn_norm", c.norm, x)
  q, k, v = (_linear(tensor, name, c.qkv_bias, y).reshape(len(x), -1, c.head_dim) for name in "qkv")
  if c.qk_norm:
    q, k = _norm(c, tensor, "q_norm", "rms", q), _norm(c, tensor, "k_norm", "rms", k)
  if c.position == "rope":
    q, k = _rotate(c, q), _rotate(c, k)
  x = x + _linear(tensor, "o", c.output_bias, _attend(q, k, v).reshape(len(x), -1))
  y = _norm(c, tensor, "mlp_norm", c.norm, x)
  hidden = _linear(tensor, "up", c.mlp_bias, y)
  if c.mlp == "swiglu":
    gate = _linear(tensor, "gate", c.mlp_bias, y)
    hidden = gate * scipy.special.expit(gate) * hidden
  else:
    hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
  return x + _linear(tensor, "down", c.mlp_bias, hidden)


def _linear(tensor: Tensor, name: str, use_bias: bool, x: np.ndarray) -> np.ndarray:
  y = x @ tensor(f"{name}.weight").T
  return y + tensor(f"{name}.bias") if use_bias else y


def _norm(c: DecoderConfig, tensor: Tensor, name: str, kind: str, x: np.ndarray) -> np.ndarray:
  if kind == "layer":
    x = x - x.mean(-1, keepdims=True)
  y = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + c.norm_eps) * tensor(f"{name}.scale")
  return y + tensor(f"{name}.bias") if kind == "layer" else y


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
  """softmax(q k^T / sqrt(h)) v over each query's own position and those before; q[T, H, h], k and v[T, K, h]."""
  out = np.empty_like(q)
  hidden = np.triu(np.ones((len(q), len(q)), bool), 1)
  for head in range(q.shape[1]):
    own = head // (q.shape[1] // k.shape[1])
    scores = q[:, head] @ k[:, own].T / np.sqrt(q.shape[2])
    out[:, head] = scipy.special.softmax(np.where(hidden, -np.inf, scores), axis=-1) @ v[:, own]
  return out


def _rotate(c: DecoderConfig, x: np.ndarray) -> np.ndarray:
  """Rotates dimension i of each head x[T, H, h] with dimension i + h/2."""
  half = c.head_dim // 2
  frequency = c.rope_theta ** (-np.arange(half) / half)
  scaling = c.rope_scaling
  if scaling is not None and scaling.kind == "linear":
    frequency = frequency / scaling.factor
  elif scaling is not None and scaling.kind == "factors":
    frequency = frequency / np.array(scaling.factors, np.float64)
  elif scaling is not None:
    turns = scaling.original_context * frequency / (2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    frequency = frequency * (kept + (1 - kept) / scaling.factor)
  angle = np.arange(len(x))[:, None, None] * frequency
  cos, sin, first, second = np.cos(angle), np.sin(angle), x[..., :half], x[..., half:]
  return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
