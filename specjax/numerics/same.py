"""Why graphs give the same bits, where that is known. A reason is given for what was found identical, and predicts nothing.

What is said of XLA's CPU backend was read off its output, not its code.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.models.ops import ATTENTION_BLOCK
from specjax.numerics.graphs import Graph

_PASS = ("width", "padding", "batch")


def why_identical(graphs: Sequence[Graph], form: Mapping[str, Any], backend: str) -> str | None:
  """One reason for each axis in which these graphs differ, joined; None if one of them is not known.

  form: of `graphs.form`, what the model does where an axis is None. backend: `jax.default_backend()`.
  """
  graphs = [_resolved(graph, form) for graph in graphs]
  names = [field.name for field in dataclasses.fields(Graph)]
  axes = [name for name in names if len({getattr(graph, name) for graph in graphs}) > 1]
  if not axes:
    return "the same computation by two names"
  reasons = [_reason(axis, graphs) for axis in axes] if backend == "cpu" else []
  if not reasons or None in reasons:
    return None
  return "; ".join(dict.fromkeys(reason for reason in reasons if reason))


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
