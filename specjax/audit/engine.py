"""A sampler in parts, each of which can be replaced: what faults are planted in, and what checks are run on.

`Engine()` is `specjax.sample` spelled out: `specjax.init`, then rounds of `specjax.step`, with a place for other code
before, between and after. It is called like `specjax.sample`, and so may be compared with it or stand in for it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from specjax import sampler, verify
from specjax.draft import Drafter
from specjax.language_model import LanguageModel
from specjax.result import SampleResult
from specjax.sampler import RoundInfo, SpecState
from specjax.verify import Verifier
from specjax.warp import DEFAULT_WARP, Warp

Models = tuple[LanguageModel, Drafter, Warp]


def same_models(target: LanguageModel, drafter: Drafter, warp: Warp) -> Models:
  return target, drafter, warp


def same_start(state: SpecState, target: LanguageModel) -> SpecState:
  del target
  return state


def same_state(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
  del before, info
  return state


def same_result(result: SampleResult) -> SampleResult:
  return result


@dataclasses.dataclass(frozen=True)
class Trace:
  """A run that was watched: its result and every round, as numpy arrays."""

  result: SampleResult
  rounds: list[RoundInfo]


@dataclasses.dataclass(frozen=True)
class Engine:
  """A sampler. Every field is a pure function, run while a program is traced; the defaults change nothing.

  rule: the acceptance rule.
  models: (target, drafter, warp) as they were asked for -> as they are used.
  begin: (state before the first round, target in use) -> that state.
  after: (state before a round, state behind it, what happened) -> the state that the next round starts from.
  report: result -> what the caller is told; run on numpy arrays.
  """

  rule: Verifier = verify.token
  models: Callable[[LanguageModel, Drafter, Warp], Models] = same_models
  begin: Callable[[SpecState, LanguageModel], SpecState] = same_start
  after: Callable[[SpecState, SpecState, RoundInfo], SpecState] = same_state
  report: Callable[[SampleResult], SampleResult] = same_result

  def __call__(
    self, target: LanguageModel, drafter: Drafter, prompt_tokens: ArrayLike, **settings: Any
  ) -> SampleResult:
    """What `specjax.sample` returns; `settings` are its arguments, with `max_length`, without `verifier`."""
    return self.trace(target, drafter, prompt_tokens, **settings).result

  def trace(
    self,
    target: LanguageModel,
    drafter: Drafter,
    prompt_tokens: ArrayLike,
    *,
    key: Array,
    max_length: int,
    prompt_lengths: ArrayLike | None = None,
    max_new_tokens: ArrayLike = 128,
    warp: Warp = DEFAULT_WARP,
    **static: Any,
  ) -> Trace:
    """Runs the sampler and returns its rounds, too; static: num_draft_tokens, eos_id, prefill_chunk."""
    prompts = np.asarray(prompt_tokens, np.int32)
    batch, width = prompts.shape
    lengths = np.full(batch, width) if prompt_lengths is None else np.asarray(prompt_lengths)
    prompts = np.pad(prompts, ((0, 0), (0, -width % 8)))  # one program for prompts of about a width
    limits = np.asarray(max_new_tokens, np.int32)
    asked = warp.per_row(batch)
    state = _begin(
      target, self.models, self.begin, drafter, asked, prompts, lengths.astype(np.int32), limits, key,
      max_length=max_length, **static,
    )  # fmt: skip
    rounds = []
    while not state.finished.all():
      state, info = _step(target, self.models, self.rule, self.after, drafter, asked, state)
      rounds.append(jax.device_get(info))
    result = jax.device_get(state.result().cut(width + int(limits.max())))
    return Trace(self.report(result), rounds)


def _jit(**settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """jax.jit of a function of the target first. On a toy, where compiling takes longer than running, done in haste."""

  def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    usual = jax.jit(function, **settings)
    hasty = jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **settings)

    def call(target: LanguageModel, *arguments: Any, **named: Any) -> Any:
      size = sum(leaf.size for leaf in jax.tree.leaves(target.params))
      return (hasty if size < 2**16 else usual)(target, *arguments, **named)

    return call

  return decorate


# What a function does not read is not among its arguments, so that engines that differ there share a program.
@_jit(static_argnums=(1, 2), static_argnames=("num_draft_tokens", "eos_id", "max_length", "prefill_chunk"))
def _begin(target, models, begin, drafter, warp, prompts, lengths, max_new_tokens, key, **static) -> SpecState:
  target, drafter, warp = models(target, drafter, warp)
  state = sampler.init(
    target, drafter, prompts, key=key, prompt_lengths=lengths, max_new_tokens=max_new_tokens, warp=warp, **static
  )
  return begin(state, target)


@_jit(static_argnums=(1, 2, 3))
def _step(target, models, rule, after, drafter, warp, state: SpecState) -> tuple[SpecState, RoundInfo]:
  target, drafter, _ = models(target, drafter, warp)
  new, info = sampler.step(state, target, drafter, verifier=rule)
  return after(state, new, info), info
