"""Pairs of models compiled for TPUs that are not there; see docs/aot.md for what came out.

  python -m experiments.aot --config=configs/aot.py:chinchilla    70B + 4B on 16 TPU v4 (arXiv 2302.01318)
  python -m experiments.aot --config=configs/aot.py:llama         Llama-3.1-70B + 8B on v5e-64
  python -m experiments.aot --config=configs/aot.py:qwen          Qwen3-32B + 0.6B on v6e-8

Needs libtpu (pip install -e '.[tpu]'), no TPU; two minutes each on 2 CPU cores. `target` and `draft` are fields of
specjax.models.config.DecoderConfig; `mesh` are axes and their sizes, over all devices of `topology`; rules say which of
them each logical axis is split over, as for specjax.sharding.shard.
"""

from typing import Any

import ml_collections

_BOTH = ("model", "rest")
_HEADS = {"heads": "model", "kv_heads": "model", "mlp": _BOTH, "vocab": _BOTH}  # where `rest` does not divide the heads
_LLAMA = {"architecture": "llama", "vocab_size": 128256, "context_length": 131072, "tied_head": False}
_QWEN = {"architecture": "qwen3", "vocab_size": 151936, "context_length": 40960, "qk_norm": True}
_CHINCHILLA = {"architecture": "chinchilla", "vocab_size": 32000, "context_length": 2048, "mlp": "gelu"}

PAIRS: dict[str, dict[str, Any]] = {
  # The paper's widths, depths and heads; the rest is Gopher's (arXiv 2112.11446): d_ff 4 d, 32,000 tokens, tied. Rotary
  # positions in place of relative ones, whose projections hold d x d weights a layer more.
  "chinchilla": {
    "topology": "v4:2x2x4",
    "mesh": {"model": 16, "rest": 2},
    "target": _CHINCHILLA | {"num_layers": 80, "d_model": 8192, "num_heads": 64, "num_kv_heads": 64, "d_ff": 32768},
    "draft": _CHINCHILLA | {"num_layers": 8, "d_model": 6144, "num_heads": 48, "num_kv_heads": 48, "d_ff": 24576},
    "published": {"decode": 14.1, "draft": 1.8},  # ms
  },
  "llama": {
    "topology": "v5e:8x8",
    "mesh": {"model": 32, "rest": 2},
    "target": _LLAMA | {"num_layers": 80, "d_model": 8192, "num_heads": 64, "num_kv_heads": 8, "d_ff": 28672},
    "draft": _LLAMA | {"num_layers": 32, "d_model": 4096, "num_heads": 32, "num_kv_heads": 8, "d_ff": 14336},
  },
  "qwen": {
    "topology": "v6e:2x4",
    "mesh": {"model": 8, "rest": 1},
    "target": _QWEN
    | {"num_layers": 64, "d_model": 5120, "num_heads": 64, "num_kv_heads": 8, "d_ff": 25600, "tied_head": False},
    "draft": _QWEN | {"num_layers": 28, "d_model": 1024, "num_heads": 16, "num_kv_heads": 8, "d_ff": 3072},
  },
}


def get_config(pair: str = "chinchilla") -> ml_collections.ConfigDict:
  if pair not in PAIRS:
    raise ValueError(f"pair {pair!r} is not known: one of {', '.join(PAIRS)}.")
  chosen = PAIRS[pair]
  head = {"head_dim": 128}
  return ml_collections.ConfigDict(
    {
      "pair": pair,
      "topology": chosen["topology"],
      "mesh": chosen["mesh"],
      "target": chosen["target"] | head,
      "draft": chosen["draft"] | head,
      "target_rules": {"heads": _BOTH, "kv_heads": _BOTH, "mlp": _BOTH, "vocab": _BOTH},
      "draft_rules": _HEADS,
      "published": chosen.get("published", {}),
      "batch": 1,
      "prompt_tokens": 1024,
      "max_new_tokens": 512,
      "max_length": 2048,  # slots of buffers and caches
      "gamma": 4,
      "large": 2**20,  # bytes: what a round makes anew at once is listed from here on
    }
  )
