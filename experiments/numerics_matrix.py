"""The graph matrix: one model's logits through many computation graphs, each against float64 and against all others.

A part of experiments/numerics.py. Where jax runs on a CPU, graphs on several devices are measured in a process of their
own (experiments/numerics_devices.py), whose CPU plays that many.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
import tqdm
from flax import nnx

import specjax
from experiments import processes, report
from specjax.files import plain
from specjax.language_model import LanguageModel
from specjax.models.config import DecoderConfig
from specjax.models.transformer import Decoder, as_language_model
from specjax.numerics import REFERENCE, Comparison, Graph, Measurement
from specjax.numerics.comparison import Reference
from specjax.tasks.prompts import prompts

TOY = "toy"


def graphs(thorough: bool) -> list[Graph]:
  """The axes one by one around plain decoding, and around a verify pass of five where that may tell more.

  thorough: for a toy; a real model compiles for seconds a graph, and does without the points in between.
  """
  decode, verify, whole = Graph(), Graph(width=5), Graph(width=None)
  but = dataclasses.replace
  chosen = [
    *(Graph(width=width) for width in ((1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64) if thorough else (1, 2, 4, 5, 8, 9, 16))),
    whole,
    but(verify, padding=3),
    but(whole, padding=32),
    *(but(decode, batch=batch, row=row) for batch, row in ((2, 1), (8, 0), (8, 7), (16, 15))),
    but(verify, batch=2, row=1),
    but(decode, slots=4096),
    but(decode, scan_layers=True),
    but(decode, cpu_kernels=False),
    but(verify, cpu_kernels=False),
    but(whole, cpu_kernels=False),
    but(whole, jit=False),
    but(decode, precision="bfloat16"),
    but(verify, precision="BF16_BF16_F32"),
    but(verify, precision="BF16_BF16_BF16"),
    but(verify, precision="F16_F16_F16"),
    but(decode, weights="bfloat16"),
    *(but(graph, activations=name) for name in ("bfloat16", "float16") for graph in (decode, verify)),
  ]
  if thorough:
    chosen += [
      but(decode, batch=16, row=0),
      but(decode, slots=512),
      but(decode, scan_layers=True, cpu_kernels=False),
      but(decode, cpu_kernels=False, slots=4096),
      but(verify, jit=False),
      but(decode, precision="float32"),
      but(decode, precision="BF16_BF16_F32"),
      but(verify, weights="bfloat16"),
      but(whole, activations="bfloat16"),
      but(whole, activations="float16"),
      but(decode, weights="bfloat16", activations="float16"),
    ]
  return chosen


def mesh_graphs(thorough: bool) -> list[Graph]:
  """Decoding and verifying with tensors, rows, or both split over devices, in the form of an accelerator."""
  decode = Graph(scan_layers=True, cpu_kernels=False)
  but = dataclasses.replace
  return [
    but(decode, mesh=(1, 1)),
    *(but(decode, mesh=(1, count)) for count in (2, 4, 8)),
    *(but(decode, batch=8, row=7, mesh=(count, 1)) for count in ((1, 2, 4, 8) if thorough else (1, 8))),
    but(decode, batch=8, row=7, mesh=(2, 4)),
    *([but(decode, width=5, mesh=(1, 4))] if thorough else []),
  ]


def _graphs(name: str) -> tuple[list[Graph], list[Graph]]:
  """Those that are measured in this process, and those that need more devices than a CPU has."""
  here, there = graphs(name == TOY), mesh_graphs(name == TOY)
  return (here, there) if jax.default_backend() == "cpu" else (here + there, [])


def toy() -> LanguageModel:
  """Two random layers, with sizes that eight devices divide."""
  config = DecoderConfig(
    architecture="toy", vocab_size=256, context_length=4096, num_layers=2, d_model=64, num_heads=8, num_kv_heads=8,
    head_dim=8, d_ff=160,
  )  # fmt: skip
  model = as_language_model(Decoder(config, rngs=nnx.Rngs(0)))
  # Random embeddings of the usual size give logits of 0.1; a trained model's spread over several.
  embed = {"weight": 20 * model.params["embed"]["weight"]}
  return dataclasses.replace(model, params=model.params | {"embed": embed})


def load(name: str) -> LanguageModel:
  return toy() if name == TOY else specjax.load_model(name)


def contexts(name: str, config: ml_collections.ConfigDict) -> list[np.ndarray]:
  own = config.matrix
  if name == TOY:
    return list(np.random.default_rng(config.seed).integers(0, 256, (own.toy_contexts, own.toy_tokens), np.int32))
  tokenizer = specjax.load_tokenizer(name)
  encoded = [tokenizer.encode(prompt.text) for prompt in prompts("mixed", 4 * own.contexts, config.seed)]
  return [np.array(ids[: own.tokens], np.int32) for ids in encoded if len(ids) >= own.tokens][: own.contexts]


def run(config: ml_collections.ConfigDict, kept: report.Run) -> dict[str, Any]:
  """Measures the toy and the model graph by graph, prints and draws both; returns their summaries."""
  names = tuple(dict.fromkeys((TOY, config.model)))
  summary = {}
  with tqdm.tqdm(
    total=sum(len(part) for name in names for part in _graphs(name)), desc="Graphs", unit="graph", disable=None
  ) as bar:
    for name in names:
      found = _compare(name, config, kept, bar)
      with tqdm.tqdm.external_write_mode():
        summary[name] = _show(name, found, kept)
  return summary


def _compare(name: str, config: ml_collections.ConfigDict, kept: report.Run, bar: tqdm.tqdm) -> Comparison:
  model, fed = load(name), contexts(name, config)
  here, there = _graphs(name)
  key = f"matrix {name}: {{}}".format
  bar.set_description(f"Graphs of {name}")
  with Reference(model, fed, REFERENCE, config.matrix.top_p) as against:
    for graph in here:
      kept.item(key(graph), lambda graph=graph: against.measure(graph))
      bar.update()
    missing = [graph for graph in there if key(graph) not in kept.items]
    bar.update(len(there) - len(missing))
    for graph, found in _elsewhere(name, fed, missing, config.matrix) if missing else ():
      kept.item(key(graph), lambda found=found: found)
      bar.update()
    items = {str(graph): kept.items[key(graph)] for graph in here + there}
    return against.comparison({g: i if isinstance(i, str) else Measurement.of_plain(i) for g, i in items.items()})


def _elsewhere(
  name: str, fed: Sequence[np.ndarray], missing: Sequence[Graph], own: ml_collections.ConfigDict
) -> Iterator[tuple[Graph, Any]]:
  """Measures graphs in a process whose CPU plays `own.devices` devices; yields each as soon as it is there."""
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={own.devices}".strip()
  request = plain({"model": name, "contexts": list(fed), "graphs": list(missing), "top_p": own.top_p})
  child = subprocess.Popen(
    [sys.executable, "-m", "experiments.numerics_devices"],
    env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert child.stdin is not None
  assert child.stdout is not None
  try:
    child.stdin.write(json.dumps(request))
    child.stdin.close()
    for graph in missing:
      line = child.stdout.readline()
      if not line:
        raise RuntimeError(f"the process with {own.devices} devices ended at the graph {graph}; see its message above.")
      yield graph, json.loads(line)
  finally:
    child.kill()
    child.wait()


def _show(name: str, found: Comparison, kept: report.Run) -> dict[str, Any]:
  path = kept.folder / f"matrix-{name}.png"
  if processes.first():
    found.plot(path, f"{name}, {found.backend}")
  summary, same = found.summary(), found.identical()

  def interval(values: Sequence[float], style: str) -> str:
    if np.isnan(values[1]):
      return style.format(values[0])
    return "{} [{}, {}]".format(*(style.format(value) for value in values))

  report.print_table(
    f"{name}: each graph against {found.reference.graph}, {sum(found.lengths)} positions (95 % intervals)",
    ("graph", "max error", "RMS error", "KL", "TV", "argmax flips", "can flip", "top-p changes"),
    [
      (
        graph,
        f"{own.max_error:.1e}",
        interval(own.rms_error, "{:.1e}"),
        interval(own.kl, "{:.0e}"),
        interval(own.tv, "{:.0e}"),
        interval(own.flips, "{:.1%}"),
        f"{own.at_risk.estimate:.1%}",
        f"{own.support.estimate:.1%}",
      )
      for graph, own in summary.items()
    ],
  )
  print("The same bits at every position:")
  for group in same:
    print(f"  {' = '.join(group.graphs)}")
    for reason in dict.fromkeys(reason for _, _, reason in group.reasons):
      pairs = ", ".join(f"{a} as {b}" for a, b, own in group.reasons if own == reason)
      print(f"    {pairs}: {reason}")
  for graph, reason in found.not_run.items():
    print(f"Not run: {graph}: {reason}.")
  return {"graphs": summary, "identical": [group._asdict() for group in same], "not_run": found.not_run}
