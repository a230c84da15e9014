"""Tables and the figure of experiments/numerics_text.py, from what it measured of every prompt."""

import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
import scipy.stats

from experiments import report
from specjax.numerics import Curve, flip_probability, measured, predicted

SAMPLERS = ("plain", "speculative")
KINDS = ("numerics", "another draw", "fault")
_TITLES = {"greedy": "Greedy", "coupled": "T = 1, shared noise"}
_COLOURS = {"float32": "#009e73", "bfloat16": "#d55e00", "float16": "#0072b2"}
Rows = Sequence[Mapping[str, Any]]  # see numerics_text._Batch.measure


def show(
  found: Mapping[str, Mapping[str, Rows]],
  held_out: Mapping[str, Sequence[float]],
  config: ml_collections.ConfigDict,
  figure: pathlib.Path,
) -> dict[str, Any]:
  """Prints the tables and writes the figure; returns the figures of the tables.

  found: of each dtype and mode, its rows. held_out: of each dtype, nats a token of the same texts; float32 first.
  """
  curves = {dtype: {mode: _curves(mode, rows) for mode, rows in modes.items()} for dtype, modes in found.items()}
  summary = {
    dtype: {mode: _summarise(rows, *curves[dtype][mode]) for mode, rows in modes.items()}
    for dtype, modes in found.items()
  }
  exact = next(iter(held_out.values()))
  read = {dtype: _paired(own, exact) for dtype, own in held_out.items()}
  _print(config, summary, read, found)
  save_figure(curves, config, figure)
  return {"texts": summary, "held_out": read}


def _curves(mode: str, rows: Rows) -> tuple[Curve, Curve]:
  """Measured and predicted."""
  lengths = np.array([len(row["plain"]) for row in rows])
  shorter = [min(len(row["plain"]), len(row["speculative"])) for row in rows]
  seen = measured(shorter, [row["different"] for row in rows])

  def table(name: str) -> np.ndarray:
    return np.array([np.pad(row[name], (0, lengths.max() - len(row[name]))) for row in rows])

  if mode == "coupled":
    return seen, predicted(table("differs"), table("kept"), lengths)
  margins, differs = table("margins"), np.zeros((len(rows), lengths.max()))
  even = np.arange(len(rows)) % 2 == 0
  for own in (even, ~even):  # each half by the errors of the other
    changes = np.concatenate([row["changes"] for row, mine in zip(rows, own, strict=True) if not mine])
    differs[own] = flip_probability(margins[own].ravel(), changes).reshape(-1, lengths.max())
  return seen, predicted(differs, 1 - differs, lengths)


def _summarise(rows: Rows, seen: Curve, said: Curve) -> dict[str, Any]:
  different = [row for row in rows if row["different"] is not None]
  same = scipy.stats.binomtest(len(rows) - len(different), len(rows)).proportion_ci(method="exact")
  tokens = {name: sum(len(row[name]) for row in rows) for name in SAMPLERS}
  nll = {name: sum(row["nll"][name] for row in rows) for name in SAMPLERS}
  each = {name: [row["nll"][name] / len(row[name]) for row in rows] for name in SAMPLERS}
  why = [row["explanation"] for row in different]
  margins = [one["margin"] / one["error"] for one in why if one["margin"] is not None and one["error"]]
  return {
    "prompts": len(rows),
    "tokens": tokens["plain"],
    "same": len(rows) - len(different),
    "same_share": ((len(rows) - len(different)) / len(rows), same.low, same.high),
    "measured": (seen.survival[-1], seen.low[-1], seen.high[-1]),
    "predicted": (said.survival[-1], said.low[-1], said.high[-1]),
    "length": len(seen.survival) - 1,
    "kinds": {kind: count for kind in KINDS if (count := Counter(one["kind"] for one in why)[kind])},
    "given_again": sum(all(one["repeated"]) for one in why),  # by both graphs
    "largest_margin_in_errors": max(margins, default=None),
    "perplexity": {name: float(np.exp(nll[name] / tokens[name])) for name in SAMPLERS},
    "nll_change": _mean(np.subtract(each["speculative"], each["plain"])),
  }


def _paired(own: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
  """Of held-out texts: perplexity, and nats a token more than in another dtype."""
  return {"texts": len(own), "perplexity": float(np.exp(np.mean(own))), "nll_change": _mean(np.subtract(own, base))}


def _mean(values: np.ndarray) -> tuple[float, float, float]:
  """The mean and its 95 % interval by Student's t."""
  reach = scipy.stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
  return float(values.mean()), float(values.mean() - reach), float(values.mean() + reach)


def _print(
  config: ml_collections.ConfigDict, summary: Mapping[str, Any], held_out: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
  def interval(values: Sequence[float], style: str) -> str:
    return "{} [{}, {}]".format(*(style.format(value) for value in values))

  own = config.text
  report.print_table(
    f"{config.model}: plain and speculative text (gamma {own.gamma}), {own.new_tokens} tokens, 95 % intervals",
    ("", "prompts", "same text", "S at the end", "predicted", "differences", "given again", "largest margin / error",
     "perplexity: plain", "speculative", "nats a token more"),
    [
      (
        f"{dtype} {mode}",
        str(one["prompts"]),
        f"{one['same']}: " + interval(one["same_share"], "{:.0%}"),
        interval(one["measured"], "{:.3f}"),
        interval(one["predicted"], "{:.3f}"),
        ", ".join(f"{count} {kind}" for kind, count in one["kinds"].items()) or "none",
        str(one["given_again"]) if one["kinds"] else "",
        "" if one["largest_margin_in_errors"] is None else f"{one['largest_margin_in_errors']:.2f}",
        *(f"{one['perplexity'][name]:.2f}" for name in SAMPLERS),
        interval(one["nll_change"], "{:+.3f}") if one["same"] < one["prompts"] else "the same",
      )
      for dtype, modes in summary.items()
      for mode, one in modes.items()
    ],
  )  # fmt: skip
  report.print_table(
    f"{config.model}: perplexity of {next(iter(held_out.values()))['texts']} Wikipedia texts",
    ("", "perplexity", f"nats a token more than {next(iter(held_out))}"),
    [
      (dtype, f"{one['perplexity']:.3f}", interval(one["nll_change"], "{:+.4f}") if n else "")
      for n, (dtype, one) in enumerate(held_out.items())
    ],
  )
  different = [
    row["explanation"] for modes in found.values() for rows in modes.values() for row in rows if row["explanation"]
  ]
  for one in [e for e in different if e["kind"] != KINDS[0]] or different[:1]:
    print(one["words"])


def save_figure(
  curves: Mapping[str, Mapping[str, tuple[Curve, Curve]]], config: ml_collections.ConfigDict, path: pathlib.Path
) -> None:
  """S(t) of every dtype, measured and predicted; greedy left, coupled right."""
  report.plot_style()
  import matplotlib.pyplot as plt

  figure, panels = plt.subplots(1, len(_TITLES), figsize=(13, 5.5), sharey=True)
  for axes, mode in zip(panels, _TITLES, strict=True):
    for dtype, modes in curves.items():
      if mode not in modes:
        continue
      (seen, said), colour = modes[mode], _COLOURS[dtype]
      t = np.arange(len(seen.survival))
      label = f"{dtype}, {seen.at_risk[0]} texts"
      axes.step(t, seen.survival, where="post", color=colour, lw=2, label=label)
      axes.plot(np.arange(len(said.survival)), said.survival, color=colour, ls="--", lw=2, label="predicted")
      at = np.unique(np.linspace(0, len(t) - 1, 5).astype(int))[1:]  # bands of three curves would hide each other
      reach = np.abs(seen.survival - [seen.low, seen.high])[:, at]
      shift = 0.006 * len(t) * (list(_COLOURS).index(dtype) - 2)
      axes.errorbar(
        at + shift, seen.survival[at], reach, fmt="none", ecolor=colour, elinewidth=1.5, capsize=3, alpha=0.7
      )
    axes.set_title(_TITLES[mode])
    axes.set_xlabel("tokens generated, t")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=10, loc="lower left")
  panels[0].set_ylabel("S(t): the first t tokens are the same")
  figure.suptitle(f"{config.model}: plain against speculative text (gamma {config.text.gamma}); bars: 95 %")
  report.save_figure(figure, path)
