"""Many graphs against one reference: how far each is off, which agree bit for bit, and why, where that is known."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.stats
import tqdm

from specjax.language_model import LanguageModel
from specjax.numerics.divergence import has_law
from specjax.numerics.graphs import (
  REFERENCE,
  Graph,
  check_tokens,
  feed,
  first_line,
  form,
  prepare,
  unavailable,
)
from specjax.numerics.measure import Measurement, collect, difference, measure
from specjax.numerics.same import Identical, identical

BLOCK = 16  # positions that are resampled together
CONTEXTS = 8  # from so many contexts on, whole contexts are


class Interval(NamedTuple):
  """An estimate and the bounds of its 95 % interval; NaN bounds where there is too little to tell."""

  estimate: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Summary:
  """A measurement over all positions. `bits` is the share of positions where the graph's logits are the reference's."""

  max_error: float  # the largest of all: an extreme has no interval
  rms_error: Interval
  kl: Interval
  tv: Interval
  flips: Interval  # share of positions
  support: Interval  # share of positions whose top-p support changed
  at_risk: Interval  # share whose margin in the reference is at most twice the largest error there: others can't flip
  bits: float
  not_finite: int  # positions where some logit is NaN, or infinite where the reference's is not: all of them at risk


@dataclasses.dataclass(frozen=True)
class Comparison:
  """What `compare` found. Graphs go by name, `str(graph)`, and in the order given.

  reference: measured against itself, for its margins.
  measured: the graphs that ran. not_run: the others, and why this machine couldn't.
  lengths: positions of each context, in the order of a measurement's arrays.
  form: what the model does where a graph leaves an axis to it. backend: jax's.
  """

  reference: Measurement
  measured: Mapping[str, Measurement]
  not_run: Mapping[str, str]
  lengths: tuple[int, ...]
  top_p: float
  form: Mapping[str, Any]
  backend: str

  def summary(self) -> dict[str, Summary]:
    """For each graph that ran.

    Intervals of means are bootstrapped (percentiles of 2,000 resamples) over whole contexts where there are 8 or more,
    else over blocks of 16 positions: a cache carries its errors on, so neighbours are not independent. Those of flips,
    supports and risks, which are rare, are Clopper-Pearson's, since a bootstrap of no event knows no doubt; near-ties
    come from the text more than from the cache, and count as independent.
    """
    units = _units(self.lengths)
    return {name: self._summarise(found, units) for name, found in self.measured.items()}

  def _summarise(self, found: Measurement, units: np.ndarray) -> Summary:
    square = _bootstrap(np.square(found.rms_error), units)
    return Summary(
      max_error=float(found.max_error.max()),
      rms_error=Interval(*(float(np.sqrt(value)) for value in square)),
      kl=_bootstrap(found.kl, units),
      tv=_bootstrap(found.tv, units),
      flips=_share(found.flip),
      support=_share(found.support > 0),
      at_risk=_share(~(self.reference.margin > 2 * found.max_error)),
      bits=float((found.digest == self.reference.digest).mean()),
      not_finite=int((~np.isfinite(found.max_error)).sum()),
    )

  def identical(self) -> list[Identical]:
    """Groups of two graphs or more with the same bits everywhere, the reference among them, and why they have."""
    groups: dict[bytes, list[Graph]] = {}
    for found in [self.reference, *self.measured.values()]:
      members = groups.setdefault(found.digest.tobytes(), [])
      if found.graph not in members:
        members.append(found.graph)
    return [identical(members, self.form, self.backend) for members in groups.values() if len(members) > 1]

  def __str__(self) -> str:
    """A line a graph: errors against the reference, flips, positions that could flip; what agrees, what didn't run."""
    rows: list[tuple[str, ...]] = [("graph", "max error", "RMS error", "KL, nats", "flips", "can flip")]
    for name, own in self.summary().items():
      figures = [f"{own.max_error:.2g}", f"{own.rms_error.estimate:.2g}", f"{own.kl.estimate:.2g}"]
      figures += [f"{own.flips.estimate:.1%}", f"{own.at_risk.estimate:.1%}"]
      rows.append((name + (f" (not finite at {own.not_finite})" if own.not_finite else ""), *figures))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{sum(self.lengths)} positions against {self.reference.graph}"]
    for first, *rest in rows:
      cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
      lines.append("  " + "  ".join(cells))
    lines += [f"not run: {name}: {reason}" for name, reason in self.not_run.items()]
    lines += [f"the same bits: {'; '.join(same.graphs)}" for same in self.identical()]
    return "\n".join(lines)

  def differences(self) -> tuple[list[str], np.ndarray]:
    """Names, the reference's first, and float64[n, n]: RMS difference of two graphs' logits, 0 for equal bits.

    Estimated from the sketches, a few of the vocabulary's logits at every position.
    """
    found = {str(self.reference.graph): self.reference, **self.measured}
    rows = list(found.values())
    matrix = np.array([[_apart(a, b) for b in rows] for a in rows])
    return list(found), matrix

  def plot(self, path: str | pathlib.Path, title: str = "") -> None:
    """Writes the heat map of `differences`, beside it each graph's errors against the reference."""
    from specjax.numerics import figure

    figure.save(self, pathlib.Path(path), title)


def compare(
  model: LanguageModel,
  tokens: Any,
  graphs: Iterable[Graph],
  *,
  reference: Graph = REFERENCE,
  top_p: float = 0.9,
) -> Comparison:
  """Feeds the same contexts through every graph and measures each against the reference.

  tokens: int[T], int[S, T], or a sequence of contexts int[T] of their own lengths; T >= 2. The last token of a context
    isn't fed: there are T-1 positions.
  graphs: a graph that this machine can't run is listed in `not_run` with its reason.
  reference: float64 by default, for the decoders of `specjax.models`; another model needs another one.
  top_p: of the supports that are compared.

  Memory: one graph's pass at a time. The reference's logits, [T-1, V] in float64, lie in a temporary file.
  Raises ValueError or TypeError for tokens that the model can't take, a reference that can't run, and graphs given
  twice.
  """
  if isinstance(graphs, Graph):
    raise TypeError("graphs must be a list of specjax.numerics.Graph, got one: [graph].")
  graphs = list(graphs)
  if wrong := [graph for graph in graphs if not isinstance(graph, Graph)]:
    raise TypeError(f"graphs must be a list of specjax.numerics.Graph, got {wrong[0]!r} in it.")
  if not isinstance(reference, Graph):
    raise TypeError(f"reference must be a specjax.numerics.Graph, got {type(reference).__name__}.")
  contexts = _contexts(model, tokens)
  if len(set(graphs)) < len(graphs):
    twice = next(graph for graph in graphs if graphs.count(graph) > 1)
    raise ValueError(f"the graph {twice} is given {graphs.count(twice)} times.")
  if not 0 < top_p < 1:
    raise ValueError(f"top_p={top_p} must be above 0 and below 1.")
  if reason := unavailable(model, reference, max(map(len, contexts))):
    raise ValueError(f"the reference {reference} can't run here: {reason}.")
  found: dict[str, Measurement | str] = {}
  with Reference(model, contexts, reference, top_p) as against:
    for graph in tqdm.tqdm(graphs, desc="Comparing", unit="graph", leave=False, disable=None):
      found[str(graph)] = against.measure(graph)
    return against.comparison(found)


class Reference:
  """The reference's logits of checked contexts, in a temporary file while the block lasts, to measure graphs against.

  with Reference(model, contexts, REFERENCE, top_p) as against:
    found = against.measure(Graph(width=5))
  """

  def __init__(self, model: LanguageModel, contexts: Sequence[np.ndarray], graph: Graph, top_p: float):
    self._model, self._contexts, self._graph, self._top_p = model, contexts, graph, top_p

  def __enter__(self) -> "Reference":
    self._folder = tempfile.TemporaryDirectory()
    prepared, dtype = prepare(self._model, self._graph), _dtype(self._graph)
    self._logits = []
    for i, tokens in enumerate(self._contexts):
      shape = len(tokens) - 1, self._model.num_ids
      file = np.memmap(pathlib.Path(self._folder.name) / str(i), dtype, "w+", shape=shape)
      self._logits.append(collect(feed(prepared, self._graph, tokens), file))
      broken = np.flatnonzero(~has_law(self._logits[-1]))
      if broken.size:
        self.__exit__()
        raise ValueError(
          f"the reference {self._graph} gives logits that are no law at position {broken[0]} of context {i}."
        )
    return self

  def __exit__(self, *_: object) -> None:
    del self._logits
    self._folder.cleanup()

  def measure(self, graph: Graph) -> Measurement | str:
    """A graph against the reference; or, in words, why this machine can't run it."""
    if reason := unavailable(self._model, graph, max(map(len, self._contexts))):
      return reason
    try:
      prepared = prepare(self._model, graph)
      runs = (feed(prepared, graph, tokens) for tokens in self._contexts)
      return measure(graph, runs, self._logits, top_p=self._top_p)
    except jax.errors.JaxRuntimeError as error:  # of some products XLA learns while it compiles that it has no code
      return first_line(error)

  def _itself(self) -> Measurement:
    """The reference against itself, from the file."""
    runs = ([(np.arange(len(logits)), logits)] for logits in self._logits)
    return measure(self._graph, runs, self._logits, top_p=self._top_p)

  def comparison(self, found: Mapping[str, Measurement | str]) -> Comparison:
    """Of what `measure` returned for each graph, by name."""
    return Comparison(
      reference=self._itself(),
      measured={name: own for name, own in found.items() if not isinstance(own, str)},
      not_run={name: own for name, own in found.items() if isinstance(own, str)},
      lengths=tuple(len(context) - 1 for context in self._contexts),
      top_p=self._top_p,
      form=form(self._model),
      backend=jax.default_backend(),
    )


def _dtype(graph: Graph) -> Any:
  return np.float64 if graph.activations == "float64" else np.float32


def _contexts(model: LanguageModel, tokens: Any) -> list[np.ndarray]:
  if np.ndim(tokens[:0] if isinstance(tokens, list | tuple) else tokens) == 0:
    raise TypeError(
      f"tokens has type {type(tokens).__name__}; it must be the ids of one context, int[T], or of several."
    )
  if len(tokens) == 0:
    raise ValueError("tokens holds no context; give the ids of one, int[T], or of several.")
  rows = [tokens] if np.ndim(tokens[0]) == 0 else list(tokens)
  return [check_tokens(model, row) for row in rows]


def _units(lengths: Sequence[int]) -> np.ndarray:
  """int[N]: which unit of resampling each position belongs to."""
  if len(lengths) >= CONTEXTS:
    return np.repeat(np.arange(len(lengths)), lengths)
  blocks = [np.arange(length) // BLOCK for length in lengths]
  offsets = np.cumsum([0, *(block[-1] + 1 for block in blocks)])
  return np.concatenate([block + offset for block, offset in zip(blocks, offsets, strict=False)])


def _bootstrap(values: np.ndarray, units: np.ndarray) -> Interval:
  """The mean of the values, and percentiles of the means of resampled units."""
  count = int(units[-1]) + 1
  if count < 3 or not np.isfinite(values).all():
    return Interval(float(values.mean()), np.nan, np.nan)
  sums, sizes = np.bincount(units, values), np.bincount(units)
  drawn = np.random.default_rng(0).integers(0, count, (2000, count))
  low, high = np.percentile(sums[drawn].sum(1) / sizes[drawn].sum(1), [2.5, 97.5])
  return Interval(float(values.mean()), float(low), float(high))


def _share(events: np.ndarray) -> Interval:
  interval = scipy.stats.binomtest(int(events.sum()), len(events)).proportion_ci(method="exact")
  return Interval(float(events.mean()), float(interval.low), float(interval.high))


def _apart(a: Measurement, b: Measurement) -> float:
  same = a.digest == b.digest
  return float(np.sqrt(np.where(same[:, None], 0.0, np.square(difference(a.sketch, b.sketch))).mean()))
