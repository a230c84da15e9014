"""Why graphs give the same bits, where that is known.

A reason is given for what was found identical, and predicts nothing. What is said of XLA's CPU backend was read off
its output, not its code.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.models.ops import ATTENTION_BLOCK
from specjax.numerics.graphs import Graph

_PASS = ("width", "padding", "batch")


class Identical(NamedTuple):
  """Graphs that gave the same bits at every position.

  reasons: (graph, another one of these before it, why they must agree), where that is known; at most one a graph.
  """

  graphs: tuple[str, ...]
  reasons: tuple[tuple[str, str, str], ...]


def identical(graphs: Sequence[Graph], form: Mapping[str, Any], backend: str) -> Identical:
  """Explains a group of graphs that were found identical, each by the one before it that it shares most axes with.

  form: of `graphs.form`, what the model does where an axis is None. backend: `jax.default_backend()`.
  """
  resolved = [_resolved(graph, form) for graph in graphs]
  reasons = []
  for i, graph in enumerate(resolved):
    earlier = sorted(range(i), key=lambda j: len(_axes(graph, resolved[j])))
    known = ((j, reason) for j in earlier if (reason := _why(graph, resolved[j], backend)))
    if (first := next(known, None)) is not None:
      reasons.append((str(graphs[i]), str(graphs[first[0]]), first[1]))
  return Identical(tuple(map(str, graphs)), tuple(reasons))


def _axes(a: Graph, b: Graph) -> list[str]:
  """The axes in which two graphs differ."""
  return [f.name for f in dataclasses.fields(Graph) if getattr(a, f.name) != getattr(b, f.name)]


def _why(a: Graph, b: Graph, backend: str) -> str | None:
  """One reason for each axis in which two graphs differ, joined; None if one of them is not known."""
  axes = _axes(a, b)
  if not axes:
    return "the same computation by two names"
  reasons = [_reason(axis, (a, b)) for axis in axes] if backend == "cpu" else [None]
  return None if None in reasons else "; ".join(dict.fromkeys(map(str, reasons)))


def _resolved(graph: Graph, form: Mapping[str, Any]) -> Graph:
  if graph.activations == "float64":
    return graph
  return dataclasses.replace(graph, **{name: value for name, value in form.items() if getattr(graph, name) is None})


def _reason(axis: str, graphs: Sequence[Graph]) -> str | None:
  """Why it makes no difference on a CPU."""
  blocks = all(graph.cpu_kernels for graph in graphs)
  if axis == "slots" and blocks:
    return f"attention reads the cache in blocks of {ATTENTION_BLOCK} slots, and none that is empty"
  if axis == "precision":
    return "a CPU multiplies in the operands' own precision, whatever these precisions ask for"
  if axis == "row":
    return "a product's rows are all summed in one order"
  if axis == "mesh" and all(graph.mesh in (None, (1, 1)) for graph in graphs):
    return "a mesh of one device splits nothing"
  if axis == "scan_layers":
    return "a loop over the layers runs the same operations"
  if axis in _PASS and blocks and all(graph.width for graph in graphs):
    if len({(graph.batch, (graph.width or 0) + graph.padding) for graph in graphs}) == 1:
      return "the passes have one shape"
    rows = {_padded_rows(graph) for graph in graphs}
    if len(rows) == 1:
      return f"products with weights have {rows.pop()} rows, padding included (those of attention have not, but agree)"
  return None


def _padded_rows(graph: Graph) -> int:
  """Rows of a pass's products, as `specjax.models.ops.matmul` pads them."""
  rows = graph.batch * ((graph.width or 0) + graph.padding)
  return 1 << (rows - 1).bit_length() if rows <= 64 else rows
