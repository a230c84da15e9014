"""What was generated for a prompt, and how, as far as it is known; and a batch of it through other passes again.

A `Run` may be ours or another engine's. Nothing here compares two of them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import checks, keys, verify
from specjax.language_model import LanguageModel, empty_cache, prefill, run
from specjax.numerics.graphs import Graph, check_tokens
from specjax.result import SampleResult
from specjax.verify import Verifier
from specjax.warp import DEFAULT_WARP, Warp


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """One generation.

  prompt: int32[P], P >= 1. tokens: int32[N], generated, the stop token included.
  warp: the law it was asked for; its fields are float32 and int32 values, as Python numbers.
  graph: how its logits were computed; None where that is not known, as for another engine. Of an engine that computes
    in bfloat16, `Graph(activations="bfloat16")` says at least that.
  key: the row's key, if every token was drawn as argmax(log p + g) with Gumbel noise g of that key and the token's
    position (`verifier="coupled"`): two runs with one key share their noise. None for all others.

  The constructor takes lists too, and makes arrays of them. Raises ValueError or TypeError for what can't be a run.
  """

  prompt: Any
  tokens: Any
  warp: Warp = DEFAULT_WARP
  graph: Graph | None = None
  key: Array | None = None

  def __post_init__(self):
    for name in ("prompt", "tokens"):
      value = getattr(self, name)
      array = np.array(value, np.int32) if np.size(value) == 0 else np.array(value)  # the run's own
      if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} has type {array.dtype}; it must hold token ids: encode text first.")
      if array.ndim != 1 or (name == "prompt" and not array.size):
        raise ValueError(f"{name} has shape {array.shape}; it must be token ids, int[N], and a prompt has one or more.")
      object.__setattr__(self, name, array)
    settings = checks.warp_settings(self.warp, 1)
    object.__setattr__(self, "warp", Warp(**{field: value[0].item() for field, value in vars(settings).items()}))
    if self.graph is not None and not isinstance(self.graph, Graph):
      raise TypeError(f"graph must be a specjax.numerics.Graph or None, got {type(self.graph).__name__}.")
    key = self.key
    if key is not None and not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
      raise TypeError(f"key has type {type(key).__name__}; it must be a typed key, jax.random.key(seed), or None.")
    if key is not None and key.shape:
      raise ValueError(f"key has shape {key.shape}; it must be the one of this run's row: keys.row_keys(key, B)[b].")

  @property
  def greedy(self) -> bool:
    return float(self.warp.temperature) == 0

  @classmethod
  def from_result(
    cls,
    result: SampleResult,
    *,
    num_draft_tokens: int,
    key: Array,
    warp: Warp = DEFAULT_WARP,
    verifier: str | Verifier = "token",
    activations: str | None = None,
  ) -> list["Run"]:
    """The rows of one batch of `specjax.sample`, called with these arguments.

    activations: the dtype of the model that was sampled, where it is not that of the model that will explain it.
    """
    tokens, ends, generated = (np.asarray(x) for x in (result.tokens, result.lengths, result.stats.generated))
    batch = len(ends)
    checks.row_key(key, batch)
    row_keys = keys.row_keys(key, batch) if verify.shares_noise(verify.get(verifier)) else [None] * batch
    settings = checks.warp_settings(warp, batch)
    graph = Graph(width=num_draft_tokens + 1, batch=batch, activations=activations)
    return [
      cls(
        prompt=tokens[b, : ends[b] - generated[b]],
        tokens=tokens[b, ends[b] - generated[b] : ends[b]],
        warp=Warp(**{name: value[b] for name, value in vars(settings).items()}),
        graph=dataclasses.replace(graph, row=b),
        key=row_keys[b],
      )
      for b in range(batch)
    ]


def replay(
  model: LanguageModel,
  runs: Sequence[Run],
  *widths: int,
  max_length: int | None = None,
  prefill_chunk: int = checks.PREFILL_CHUNK,
) -> Iterator[tuple[np.ndarray, ...]]:
  """Feeds a batch of runs, each with its own tokens, through `specjax.sample`'s passes of prompts and then through
  passes of each of `widths` tokens: 1 is plain decoding, gamma + 1 verification.

  Yields a float32[B, W, V] for each width, W = max(widths), again and again until the longest run ends: [b, i] of the
  j-th are the logits behind which token `j W + i` of run b was drawn; garbage from the run's end on. A pass starts at
  every `width`-th generated token, where those of a generation may start anywhere.

  widths: divisors of the largest. The model's dtype is what it computes in, whatever the runs' graphs say.
  max_length, prefill_chunk: as of `specjax.sample`.

  Raises ValueError for runs that don't fit.
  """
  if not runs or not widths:
    raise ValueError(
      f"{len(runs)} runs and {len(widths)} widths: give one or more of each, as in replay(model, runs, 1, 4)."
    )
  block = max(checks.count("width", width, 1) for width in widths)
  if bad := [width for width in widths if block % width]:
    raise ValueError(f"width {bad[0]} must divide the largest, {block}.")
  texts = [check_tokens(model, np.concatenate([own.prompt, own.tokens])) for own in runs]
  prompts = np.array([len(own.prompt) for own in runs], np.int32)
  longest = max(len(own.tokens) for own in runs)
  # The last block may reach beyond the longest run.
  need = checks.slots(int(prompts.max()), int(prompts.max()) + longest, block, prefill_chunk)
  slots = 1 << max(need - 1, checks.MIN_SLOTS - 1).bit_length() if max_length is None else max_length
  if slots < need:
    raise ValueError(f"max_length={max_length} is too small: these runs take {need} slots.")
  tokens = np.zeros((len(runs), slots), np.int32)
  for row, text in zip(tokens, texts, strict=True):
    row[: len(text)] = text
  cache = _read_prompts(model, tokens, prompts - 1, prefill_chunk)
  caches = [cache, *(jax.tree.map(jnp.copy, cache) for _ in widths[1:])]
  for first in range(0, longest, block):
    out = []
    for i, width in enumerate(widths):
      passes = []
      for at in range(first, first + block, width):
        positions = prompts[:, None] - 1 + at + np.arange(width)[None]
        fed = np.take_along_axis(tokens, positions, axis=1)
        logits, caches[i] = _pass(model, jnp.asarray(fed), caches[i], jnp.asarray(positions[:, 0]))
        passes.append(np.asarray(logits))
      out.append(np.concatenate(passes, axis=1))
    yield tuple(out)


@functools.partial(jax.jit, static_argnames="chunk")
def _read_prompts(model: LanguageModel, tokens: Array, lengths: Array, chunk: int) -> Any:
  return prefill(model, empty_cache(model, *tokens.shape), tokens, lengths, chunk)


_pass = jax.jit(run, donate_argnames="cache")
