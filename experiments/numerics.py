"""The numerics lab: what do different computation graphs do to the logits of the same tokens?

  python -m experiments.numerics --config=configs/numerics.py

Results go to experiments/results/numerics: results.json, matrix-toy.png and matrix-MODEL.png. A run that was
interrupted goes on where it was. What the figures say: docs/numerics.md.
"""

import pathlib
from typing import Any

import ml_collections

from experiments import numerics_matrix, report


def run(config: ml_collections.ConfigDict, results: pathlib.Path = report.RESULTS) -> dict[str, Any]:
  """Runs every part, prints its tables and writes results/numerics. Returns what results.json holds."""
  kept = report.Run("numerics", config, results)
  summary = {"matrix": numerics_matrix.run(config, kept)}
  kept.finish(summary)
  print(f"Written to {kept.folder}: results.json and the figures.")
  return {"environment": kept.environment, "config": kept.config, "summary": summary, "items": kept.items}


if __name__ == "__main__":
  report.launch(run, "numerics")
