"""Generations of a tiny decoder whose target is split over a mesh of all devices; the same numbers in any process."""

import dataclasses
from typing import Any

import jax
import numpy as np

import specjax
from specjax.language_model import LanguageModel
from specjax.models.config import DecoderConfig
from specjax.models.transformer import abstract_decoder

CONFIG = DecoderConfig(
  architecture="tiny", vocab_size=64, context_length=64, num_layers=1, d_model=32, num_heads=4, num_kv_heads=2,
  head_dim=8, d_ff=64, tied_head=False,
)  # fmt: skip
PROMPTS = np.array([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3]], np.int32)


def models() -> tuple[LanguageModel, LanguageModel]:
  """By numpy: jax would compile an initialiser for every shape."""
  target, draft = (_random(np.random.default_rng(seed)) for seed in (0, 1))
  return target, draft


def _random(generator: np.random.Generator) -> LanguageModel:
  model = abstract_decoder(CONFIG, dtype=np.float32)
  draw = lambda leaf: generator.normal(0, 0.5 * leaf.shape[-1] ** -0.5, leaf.shape).astype(leaf.dtype)  # noqa: E731
  return dataclasses.replace(model, params=jax.tree.map(draw, model.params))


def generate(target: LanguageModel, drafter: Any) -> specjax.SampleResult:
  """Rows at temperatures 0 (argmax) to 1 under the rule whose text is that of plain sampling (drafter None)."""
  return specjax.sample(
    target,
    drafter,
    PROMPTS,
    key=jax.random.key(0),
    prompt_lengths=np.array([4, 2, 3, 1], np.int32),
    max_new_tokens=16,
    num_draft_tokens=0 if drafter is None else 2,
    warp=specjax.Warp(temperature=np.array([0.0, 0.0, 0.7, 1.0], np.float32)),
    verifier="coupled",
  )
