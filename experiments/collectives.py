"""What the devices of a mesh exchange in a round, and what that grows with: the vocabulary, the number of drafts?

  python -m experiments.collectives --config=configs/collectives.py

Compiles the whole of `specjax.sample` for CPU devices that are made up, and counts in the programs' text. Nothing is
run, and nothing is timed. Prints a table; writes results.json and collectives.png into results/collectives.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import tqdm
from jax.sharding import Mesh

import specjax
from experiments import report
from specjax import sharding, verify
from specjax.models.config import DecoderConfig
from specjax.models.ops import Options
from specjax.models.transformer import abstract_decoder
from specjax.plan import aot
from specjax.plan.hlo import Item

HOST = ("infeed", "outfeed", "send", "recv")
PROMPT_TOKENS, NEW_TOKENS, SLOTS = 16, 64, 128
SETTINGS = ("vocab_size", "gamma", "rule", "split_draft")


def run(config: ml_collections.ConfigDict, results: pathlib.Path = report.RESULTS) -> dict[str, Any]:
  """Compiles what is missing, prints the table, writes the files; returns name -> figures, as `measure` has them.

  Raises ValueError for a setting that can't be, and where jax has fewer devices than the mesh takes.
  """
  _check(config)
  if (needed := config.data * config.model) > jax.device_count():
    raise ValueError(
      f"config.data={config.data} times config.model={config.model} takes {needed} devices, jax has "
      f"{jax.device_count()}: set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax starts."
    )
  mesh = sharding.mesh(data=config.data, model=config.model, devices=jax.devices()[:needed])
  kept = report.Run("collectives", config, results)
  shared = {name: config[name] for name in ("rows", "layers", "d_model")}
  found = {}
  for name, settings in tqdm.tqdm(programs(config).items(), desc="Compiling", unit=" programs", disable=None):
    found[name] = kept.item(name, lambda settings=settings: measure(mesh, **shared, **settings)) | settings
  kept.finish(found)
  _show(config, found)
  save_figure(config, found, kept.folder / "collectives.png")
  return found


def _check(config: ml_collections.ConfigDict) -> None:
  for name in ("data", "model", "rows", "layers", "d_model", "vocab_size", "gamma"):
    if config[name] < 1:
      raise ValueError(f"config.{name}={config[name]} must be 1 or more.")
  for name in ("vocab_sizes", "gammas"):  # a figure each
    if not config[name] or not all(type(value) is int and value >= 1 for value in config[name]):
      raise ValueError(f"config.{name}={config[name]} must be one whole number or several, each 1 or more.")
  if (gamma := max(config.gamma, *config.gammas)) > (most := SLOTS - PROMPT_TOKENS - NEW_TOKENS - 1):
    raise ValueError(f"config.gamma and config.gammas may be {most} at most, given was {gamma}.")
  if config.rows % config.data:
    raise ValueError(f"config.rows={config.rows} can't be shared evenly by config.data={config.data} devices.")
  if unknown := sorted(set(config.rules) - verify.RULES.keys()):
    raise ValueError(f"config.rules has {unknown}; rules: {', '.join(verify.RULES)}.")


def programs(config: ml_collections.ConfigDict) -> dict[str, dict[str, Any]]:
  """Name -> settings of `measure`; the first is the usual one."""
  usual = {"vocab_size": config.vocab_size, "gamma": config.gamma, "rule": "token", "split_draft": False}
  return (
    {"usual": usual}
    | {f"{size:,} tokens": usual | {"vocab_size": size} for size in config.vocab_sizes}
    | {f"gamma {gamma}": usual | {"gamma": gamma} for gamma in config.gammas}
    | {f"{rule} rule": usual | {"rule": rule} for rule in config.rules}
    | ({"draft split as the target is": usual | {"split_draft": True}} if config.split_draft else {})
  )


def measure(
  mesh: Mesh, *, vocab_size: int, gamma: int, rule: str, split_draft: bool, rows: int, layers: int, d_model: int
) -> dict[str, Any]:
  """One program's exchanges in a round, on each device. Bytes are those of results.

  Returns "parts": name -> {count, bytes} of draft, target, rest and filters (the last run only where some row uses
  top-k or top-p); "activations": bytes of what is as wide as the model; "longest": numbers in the longest last axis of
  anything else; "host": instructions of the loop over rounds that speak to the host.
  """

  def model(depth: int) -> Any:
    config = DecoderConfig(
      architecture="toy", vocab_size=vocab_size, context_length=512, num_layers=depth, d_model=d_model, num_heads=4,
      num_kv_heads=4, head_dim=16, d_ff=3 * d_model, tied_head=False,
    )  # fmt: skip
    return abstract_decoder(config, options=Options(scan_layers=True, cpu_kernels=False), dtype=jnp.float32)

  rules = sharding.RULES if split_draft else sharding.DRAFT_RULES
  program = aot.compile_sample(
    sharding.shard(model(layers), mesh),
    sharding.shard(specjax.ModelDrafter(model(1)), mesh, rules),
    prompt_tokens=PROMPT_TOKENS,
    max_new_tokens=NEW_TOKENS,
    num_draft_tokens=gamma,
    max_length=SLOTS,
    batch=rows,
    verifier=rule,
  )
  exchanges = [item for item in program.in_round if item.collective and not item.optional]
  others = [item for item in exchanges if not _wide(item, d_model)]
  parts = {"draft": program.draft, "target": program.target, "filters": program.filters}
  figures = {name: {"count": part.count, "bytes": part.payload} for name, part in parts.items()}
  figures["rest"] = {
    key: value - figures["draft"][key] - figures["target"][key]
    for key, value in {"count": program.round.count, "bytes": program.round.payload}.items()
  }
  return {
    "parts": figures,
    "count": program.round.count,
    "bytes": program.round.payload,
    "kinds": program.round.collectives,
    "activations": sum(item.payload * item.runs(1) for item in exchanges if _wide(item, d_model)),
    "longest": max(shape.dims[-1] if shape.dims else 1 for item in others for shape in item.instruction.outputs),
    "host": [item.instruction.name for item in program.in_round if _of_host(item)],
  }


def _wide(item: Item, d_model: int) -> bool:
  return all(shape.dims[-1:] == (d_model,) for shape in item.instruction.outputs)


def _of_host(item: Item) -> bool:
  """Whether it is a transfer from or to the host, or a call back into Python."""
  return item.instruction.opcode.startswith(HOST) or "callback" in item.instruction.attributes


def _show(config: ml_collections.ConfigDict, found: Mapping[str, Mapping[str, Any]]) -> None:
  report.print_table(
    f"A round on {config.data}x{config.model} devices, {config.rows} rows, {config.layers} layers of {config.d_model}, "
    f"{config.vocab_size:,} tokens, gamma {config.gamma}, token rule, unless the first column says otherwise: "
    "collectives, and bytes on each device",
    ("program", "collectives", "bytes", "of activations", "of laws", "draft", "filters, where used", "host calls"),
    [
      [
        name,
        f"{each['count']}",
        f"{each['bytes']:,}",
        f"{each['activations']:,}",
        f"{each['bytes'] - each['activations']:,}",
        *(f"{each['parts'][part]['count']}: {each['parts'][part]['bytes']:,}" for part in ("draft", "filters")),
        f"{len(each['host'])}",
      ]
      for name, each in found.items()
    ],
  )


def save_figure(config: ml_collections.ConfigDict, found: Mapping[str, Mapping[str, Any]], path: pathlib.Path) -> None:
  """Bytes a round by the vocabulary, beside those of a gathered law; collectives and bytes by the drafts."""
  report.plot_style()
  import matplotlib.pyplot as plt

  usual = next(iter(found.values()))

  def along(field: str) -> list[Mapping[str, Any]]:
    same = [each for each in found.values() if all(each[k] == usual[k] for k in SETTINGS if k != field)]
    return sorted(same, key=lambda each: each[field])

  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
  by_size = along("vocab_size")
  sizes = [each["vocab_size"] for each in by_size]
  rows = config.rows // config.data
  gathered = [rows * (each["gamma"] + 1) * each["vocab_size"] * 4 for each in by_size]
  left.plot(sizes, gathered, "o--", color="#999999")
  left.annotate("the laws, were they gathered", (sizes[1], gathered[1]), (4, -18), textcoords="offset points")
  left.plot(sizes, [each["bytes"] for each in by_size], "o-", color="#0072b2")
  left.annotate(
    "all that is exchanged", (sizes[1], by_size[1]["bytes"]), (0, 9), textcoords="offset points", ha="center"
  )
  left.plot(sizes, [each["bytes"] - each["activations"] for each in by_size], "o-", color="#d55e00")
  left.annotate(
    "without activations", (sizes[1], by_size[1]["bytes"] - by_size[1]["activations"]), (0, -18),
    textcoords="offset points", ha="center",
  )  # fmt: skip
  left.set(xscale="log", yscale="log", xlabel="tokens in the vocabulary", ylabel="bytes a round, on each device")
  left.set_xticks(sizes, [f"{size:,}" for size in sizes])
  left.minorticks_off()
  left.set_title(f"By vocabulary, {usual['gamma']} drafts")

  by_gamma = along("gamma")
  places = range(len(by_gamma))
  bars = right.bar(places, [each["count"] for each in by_gamma], width=0.5, color="#0072b2")
  right.bar_label(bars, [f"{each['count']}\n{each['bytes'] / 1000:.0f} kB" for each in by_gamma], padding=3)
  right.set(xlabel="drafts a round", ylabel="collectives a round", ylim=(0, 1.35 * max(e["count"] for e in by_gamma)))
  right.set_xticks(places, [str(each["gamma"]) for each in by_gamma])
  right.set_title(f"By drafts, {usual['vocab_size']:,} tokens")
  report.save_figure(figure, path)


if __name__ == "__main__":
  # Read when the backend starts, at the first question for devices. Later flags win, so the caller's stay.
  os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
  jax.config.update("jax_platforms", "cpu")
  report.launch(run, "collectives")
