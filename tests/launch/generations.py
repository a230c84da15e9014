"""Generations of a tiny decoder; the same in any process and on any mesh."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import specjax
from specjax.language_model import LanguageModel

PROMPTS = np.array([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3]], np.int32)


def flatter(target: LanguageModel) -> LanguageModel:
  """A draft model of laws that are much like the target's."""
  return dataclasses.replace(target, params=jax.tree.map(lambda leaf: np.float32(0.9) * leaf, target.params))


def generate(target: LanguageModel, drafter: Any) -> specjax.SampleResult:
  """Rows at temperatures 0 (argmax) to 1 under the rule whose text is that of plain sampling (drafter None)."""
  return specjax.sample(target, drafter, PROMPTS, verifier="coupled", **_settings(drafter))


def begin(target: LanguageModel, drafter: Any) -> specjax.SpecState:
  """The same, before its first round."""
  return specjax.init(target, drafter, PROMPTS, **_settings(drafter))


def rounds(state: specjax.SpecState, target: LanguageModel, drafter: Any, count: int) -> specjax.SpecState:
  """The state that many rounds later; those behind the end of all rows change nothing."""
  step = jax.jit(functools.partial(specjax.step, verifier="coupled"))
  for _ in range(count):
    state, _ = step(state, target, drafter)
  return state


def _settings(drafter: Any) -> dict[str, Any]:
  return {
    "key": jax.random.key(0),
    "prompt_lengths": np.array([4, 2, 3, 1], np.int32),
    "max_new_tokens": 16,
    "num_draft_tokens": 0 if drafter is None else 2,
    "warp": specjax.Warp(temperature=np.array([0.0, 0.0, 0.7, 1.0], np.float32)),
  }
