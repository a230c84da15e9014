"""Measures graphs on several devices, in a process of its own: XLA counts a CPU's devices once, when jax starts.

Started by experiments/numerics_matrix.py with XLA_FLAGS set. Reads one JSON object {model, contexts, graphs, top_p}
from stdin, and writes a line of JSON a graph to stdout: a `Measurement`, or the reason why it was not run.
"""

import json
import sys

import numpy as np

from experiments.numerics_matrix import load
from specjax.files import plain
from specjax.numerics import REFERENCE, Graph
from specjax.numerics.comparison import Reference


def main() -> None:
  request = json.load(sys.stdin)
  model = load(request["model"])
  contexts = [np.array(tokens, np.int32) for tokens in request["contexts"]]
  with Reference(model, contexts, REFERENCE, request["top_p"]) as against:
    for values in request["graphs"]:
      print(json.dumps(plain(against.measure(Graph.of_plain(values)))), flush=True)


if __name__ == "__main__":
  main()
