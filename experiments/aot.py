"""Pairs of models compiled for TPUs that are not there: do they fit, what do they exchange, how fast could they be?

  python -m experiments.aot --config=configs/aot.py:chinchilla

Compiles the whole of `specjax.sample`, plainly and speculatively, without weights, and reads the programs. Prints
tables and writes results/aot-PAIR/results.json. Nothing is run on a TPU, so nothing is measured: see docs/aot.md.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
import tqdm
from jax.sharding import AxisType, Mesh

import specjax
from experiments import report
from specjax import sharding
from specjax.models.config import DecoderConfig
from specjax.models.ops import Options
from specjax.models.transformer import abstract_decoder
from specjax.plan import aot
from specjax.plan.aot import Program
from specjax.plan.hlo import Item

PROGRAMS = ("plain", "speculative")


def run(config: ml_collections.ConfigDict, results: pathlib.Path = report.RESULTS) -> dict[str, Any]:
  """Compiles both programs of the pair, prints the tables, writes results/aot-PAIR. Returns what results.json holds.

  Raises:
    ValueError: a config that is not allowed, a topology that is not known.
    ImportError: libtpu is not installed.
  """
  devices = aot.devices(config.topology)
  mesh = _mesh(config, devices)
  kept = report.Run(f"aot-{config.pair}", config, results)
  for name in tqdm.tqdm(PROGRAMS, desc=f"Compiling for {config.topology}", unit=" programs", disable=None):
    kept.item(name, lambda name=name: _figures(config, mesh, config.gamma if name == "speculative" else 0))
  items = {name: kept.items[name] for name in PROGRAMS}
  _print(config, items)
  kept.finish({})
  return {"environment": kept.environment, "config": kept.config, "items": items}


def _mesh(config: ml_collections.ConfigDict, devices: Sequence[Any]) -> Mesh:
  sizes = tuple(config.mesh.values())
  if np.prod(sizes) != len(devices):
    raise ValueError(
      f"config.mesh={dict(config.mesh)} does not make up the {len(devices)} devices of {config.topology}."
    )
  return Mesh(np.array(devices).reshape(sizes), tuple(config.mesh), axis_types=(AxisType.Auto,) * len(sizes))


def _figures(config: ml_collections.ConfigDict, mesh: Mesh, gamma: int) -> dict[str, Any]:
  """What one program is and does; plain values. Of one that does not fit: how much it needs."""
  options = Options.for_backend("tpu")

  def model(name: str) -> Any:
    return abstract_decoder(DecoderConfig(**config[name].to_dict()), options=options)

  target = sharding.shard(model("target"), mesh, config.target_rules.to_dict())
  drafter = sharding.shard(specjax.ModelDrafter(model("draft")), mesh, config.draft_rules.to_dict())
  names = ("prompt_tokens", "max_new_tokens", "max_length", "batch")
  try:
    program = aot.compile_sample(target, drafter, num_draft_tokens=gamma, **{name: config[name] for name in names})
  except aot.DoesNotFit as error:
    return {"refused": {"used": error.used, "available": error.available}}
  chip = aot.chip(config.topology)
  parts = {"round": program.round, "target": program.target, "draft": program.draft, "filters": program.filters}
  return {
    "memory": program.memory,
    "available": chip.hbm,
    "parts": {name: {**vars(part), "floor": part.floor(chip)} for name, part in parts.items()},
    "loops": _loops(program),
    "large": [_line(item) for item in program.large(config.large)],
    "gathers": [_line(item) for item in program.gathers(config.target["vocab_size"])],
  }


def _loops(program: Program) -> list[dict[str, Any]]:
  """The loops of the program, nested as they are: how often each turns, and its own collectives in one turn."""
  found: dict[tuple, list[Item]] = {}
  for item in program.module.items:
    if item.loops:
      found.setdefault((item.loops, item.optional), []).append(item)
  return [
    {
      "loop": " > ".join(_name(loop.trips) for loop in loops),
      "scope": loops[-1].scope,
      "optional": optional,
      **vars(aot.cost(items, len(loops))),
    }
    for (loops, optional), items in found.items()
  ]


def _name(trips: int | None) -> str:
  return "while" if trips is None else f"{trips} x"


def _line(item: Item) -> dict[str, Any]:
  shapes = [f"{shape.dtype}{list(shape.dims)}" for shape in item.instruction.outputs]
  return {
    "what": f"{item.instruction.opcode} {', '.join(shapes)}",
    "bytes": item.made,
    "runs": f"{item.runs(1)} a round" if item.loops else "once a call",
    "in": item.scope,
  }


def _print(config: ml_collections.ConfigDict, items: dict[str, Any]) -> None:
  title = f"{config.pair}, {config.topology}, batch {config.batch}, {config.max_length} slots"
  if refused := {name: item["refused"] for name, item in items.items() if "refused" in item}:
    rows = [[name, _gib(each["used"]), _gib(each["available"])] for name, each in refused.items()]
    report.print_table(f"{title}: does not fit, GiB on each device", ["program", "needed", "available"], rows)
    return
  columns = ["sampling", "parameters", "padding", "caches", "temporaries", "program", "total", "available", "free"]
  rows = []
  for name, item in items.items():
    sizes, available = item["memory"], item["available"]
    rows.append([name, *map(_gib, [*sizes.values(), available, available - sizes["total"]])])
  report.print_table(f"{title}: memory, GiB on each device", columns, rows)

  parts = {"decode: a plain round": items["plain"]["parts"]["round"]}
  speculative = items["speculative"]["parts"]
  parts[f"draft: {config.gamma} tokens"] = speculative["draft"]
  parts[f"verify: a pass over {config.gamma + 1}"] = speculative["target"]
  parts["a round"] = speculative["round"]
  parts["filters, where used"] = speculative["filters"]
  columns = ["part", "HBM MB", "GFLOP", "collectives", "KB sent", "floor ms", "Mcycles"]
  rows = [
    [name, f"{part['hbm'] / 1e6:.1f}", f"{part['flops'] / 1e9:.2f}", f"{_count(part)}", f"{part['sent'] / 1e3:.0f}",
     f"{part['floor'] * 1e3:.2f}", f"{part['cycles'] / 1e6:.2f}"]
    for name, part in parts.items()
  ]  # fmt: skip
  report.print_table(f"{title}: on each device", columns, rows)

  rows = [
    [loop["loop"] + (" (if used)" if loop["optional"] else ""), _scope(loop["scope"]), _kinds(loop["collectives"])]
    for loop in items["speculative"]["loops"]
    if loop["collectives"]
  ]
  report.print_table(f"{title}: collectives in one turn of each loop", ["loop", "in", "collectives"], rows)

  if config.published:
    single = {"decode": items["plain"]["parts"]["round"], "draft": _a_draft(speculative["draft"], config.gamma)}
    rows = []
    for name, milliseconds in config.published.items():
      floor, count = single[name]["floor"] * 1e3, _count(single[name])
      left = f"{(milliseconds - floor) * 1e3 / count:.0f}" if count else ""
      rows.append([name, f"{floor:.2f}", f"{milliseconds}", f"{floor / milliseconds:.0%}", f"{count}", left])
    columns = ["pass", "floor ms", "published ms", "floor / published", "collectives", "us left for each"]
    report.print_table(f"{title}: beside the published times", columns, rows)
  for name, words in {"large": "made anew", "gathers": "gathers of a vocabulary or more in a round"}.items():
    found = [(program, line) for program in PROGRAMS for line in items[program][name]]
    rows = [[p, line["what"], f"{line['bytes'] / 1e6:.1f}", line["runs"], line["in"]] for p, line in found]
    report.print_table(f"{title}: {words}", ["program", "what", "MB", "runs", "in"], rows or [["none", "", "", "", ""]])


def _a_draft(part: dict[str, Any], gamma: int) -> dict[str, Any]:
  """A gamma-th of what the drafts of a round take."""
  return {"floor": part["floor"] / gamma, "collectives": {"all": [_count(part) / gamma, 0]}}


def _count(part: dict[str, Any]) -> int:
  return round(sum(count for count, _ in part["collectives"].values()))


def _kinds(collectives: dict[str, Any]) -> str:
  return ", ".join(f"{count} {kind}, {size:,} B" for kind, (count, size) in collectives.items())


def _scope(scope: str) -> str:
  """The named scope of a loop within the program: prompt, draft, target, verify, commit."""
  names = [part for part in scope.split("/") if part in ("prompt", "draft", "target", "verify", "commit")]
  return names[-1] if names else "round"


def _gib(size: float) -> str:
  return f"{size / 2**30:.2f}"


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")  # with libtpu installed jax would look for a TPU first
  report.launch(run, "aot")
