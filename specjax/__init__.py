"""Exact, fast, pure-functional speculative sampling in JAX."""

import importlib
from typing import Any

from specjax import draft, fixed_graph, keys, models, sharding, verify, warp
from specjax.draft import ModelDrafter, NGramDrafter, NoDrafter
from specjax.language_model import LanguageModel
from specjax.models.load import load_model
from specjax.models.orbax import save_model
from specjax.models.tokenizer import load_tokenizer
from specjax.result import SampleResult, Stats
from specjax.sampler import RoundInfo, SpecState, init, sample, step
from specjax.saving import load_state, save_state
from specjax.warp import Warp

__all__ = [
  "LanguageModel",
  "ModelDrafter",
  "NGramDrafter",
  "NoDrafter",
  "RoundInfo",
  "SampleResult",
  "SpecState",
  "Stats",
  "Warp",
  "draft",
  "fixed_graph",
  "init",
  "keys",
  "load_model",
  "load_state",
  "load_tokenizer",
  "models",
  "sample",
  "save_model",
  "save_state",
  "sharding",
  "step",
  "verify",
  "warp",
]


def __getattr__(name: str) -> Any:
  """`specjax.audit` and `specjax.numerics` on first use: scipy takes longer to import than all the rest of specjax."""
  if name in ("audit", "numerics"):
    return importlib.import_module(f"specjax.{name}")
  raise AttributeError(f"module 'specjax' has no attribute {name!r}")
