"""The figure of a comparison: how far any two graphs are apart, and what each does to the law."""

import pathlib
from typing import Any

import numpy as np

from specjax.files import replacing
from specjax.numerics.comparison import Comparison, Summary

COLUMNS = {  # of the right panel: title, value, format
  "max |error|": (lambda s: s.max_error, "{:.0e}"),
  "RMS error": (lambda s: s.rms_error.estimate, "{:.0e}"),
  "KL, nats": (lambda s: s.kl.estimate, "{:.0e}"),
  "TV": (lambda s: s.tv.estimate, "{:.0e}"),
  "argmax flips": (lambda s: s.flips.estimate, "{:.1%}"),
  "can flip": (lambda s: s.at_risk.estimate, "{:.1%}"),
  "top-p changes": (lambda s: s.support.estimate, "{:.1%}"),
}
_SAME = "#2b2b2b"


def save(comparison: Comparison, path: pathlib.Path, title: str = "") -> None:
  """Draws the figure into a file."""
  with replacing(path) as temporary:
    draw(comparison, title).savefig(temporary)


def draw(comparison: Comparison, title: str = "") -> Any:
  """A matplotlib figure, not attached to any window."""
  from matplotlib.figure import Figure

  names, matrix = comparison.differences()
  size = 3.5 + 0.2 * len(names)
  figure = Figure(figsize=(1.75 * size + 1.5, size), dpi=110, layout="constrained")
  left, right = figure.subplots(1, 2, width_ratios=[1.65, 1])
  _matrix(figure, left, names, matrix)
  _errors(right, comparison, names)
  positions, contexts = sum(comparison.lengths), len(comparison.lengths)
  head = f"{title}: {positions} positions of {contexts} contexts" if title else f"{positions} positions"
  figure.suptitle(head, x=0.01, ha="left", weight="bold")
  return figure


def _matrix(figure: Any, axes: Any, names: list[str], matrix: np.ndarray) -> None:
  import matplotlib
  from matplotlib.colors import LogNorm

  found = matrix[np.isfinite(matrix) & (matrix > 0)]
  low, high = (found.min(), found.max()) if found.size else (1e-8, 1.0)
  colours = matplotlib.colormaps["YlOrRd"].with_extremes(bad="#bbbbbb", under=_SAME)
  norm = LogNorm(low * 0.999, max(high, low * 10))
  # 0 has no logarithm: it is drawn as what lies under the scale.
  image = axes.imshow(
    np.where(matrix == 0, low / 1e3, matrix), cmap=colours, norm=norm, interpolation="nearest", aspect="auto"
  )
  axes.set_title("RMS difference of two graphs' logits; black: the same bits", loc="left", fontsize=11)
  axes.set_yticks(range(len(names)), names, fontsize=8)
  axes.set_xticks(range(len(names)), names, fontsize=8, rotation=90)
  axes.tick_params(length=0)
  figure.colorbar(image, ax=axes, shrink=0.6, pad=0.01)


def _errors(axes: Any, comparison: Comparison, names: list[str]) -> None:
  summary: dict[str, Summary] = comparison.summary()
  axes.set_title(f"Against {comparison.reference.graph}", loc="left", fontsize=11)
  axes.set_xlim(-0.5, len(COLUMNS) - 0.5)
  axes.set_ylim(len(names) - 0.5, -0.5)
  axes.set_xticks(range(len(COLUMNS)), COLUMNS, fontsize=8, rotation=35, ha="left")
  axes.xaxis.tick_top()
  axes.set_yticks([])
  axes.tick_params(length=0)
  for side in axes.spines.values():
    side.set_visible(False)
  for column, (value, style) in enumerate(COLUMNS.values()):
    values = [value(own) if (own := summary.get(name)) else np.nan for name in names]
    for row, each in enumerate(values):
      shade = _shade(each, values)
      axes.add_patch(_cell(column, row, shade))
      if np.isfinite(each):
        text = "0" if each == 0 else style.format(each)
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if shade > 0.7 else "black")


def _shade(value: float, values: list[float]) -> float:
  """0 for the least of the positive values, 1 for the largest, by their logarithms."""
  positive = [v for v in values if np.isfinite(v) and v > 0]
  if not np.isfinite(value) or value <= 0 or max(positive) == min(positive):
    return 0.0
  return float(np.log(value / min(positive)) / np.log(max(positive) / min(positive)))


def _cell(column: int, row: int, shade: float) -> Any:
  import matplotlib
  from matplotlib.patches import Rectangle

  return Rectangle((column - 0.5, row - 0.5), 1, 1, color=matplotlib.colormaps["Blues"](0.85 * shade), lw=0)
