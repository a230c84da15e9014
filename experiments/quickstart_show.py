"""What the quickstart shows of its results: two tables, texts side by side, and a figure. It measures nothing.

Everything here takes `results`, the content of results.json as `quickstart.run` returns it.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text

from experiments import report

SAMPLERS = ("plain", "speculative")
_PLAIN, _SPECULATIVE = "#a6a6a6", "#0072b2"
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # tell apart with any colour vision
_STYLES = ("o-", "s--", "^-.", "v:", "D-", "P--")


def print_results(results: Mapping[str, Any]) -> None:
  """Two tables, every place where greedy texts differ, and a text of each source side by side."""
  config, summary, items = results["config"], results["summary"], results["items"]
  costs, settings, gamma = summary["costs"], summary["settings"], config["gamma"]
  report.print_table(
    f"Speed at batch 1, {config['prompts_per_source']} prompts a source",
    ("", "tokens", "passes", "ms a token", "speed-up", "theory"),
    [row for setting in settings for row in _speed_rows(setting)],
  )
  report.print_table(
    f"Drafts, {gamma} a round",
    ("", "accepted", "alpha", "rounds with drafts", "tokens a pass", "theory by alpha", "same greedy text"),
    [_draft_row(setting) for setting in settings],
  )
  prompt_ms = sum(setting["plain"]["prompt_ms"] for setting in settings) / len(settings)
  speedups = ", ".join(f"{setting['speedup_with_prompt']:.2f}x" for setting in settings)
  print(f"Reading a prompt takes {prompt_ms:.0f} ms more. With that counted, the speed-ups are {speedups}.")
  print(
    f"Theory: tokens a pass / (gamma c + v), with the measured v({gamma + 1}) = {costs['v']:.2f} and "
    f"c = {costs['c']:.4f} of a {costs['decode_ms']:.1f} ms target pass.\n"
    "By alpha: the tokens a pass that there would be if every draft were accepted with probability alpha.\n"
  )
  for name, item in items.items():
    if difference := item.get("greedy_difference"):
      print(
        f"{name}: greedy texts differ from generated token {difference['position']} on, {difference['plain']!r} and "
        f"{difference['speculative']!r}; the two highest logits there are {difference['top2_margin']:.1e} apart."
      )
  _print_texts(items, config)


def _speed_rows(setting: Mapping[str, Any]) -> list[list[str]]:
  predicted = setting["speculative"]["predicted_from_block_efficiency"]
  ratios = {"plain": ["", ""], "speculative": [f"{setting['speedup']:.2f}x", f"{predicted:.2f}x"]}
  rows = []
  for sampler in SAMPLERS:
    own = setting[sampler]
    counts = [str(own["tokens"]), str(own["target_passes"])]
    rows.append([f"{_name(setting)} {sampler}", *counts, f"{own['ms_per_token']:.1f}", *ratios[sampler]])
  return rows


def _draft_row(setting: Mapping[str, Any]) -> list[str]:
  own, same = setting["speculative"], setting["same_greedy_text"]
  rates = ["-" if own[key] is None else f"{own[key]:.2f}" for key in ("acceptance_rate", "alpha")]
  rates += [f"{own['share_of_rounds_with_drafts']:.0%}", f"{own['block_efficiency']:.2f}"]
  same_text = "" if same is None else f"{same}/{setting['prompts']}"
  return [_name(setting), *rates, f"{own['predicted_from_alpha']:.2f}x", same_text]


def _name(setting: Mapping[str, Any]) -> str:
  return f"{setting['source']} T={setting['temperature']:g}"


def _print_texts(items: Mapping[str, Any], config: Mapping[str, Any]) -> None:
  """The beginning of each source's first text, the temperatures taking turns."""
  console = rich.console.Console()
  console = console if console.is_terminal else rich.console.Console(width=100, no_color=True)
  for index, source in enumerate(config["sources"]):
    temperature = config["temperatures"][index % len(config["temperatures"])]
    name, item = next((name, item) for name, item in items.items() if name.startswith(f"{source}/"))
    table = rich.table.Table(box=rich.box.SIMPLE, expand=True, title_justify="left")
    table.title = rich.text.Text(f"{name}, T={temperature:g}", style="bold")
    for sampler in SAMPLERS:
      table.add_column(sampler, ratio=1)
    texts = [item["runs"][str(float(temperature))][sampler]["text"] for sampler in SAMPLERS]
    table.add_row(*(rich.text.Text("\n".join(text.strip("\n").split("\n")[:8])) for text in texts))
    console.print(table)


def save_figure(results: Mapping[str, Any], path: pathlib.Path) -> None:
  """Three panels: time a token, speed-up against what was predicted, and which drafts were accepted."""
  report.plot_style()
  import matplotlib.pyplot as plt

  config, environment, settings = results["config"], results["environment"], results["summary"]["settings"]
  names = [f"{setting['source']}\nT = {setting['temperature']:g}" for setting in settings]
  figure, (left, middle, right) = plt.subplots(
    1, 3, figsize=(max(15.0, 5 + 2.5 * len(settings)), 5.2), width_ratios=(1.15, 1.15, 1)
  )
  drafts = {"ngram": "n-gram lookup"}.get(config["drafter"], config["drafter"].removeprefix("model:"))
  on_cpu = environment["backend"] == "cpu"
  machine = f"{environment['cpu']}, {environment['cores']} cores" if on_cpu else environment["device"]
  figure.suptitle(f"{config['model']}, batch 1; {config['gamma']} drafts a round by {drafts}; {machine}", fontsize=13)
  _draw_times(left, settings)
  _draw_speedups(middle, settings)
  for axes in (left, middle):
    axes.set_xticks(range(len(names)), names)
  _draw_drafts(right, settings)
  report.save_figure(figure, path)


def _draw_times(axes: Any, settings: Sequence[Mapping[str, Any]]) -> None:
  x = np.arange(len(settings))
  for offset, sampler, colour in ((-0.2, "plain", _PLAIN), (0.2, "speculative", _SPECULATIVE)):
    heights = [setting[sampler]["ms_per_token"] for setting in settings]
    axes.bar_label(axes.bar(x + offset, heights, 0.38, color=colour, label=sampler), fmt="%.0f", padding=2, fontsize=11)
  axes.margins(y=0.25)  # room for the legend
  axes.legend(loc="upper left", ncols=2)
  axes.set_title("Time a token")
  axes.set_ylabel("ms a token (prompt not counted)")


def _draw_speedups(axes: Any, settings: Sequence[Mapping[str, Any]]) -> None:
  x = np.arange(len(settings))
  measured = [setting["speedup"] for setting in settings]
  bars = axes.bar(x, measured, 0.55, color=_SPECULATIVE, label="measured")
  axes.bar_label(bars, fmt="%.2fx", label_type="center", color="white", fontweight="bold")
  for key, marker, words in (
    ("predicted_from_block_efficiency", "D", "predicted from tokens a pass"),
    ("predicted_from_alpha", "o", "predicted from alpha"),
  ):
    heights = [setting["speculative"][key] for setting in settings]
    axes.plot(x, heights, marker, ms=9, mfc="white", mec="black", mew=1.5, label=words)
  axes.axhline(1.0, color="black", lw=1, ls=":")
  axes.margins(y=0.4)
  axes.set_ylim(bottom=0)
  axes.legend(loc="upper right", fontsize=11, reverse=True)
  axes.set_title("Speed-up (dotted: as fast as plain)")
  axes.set_ylabel("plain time / speculative time")


def _draw_drafts(axes: Any, settings: Sequence[Mapping[str, Any]]) -> None:
  for index, setting in enumerate(settings):
    shares = 100 * np.asarray(setting["speculative"]["share_of_rounds_accepting"])
    label = f"{setting['source']}, T = {setting['temperature']:g}"
    style = {"color": _LINES[index % len(_LINES)], "label": label}
    axes.plot(np.arange(1, len(shares) + 1), shares, _STYLES[index % len(_STYLES)], **style)
  axes.set_xticks(np.arange(1, len(settings[0]["speculative"]["share_of_rounds_accepting"]) + 1))
  axes.set_ylim(bottom=0)
  axes.legend()
  axes.set_title("Drafts that were accepted")
  axes.set_xlabel("position in the round's draft")
  axes.set_ylabel("% of rounds that accept it")
