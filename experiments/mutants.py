"""Every planted fault against every check, and how many tokens of a toy and of a real model the audit needs to see it.

  python -m experiments.mutants --config=configs/mutants.py [--config.model=smollm2-135m]

Writes docs/mutants.md and mutants.png beside it, a map of the p-values, and results.json and the map into
experiments/results/mutants. The exact rules go through the same checks and must pass all of them. In a notebook:
`mutants.run(get_config())`.
"""

import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
import tqdm

from experiments import processes, report
from experiments.labs import NEEDS, Lab
from specjax import verify
from specjax.audit.engine import Engine
from specjax.audit.mutants import MUTANTS, Mutant
from specjax.audit.suite import CHECKS, LEVEL

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "mutants.md"
CONTROLS = {f"{name} rule": Engine(rule=rule) for name, rule in verify.RULES.items() if rule.lossless}


def run(config: ml_collections.ConfigDict, results: pathlib.Path = report.RESULTS, docs: pathlib.Path = DOCS):
  """Runs what is missing, prints the table, writes the files; returns what results.json holds as "summary".

  Raises ValueError for the name of a mutant that does not exist.
  """
  known = {mutant.name: mutant for mutant in MUTANTS}
  if unknown := set(config.mutants) - set(known):
    raise ValueError(f"config.mutants has {sorted(unknown)}; known: {', '.join(known)}.")
  chosen = [known[name] for name in config.mutants or known]
  kept = report.Run("mutants", config, results)
  engines = CONTROLS | {mutant.name: mutant.engine for mutant in chosen}
  with tqdm.tqdm(total=len(engines) * len(CHECKS), desc="Checking", unit="check", smoothing=0, disable=None) as bar:
    for index, (name, engine) in enumerate(engines.items()):
      bar.set_description(name)
      if index % 8 == 7:
        jax.clear_caches()  # some hundred programs a process are all that Linux has memory maps for
      for check, p_value in CHECKS.items():
        kept.item(f"{name}/{check}", lambda engine=engine, p_value=p_value: p_value(engine))
        bar.update()
  visible, tokens = [mutant for mutant in chosen if mutant.visible], {mutant.name: {} for mutant in chosen}
  labs = {"toy": Lab.of_toys} | ({"model": Lab.load} if config.model else {})
  for where, load in labs.items():
    lab_of = functools.cache(functools.partial(load, config))  # keeps the sound engine's text, too
    for index, mutant in enumerate(tqdm.tqdm(visible, desc=f"Auditing: {where}", disable=None)):
      if index % 8 == 7:
        jax.clear_caches()
      needed = lambda mutant=mutant, lab_of=lab_of: lab_of(NEEDS.get(mutant.name)).tokens_needed(mutant)  # noqa: E731
      tokens[mutant.name][where] = kept.item(f"{mutant.name}/{where}", needed)
  p_values = {name: {check: kept.items[f"{name}/{check}"] for check in CHECKS} for name in engines}
  summary = summarise(p_values, chosen, tokens)
  kept.finish(summary)
  save_figure(p_values, kept.folder / "mutants.png")
  _show(summary, p_values)
  if chosen == list(MUTANTS):
    write_docs(summary, p_values, config, docs)
    save_figure(p_values, docs.with_suffix(".png"))
  return summary


def summarise(
  p_values: Mapping[str, Mapping[str, float | None]], mutants: Sequence[Mutant], tokens: Mapping[str, Any]
) -> dict[str, Any]:
  """Who was caught by what, false alarms on the exact rules, and mutants that nothing or not their own check caught."""
  caught = {name: [check for check, p in row.items() if p is not None and p < LEVEL] for name, row in p_values.items()}
  return {
    "mutants": [
      {
        "name": mutant.name,
        "description": mutant.description,
        "visible": mutant.visible,
        "caught_by": caught[mutant.name],
        "tokens": tokens.get(mutant.name, {}) if mutant.visible else None,
      }
      for mutant in mutants
    ],
    "killed": sum(bool(caught[mutant.name]) for mutant in mutants),
    "survivors": [mutant.name for mutant in mutants if not caught[mutant.name]],
    "missed_by_their_check": [mutant.name for mutant in mutants if mutant.check not in caught[mutant.name]],
    "false_alarms": {name: caught[name] for name in CONTROLS if caught[name]},
    "tests_of_exact_rules": sum(p is not None for name in CONTROLS for p in p_values[name].values()),
  }


def _tokens(entry: Mapping[str, Any], where: str) -> str:
  """where: "toy" or "model"."""
  if entry["tokens"] is None:
    return "not visible"
  tokens = entry["tokens"].get(where)
  if tokens is None:
    return "not run"
  if tokens["unchanged"]:
    return f"same text, {tokens['tokens']:,}"
  return f"{tokens['needed']:,}" if tokens["needed"] else f"more than {tokens['tokens']:,}"


def _show(summary: Mapping[str, Any], p_values: Mapping[str, Mapping[str, float | None]]) -> None:
  report.print_table(
    f"{summary['killed']} of {len(summary['mutants'])} planted faults caught, at level {LEVEL:.0e}",
    ("", "caught by", "tokens the audit needs: toy", "model"),
    [
      [m["name"], ", ".join(m["caught_by"]) or "NOTHING", *(_tokens(m, where) for where in ("toy", "model"))]
      for m in summary["mutants"]
    ],
  )
  least = min(p for name in CONTROLS for p in p_values[name].values() if p is not None)
  print(f"{summary['tests_of_exact_rules']} checks of the exact rules: least p-value {least:.2g}.")
  if summary["false_alarms"]:
    print(f"FALSE ALARMS: {summary['false_alarms']}")


def write_docs(summary: Mapping[str, Any], p_values: Mapping[str, Mapping[str, float | None]], config, path) -> None:
  """The table of docs/mutants.md."""
  letters = [chr(ord("A") + i) for i in range(len(CHECKS))]
  described = {name: (check.__doc__ or "").split("\n")[0] for name, check in CHECKS.items()}
  model = f" --config.model={config.model}" if config.model else ""
  lines = [
    "# Planted faults",
    "",
    "Faulty samplers (`specjax.audit.mutants`), and which check (`specjax.audit.suite`) catches which. Made by",
    "",
    "```bash",
    f"python -m experiments.mutants --config=configs/mutants.py{model}",
    "```",
    "",
    f"{summary['killed']} of {len(summary['mutants'])} are caught by one check or more, at p < {LEVEL:.0e}.",
    f"Exact rules ({', '.join(verify.RULES)}): {summary['tests_of_exact_rules']} checks, "
    f"{sum(map(len, summary['false_alarms'].values()))} false alarms.",
    *_found_in_samples(summary),
    "",
    "![A map of the p-values](mutants.png)",
    "",
    "| | check | |",
    "|---|---|---|",
    *(f"| {letter} | {name} | {described[name]} |" for letter, name in zip(letters, CHECKS, strict=True)),
    "",
    "● caught, · not. The last columns say how many tokens the audit of samples needed, in batches that double: of a "
    f"tiny language, and of a real model ({config.model or 'not run'}). A fault that ordinary texts do not show soon "
    f"is planted where they do: {'; '.join(map(_in_words, dict.fromkeys(NEEDS.values())))}. *Same text*: the fault "
    "changed none of so many, from the same keys. *Not visible*: the law of the output is right, only speed or "
    "figures suffer.",
    "",
    "| fault | what it does | " + " | ".join(letters) + " | tokens: toy | model |",
    "|---|---|" + ":-:|" * len(letters) + "--:|--:|",
  ]  # fmt: skip
  for m in summary["mutants"]:
    marks = [_mark(p) for p in p_values[m["name"]].values()]
    described_fault = m["description"].replace("|", "\\|")
    lines.append(
      f"| {m['name']} | {described_fault} | {' | '.join(marks)} | {_tokens(m, 'toy')} | {_tokens(m, 'model')} |"
    )
  if processes.first():
    with report.replacing(path) as temporary:
      temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _found_in_samples(summary: Mapping[str, Any]) -> list[str]:
  """How many of the faults that samples could show the audit has found in them."""
  lines = []
  for where, name in (("toy", "a tiny language"), ("model", "a real model")):
    tokens = [m["tokens"][where] for m in summary["mutants"] if m["visible"] and where in m["tokens"]]
    found, same = (sum(bool(each[name]) for each in tokens) for name in ("needed", "unchanged"))
    if tokens:
      lines.append(
        f"Of {len(tokens)} that samples could show, the audit found {found} in those of {name}; {same} changed no text "
        f"there, {len(tokens) - found - same} take more tokens than it got."
      )
  return lines


def _in_words(needs: str) -> str:
  """Which faults are planted there."""
  return f"{needs} ({', '.join(fault for fault, of in NEEDS.items() if of == needs)})"


def _mark(p_value: float | None) -> str:
  return "" if p_value is None else "●" if p_value < LEVEL else "·"


def _depth(p_value: float | None) -> float:
  return math.nan if p_value is None else min(20.0, -math.log10(max(p_value, 1e-30)))


def save_figure(p_values: Mapping[str, Mapping[str, float | None]], path: pathlib.Path) -> None:
  """A map of -log10 p, cut at 20; samplers down, checks across."""
  report.plot_style()
  import matplotlib.pyplot as plt

  depth = np.array([[_depth(p) for p in row.values()] for row in p_values.values()])
  figure, axes = plt.subplots(figsize=(9, 1.5 + 0.22 * len(p_values)))
  image = axes.imshow(depth, cmap="Blues", vmin=0, vmax=20, aspect="auto")
  axes.set_xticks(range(len(CHECKS)), list(CHECKS), rotation=40, ha="left", fontsize=9)
  axes.xaxis.tick_top()
  axes.set_yticks(range(len(p_values)), list(p_values), fontsize=8)
  axes.axhline(len(CONTROLS) - 0.5, color="#d55e00", linewidth=1.5)  # exact rules above
  axes.set_xticks(np.arange(len(CHECKS) + 1) - 0.5, minor=True)
  axes.grid(which="minor", axis="x", color="white", linewidth=2)
  axes.tick_params(which="both", length=0)
  bar = figure.colorbar(image, ax=axes, shrink=0.3, label="-log10 p, 20 or more: certain")
  bar.ax.axhline(-math.log10(LEVEL), color="#d55e00", linewidth=1.5)
  report.save_figure(figure, path)


def main(config: ml_collections.ConfigDict) -> None:
  summary = run(config)
  if summary["survivors"] or summary["false_alarms"]:
    raise SystemExit("A planted fault survived, or an exact rule failed.")


if __name__ == "__main__":
  report.launch(main, "mutants")
