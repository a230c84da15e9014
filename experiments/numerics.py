"""The numerics lab: what do different computation graphs do to the same tokens, and to the text that is written?

  python -m experiments.numerics --config=configs/numerics.py

Results go to experiments/results/numerics: results.json, matrix-toy.png, matrix-MODEL.png and text-MODEL.png. A run
that was interrupted goes on where it was. What the figures say: docs/numerics.md.
"""

import pathlib
from typing import Any

import ml_collections

from experiments import numerics_fixed, numerics_matrix, numerics_text, report

PARTS = {"matrix": numerics_matrix.run, "text": numerics_text.run, "fixed": numerics_fixed.run}


def run(config: ml_collections.ConfigDict, results: pathlib.Path = report.RESULTS) -> dict[str, Any]:
  """Runs the parts that config.parts names, prints their tables and writes results/numerics.

  Returns what results.json holds. Raises ValueError for a part that there is not.
  """
  if unknown := set(config.parts) - set(PARTS):
    raise ValueError(f"config.parts has {sorted(unknown)}; allowed: {', '.join(PARTS)}.")
  kept = report.Run("numerics", config, results)
  summary = {name: PARTS[name](config, kept) for name in config.parts}
  kept.finish(summary)
  print(f"Written to {kept.folder}: results.json and the figures.")
  return {"environment": kept.environment, "config": kept.config, "summary": summary, "items": kept.items}


if __name__ == "__main__":
  report.launch(run, "numerics")
