"""One way to compute next-token logits, as data, and the logits that it gives.

Speculative decoding draws through passes of several tokens, plain decoding through passes of one: the same mathematics,
another order of floating-point operations. A `Graph` names one such order; `logits` feeds one context through it. This
module compares nothing and draws no token.
"""

import contextlib
import dataclasses
import functools
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from specjax import sharding
from specjax.checks import MIN_SLOTS, PREFILL_CHUNK
from specjax.language_model import LanguageModel, empty_cache, run
from specjax.models.forms import as_checkpoint, from_checkpoint
from specjax.models.transformer import DTYPES, Apply
from specjax.numerics import float64

_DTYPES = tuple(map(str, DTYPES))


@dataclasses.dataclass(frozen=True)
class Graph:
  """One way to compute the logits behind each token of a context. Every field is an axis; None leaves it to the model.

  `Graph()` is plain decoding, `Graph(width=gamma + 1)` verification, `Graph(width=None)` one pass over everything and
  `REFERENCE` float64. `dataclasses.replace(graph, batch=8, row=7)` is another one; `str(graph)` is its name,
  unlike that of any other.

  width: tokens of the context a pass; None: all of them in one.
  padding: garbage tokens behind those in every pass: a prompt padded to a bucket, or drafts that are rejected.
  batch: rows a pass. The others hold the same tokens, shifted.
  row: the row that is looked at, 0 .. batch - 1.
  slots: of the cache; None: what is needed, rounded up to a power of two as `specjax.sample` does.
  weights: the dtype that the weights are rounded to ("float32", "bfloat16", "float16").
  activations: the dtype that everything is computed and cached in, weights included; or "float64", which is numpy's, in
    one pass of one row, and takes no other axis but `weights`.
  precision: of products, as `jax.default_matmul_precision` takes it: "float32", "bfloat16", "BF16_BF16_F32", ...
    (the last part of the long names is the type that sums are accumulated in).
  scan_layers, cpu_kernels: the form of a decoder, see `specjax.models.ops.Options`: layers in a loop or unrolled; rows
    padded to a power of two with the weight as left operand, and attention over blocks of the cache.
  jit: whether a pass is one compiled program, or every operation one of its own (`jax.disable_jit`).
  mesh: devices that the (rows, tensors) are split over; None: no mesh. See `specjax.sharding` for what is split how.

  Raises ValueError for values that no machine could run.
  """

  width: int | None = 1
  padding: int = 0
  batch: int = 1
  row: int = 0
  slots: int | None = None
  weights: str | None = None
  activations: str | None = None
  precision: str | None = None
  scan_layers: bool | None = None
  cpu_kernels: bool | None = None
  jit: bool = True
  mesh: tuple[int, int] | None = None

  def __post_init__(self):
    for name, low in (("width", 1), ("padding", 0), ("batch", 1), ("row", 0), ("slots", 1)):
      value = getattr(self, name)
      if value is None and name in ("width", "slots"):
        continue
      if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ValueError(f"{name}={value!r} must be a whole number, {low} or more.")
      object.__setattr__(self, name, int(value))
    for name, allowed in (
      ("scan_layers", (None, True, False)),
      ("cpu_kernels", (None, True, False)),
      ("jit", (True, False)),
    ):
      if not any(getattr(self, name) is value for value in allowed):
        raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(str, allowed))}.")
    if self.precision is not None and not (isinstance(self.precision, str) and self.precision):
      raise ValueError(f"precision={self.precision!r} must be None or a name that jax.default_matmul_precision takes.")
    if self.row >= self.batch:
      raise ValueError(f"row={self.row} is outside the batch: allowed 0 to {self.batch - 1}.")
    for name, allowed in (("weights", _DTYPES), ("activations", (*_DTYPES, "float64"))):
      value = getattr(self, name)
      if value is not None and value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed: None, {', '.join(allowed)}.")
    if self.mesh is not None and not _two_counts(self.mesh):
      raise ValueError(f"mesh={self.mesh!r} must be two numbers of devices: (rows over, tensors over).")
    if self.mesh is not None and self.batch % self.mesh[0]:
      raise ValueError(f"batch={self.batch} can't be split over the {self.mesh[0]} devices of mesh={self.mesh}.")
    if self.activations == "float64":
      free = {"activations", "weights", "width"}
      others = [f.name for f in dataclasses.fields(self) if f.name not in free and getattr(self, f.name) != f.default]
      if others or self.width is not None:
        raise ValueError(
          f"activations='float64' is numpy's forward in one pass: width={self.width} must be None, and "
          f"{', '.join(others) or 'every other axis'} left alone."
        )

  @classmethod
  def of_plain(cls, values: Mapping[str, Any]) -> "Graph":
    """From what `specjax.files.plain` made of one, or JSON."""
    fields: dict[str, Any] = {
      name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return cls(**fields)

  def __str__(self) -> str:
    if self.activations == "float64":
      return "float64" + (f" of {self.weights} weights" if self.weights else "")
    width = self.width
    parts = [
      "whole" if width is None else "decode" if width == 1 else f"verify {width}" if width < 10 else f"chunk {width}"
    ]
    parts += [f"padding {self.padding}"] if self.padding else []
    parts += [f"batch {self.batch} row {self.row}"] if self.batch > 1 else []
    parts += [f"{self.slots} slots"] if self.slots else []
    parts += [f"{self.weights} weights"] if self.weights else []
    parts += [self.activations] if self.activations else []
    parts += [f"precision {self.precision}"] if self.precision else []
    parts += [{True: "scanned", False: "unrolled"}[self.scan_layers]] if self.scan_layers is not None else []
    parts += [{True: "cpu kernels", False: "plain kernels"}[self.cpu_kernels]] if self.cpu_kernels is not None else []
    parts += [] if self.jit else ["op by op"]
    parts += [f"mesh {self.mesh[0]}x{self.mesh[1]}"] if self.mesh else []
    return ", ".join(parts)


def _two_counts(mesh: Any) -> bool:
  return isinstance(mesh, tuple) and len(mesh) == 2 and all(type(n) is int and n >= 1 for n in mesh)


REFERENCE = Graph(width=None, activations="float64")


def logits(
  model: LanguageModel, graph: Graph, tokens: Any, *, prompt_length: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Feeds one context through a graph; yields, pass by pass, (positions int[t], logits float32 or float64 [t, V]).

  tokens: int[T], T >= 2. Positions prompt_length-1 .. T-2 come out, in order; row i of the logits is the law of the
    token behind `positions[i]`. The last token is not fed.
  prompt_length: so many tokens are a prompt, which `specjax.sample` reads in passes of its own (64 tokens) up to the
    last one, in any graph: what a generation of `sample` went through.

  Memory: one pass of logits, [batch, width + padding, V], at a time.
  Raises ValueError, before the first pass, for tokens that the model can't take and a graph that can't run here.
  """
  tokens = check_tokens(model, tokens)
  if not 1 <= prompt_length < len(tokens):
    raise ValueError(f"prompt_length={prompt_length} is out of range: allowed 1 to {len(tokens) - 1} for these tokens.")
  if reason := unavailable(model, graph, len(tokens), prompt_length):
    raise ValueError(f"the graph {graph} can't run here: {reason}.")
  return feed(prepare(model, graph), graph, tokens, prompt_length)


def check_tokens(model: LanguageModel, tokens: Any) -> np.ndarray:
  """The context as int32[T]. Raises TypeError or ValueError if it is none for this model."""
  array = np.asarray(tokens)
  if array.ndim != 1 or len(array) < 2:
    raise ValueError(f"tokens has shape {array.shape}; it must be the ids of one context, int[T], T >= 2.")
  if not np.issubdtype(array.dtype, np.integer):
    raise TypeError(f"tokens has type {array.dtype}; it must hold integers.")
  bad = np.flatnonzero((array < 0) | (array >= model.num_ids))
  if bad.size:
    raise ValueError(f"tokens[{bad[0]}]={array[bad[0]]} is outside the vocabulary, 0 to {model.num_ids - 1}.")
  if model.context_length is not None and len(array) > model.context_length:
    raise ValueError(f"tokens has {len(array)} ids; the model's context holds {model.context_length}.")
  return array.astype(np.int32)


def unavailable(model: LanguageModel, graph: Graph, num_tokens: int, prompt_length: int = 1) -> str | None:
  """Why this machine can't run `graph` for `model` over a context of `num_tokens`, in words; None if nothing is known.

  A backend may still refuse a product while a pass is compiled, or run out of memory; `compare` lists that, too.
  """
  decoder = isinstance(model.apply, Apply)
  if graph.activations == "float64":
    if not decoder:
      return (
        "the float64 forward is known for the decoders of specjax.models alone; Graph(width=None) is one for others"
      )
    return None if prompt_length == 1 else "float64 has no passes: prompt_length can't be honoured"
  if not decoder:
    for name in ("activations", "scan_layers", "cpu_kernels"):
      if getattr(graph, name) is not None:
        return f"{name} can be chosen for the decoders of specjax.models alone, not for {model!r}"
    if graph.mesh is not None and graph.mesh[1] > 1:
      return f"how to split the tensors of {model!r} is not known"
  if graph.mesh is not None:
    need, have = graph.mesh[0] * graph.mesh[1], jax.device_count()
    if need > have:
      return f"it takes {need} devices, and this process has {have} ({jax.default_backend()})"
    kernels = {"cpu_kernels": graph.cpu_kernels} if graph.cpu_kernels is not None else form(model)
    if need > 1 and kernels.get("cpu_kernels"):
      return "the CPU's kernels can't be split over devices: choose cpu_kernels=False"
    try:
      sharding.shard(jax.eval_shape(lambda model: model, model), _mesh(graph.mesh))
    except ValueError as error:
      return first_line(error)
  need = _num_slots(graph, num_tokens, prompt_length)
  if graph.slots is not None and graph.slots < need:
    return f"{graph.slots} slots are too few: these passes over {num_tokens} tokens write {need}"
  return _refused(graph.activations or "float32", graph.precision)


@functools.cache
def _refused(dtype: str, precision: str | None) -> str | None:
  """Why the backend multiplies no matrices of this dtype and precision; None if it does."""
  try:
    with _precision(precision):
      jax.block_until_ready(jax.jit(lambda x: jnp.dot(x, x.T))(jnp.ones((2, 8), dtype)))
  except Exception as error:  # jax, XLA and the backend all raise their own
    return first_line(error)
  return None


def first_line(error: Exception) -> str:
  """What an error of jax says, as a reason."""
  return str(error).strip().splitlines()[0].rstrip(".")


def _precision(precision: str | None) -> contextlib.AbstractContextManager:
  return contextlib.nullcontext() if precision is None else jax.default_matmul_precision(precision)


def prepare(model: LanguageModel, graph: Graph) -> LanguageModel:
  """The model in the graph's form: its weights rounded, its layers arranged and its tensors placed."""
  if graph.weights is not None:
    rounded = functools.partial(_round, dtype=graph.weights)
    model = dataclasses.replace(model, params=jax.tree.map(rounded, model.params))
  if graph.activations == "float64":
    return model
  if isinstance(model.apply, Apply):
    changes = {n: v for n in ("scan_layers", "cpu_kernels") if (v := getattr(graph, n)) is not None}
    options = dataclasses.replace(model.apply.options, **changes)
    own = model.params["embed"]["weight"].dtype
    dtype = jnp.dtype(graph.activations or own)
    if (options, dtype) != (model.apply.options, own):
      model = from_checkpoint(as_checkpoint(model), dtype=dtype, options=options)
  if graph.mesh is not None:
    model = sharding.shard(model, _mesh(graph.mesh))
  return model


def form(model: LanguageModel) -> dict[str, Any]:
  """What a decoder does on the axes that a graph leaves to it; empty for another model."""
  if not isinstance(model.apply, Apply):
    return {}
  dtype, options = str(model.params["embed"]["weight"].dtype), model.apply.options
  return {
    "weights": dtype,
    "activations": dtype,
    "scan_layers": options.scan_layers,
    "cpu_kernels": options.cpu_kernels,
  }


def _round(leaf: Array, dtype: str) -> Array:
  return leaf.astype(dtype).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def feed(
  model: LanguageModel, graph: Graph, tokens: np.ndarray, prompt_length: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """`logits` of a model that is prepared and tokens that are checked."""
  if graph.activations == "float64":
    yield from float64.logits(model, tokens[:-1])
    return
  count, prompt = len(tokens) - 1, prompt_length - 1
  slots = graph.slots or 1 << max(_num_slots(graph, len(tokens), prompt_length) - 1, MIN_SLOTS - 1).bit_length()
  rows = np.stack([np.roll(tokens, shift - graph.row) for shift in range(graph.batch)])
  cache = empty_cache(model, graph.batch, slots)
  passes = [(start, prompt, PREFILL_CHUNK) for start in range(0, prompt, PREFILL_CHUNK)]
  width = graph.width or count - prompt
  passes += [(start, count, width) for start in range(prompt, count, width)]
  for start, end, width in passes:
    real = min(width, end - start)
    garbage = width - real + (graph.padding if end == count else 0)
    fed = np.pad(rows[:, start : start + real], ((0, 0), (0, garbage)), mode="edge")
    with _precision(graph.precision), contextlib.nullcontext() if graph.jit else jax.disable_jit():
      out, cache = _pass(model, jnp.asarray(fed), cache, jnp.full(graph.batch, start, jnp.int32))
    if end == count:
      yield np.arange(start, start + real), np.asarray(out[graph.row])[:real, : model.num_ids]


def _num_slots(graph: Graph, num_tokens: int, prompt_length: int) -> int:
  """Slots that the passes write, garbage included."""
  prompt, count = prompt_length - 1, num_tokens - 1
  width = graph.width or count - prompt
  whole = prompt + -(-(count - prompt) // width) * width + graph.padding
  return max(whole, -(-prompt // PREFILL_CHUNK) * PREFILL_CHUNK)


@functools.cache
def _mesh(shape: tuple[int, int]) -> Mesh:
  return sharding.mesh(data=shape[0], model=shape[1], devices=jax.devices()[: shape[0] * shape[1]])


_pass = jax.jit(run, donate_argnames="cache")  # one program for all contexts
