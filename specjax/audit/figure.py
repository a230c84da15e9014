"""The figure of a report: every score's z, where the deviations lie, and the capital of the bets along the stream."""

import pathlib
import textwrap
from typing import Any

import matplotlib.ticker
import numpy as np
import scipy.stats

from specjax.audit.report import Report
from specjax.files import replacing

COLOURS = {False: "#c0392b", True: "#2e7d32", None: "#b8860b"}
TITLES = {False: "Fault", True: "No sign of a fault", None: "Can't say"}
_CLEAN, _FAULT = "#5b7c99", COLOURS[False]
MOST_SHOWN = 12.0  # z beyond it are drawn at the edge, with their number


def draw(report: Report) -> Any:
  """A matplotlib figure, not attached to any window."""
  from matplotlib.figure import Figure

  lines = len({(part.grouping, part.group) for part in report.parts})  # of the table, which must stay legible
  figure = Figure(figsize=(13, max(7.5, 1.5 + 0.16 * lines)), dpi=130, layout="constrained")
  grid = figure.add_gridspec(2, 2, width_ratios=[1, 1.35], height_ratios=[1.25, 1])
  _scores(figure.add_subplot(grid[0, 0]), report)
  _evidence(figure.add_subplot(grid[1, 0]), report)
  _parts(figure, figure.add_subplot(grid[:, 1]), report)
  where = next((line[2:] for line in report.verdict.splitlines() if line.startswith("- Where:")), "")
  head = f"{TITLES[report.ok]}: {report.tokens:,} tokens, {report.generations:,} generations"
  figure.suptitle(
    "\n".join([head, *textwrap.wrap(where, 100)]),
    x=0.01,
    ha="left",
    fontsize=14,
    weight="bold",
    color=COLOURS[report.ok],
  )
  return figure


def save(report: Report, path: pathlib.Path) -> None:
  """Draws the figure into a file, in the format of its suffix; ValueError for a suffix that matplotlib has none for."""
  from matplotlib.backend_bases import FigureCanvasBase

  known = sorted(FigureCanvasBase.get_supported_filetypes())
  if path.suffix[1:].lower() not in known:
    raise ValueError(f"{path} must have one of these suffixes: {', '.join(f'.{name}' for name in known)}.")
  with replacing(path) as temporary:
    draw(report).savefig(temporary)


def _plain(axes: Any, title: str) -> None:
  axes.set_title(title, loc="left", fontsize=12, weight="bold")
  axes.spines[["top", "right"]].set_visible(False)


def _scores(axes: Any, report: Report) -> None:
  _plain(axes, "Each score, in standard deviations")
  tests = report.tests[::-1]
  threshold = float(scipy.stats.norm.isf(report.level / 2 / max(len(tests), 1)))
  for index, test in enumerate(tests):
    shown = float(np.clip(test.z, -MOST_SHOWN, MOST_SHOWN))
    axes.barh(index, shown, color=_FAULT if test.adjusted <= report.level else _CLEAN, height=0.65)
    inwards = abs(shown) > MOST_SHOWN / 2
    axes.annotate(
      f"{test.z:+.1f}",
      (shown, index),
      xytext=((-4 if inwards else 4) * (1 if shown >= 0 else -1), 0),
      textcoords="offset points",
      va="center",
      ha="right" if (shown >= 0) == inwards else "left",
      color="white" if inwards else "black",
    )
  axes.axvspan(-threshold, threshold, color="#000000", alpha=0.06, lw=0)
  axes.axvline(0, color="black", lw=0.8)
  axes.set_yticks(range(len(tests)), [test.name for test in tests])
  axes.set_xlim(-MOST_SHOWN, MOST_SHOWN)
  axes.set_xlabel(f"z (grey: what chance does, false alarms {report.level:.1g})")


def _evidence(axes: Any, report: Report) -> None:
  _plain(axes, "Evidence so far (valid at any token)")
  if report.evidence is not None:
    axes.plot(report.evidence.tokens, report.evidence.path, color=COLOURS[report.ok])
    if report.evidence.crossed is not None:
      axes.axvline(report.evidence.crossed, color=_FAULT, ls=":", label=f"crossed at token {report.evidence.crossed:,}")
  axes.axhline(-np.log10(report.alpha), color="black", ls="--", lw=1, label=f"a fault: capital {1 / report.alpha:,.0f}")
  axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
  axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
  axes.set_xlabel("tokens")
  axes.set_ylabel("log10 capital of the bets")
  axes.legend(frameon=False, loc="best")


def _parts(figure: Any, axes: Any, report: Report) -> None:
  """A table of colours: groups of tokens by scores."""
  _plain(axes, "Where: z of each score in each part of the samples")
  scores = list(dict.fromkeys(part.score for part in report.parts))
  groups = list(dict.fromkeys((part.grouping, part.group) for part in report.parts))
  if not groups:
    axes.set_axis_off()
    axes.text(0, 0.95, "too few tokens to divide", va="top", transform=axes.transAxes)
    return
  z = np.full((len(groups), len(scores)), np.nan)
  for part in report.parts:
    row, column = groups.index((part.grouping, part.group)), scores.index(part.score)
    z[row, column] = part.z
    mark = "bold" if part.adjusted <= report.level else "normal"
    colour = "white" if abs(part.z) > 6 else "black"
    axes.text(column, row, f"{part.z:+.1f}", ha="center", va="center", fontsize=8.5, color=colour, weight=mark)
  image = axes.imshow(z, cmap="RdBu_r", vmin=-10, vmax=10, aspect="auto")
  axes.set_xticks(range(len(scores)), scores)
  axes.set_yticks(range(len(groups)), [f"{grouping} {group}" for grouping, group in groups], fontsize=9)
  axes.tick_params(length=0)
  axes.spines[:].set_visible(False)
  for index in range(1, len(groups)):
    if groups[index][0] != groups[index - 1][0]:
      axes.axhline(index - 0.5, color="black", lw=1.2)
  figure.colorbar(image, ax=axes, shrink=0.5, label="z (bold: significant)")
