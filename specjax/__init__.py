"""Exact, fast, pure-functional speculative sampling in JAX."""

from specjax.draft import ModelDrafter, NGramDrafter
from specjax.language_model import LanguageModel
from specjax.result import SampleResult, Stats
from specjax.sampler import RoundInfo, SpecState, init, sample, step
from specjax.warp import Warp

__all__ = [
  "LanguageModel",
  "ModelDrafter",
  "NGramDrafter",
  "RoundInfo",
  "SampleResult",
  "SpecState",
  "Stats",
  "Warp",
  "init",
  "sample",
  "step",
]
