"""Speed of the sampler on this machine, as ratios to floors and peers measured in the same run.

`run(config)` times, in turns: the machine's read bandwidth, one-token and many-token passes over caches of several
sizes, generations in the loop, rounds against the passes they consist of, compilation; and counts traces. It says
nothing about the text that is generated: see `quickstart`.
"""

import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import app, logging
from jax import lax
from ml_collections import config_flags

import specjax
from experiments import report, speed_peers
from experiments.passes import PASSES, draft_passes, target_passes
from specjax import warp
from specjax.language_model import LanguageModel

MODEL_DRAFTS = 3  # draft tokens of the round with a model drafter: 3 draft passes, of 2, 1 and 1 tokens
SHORT, LONG = 16, 64  # new tokens of the two generations whose difference is timed

_CONFIG = config_flags.DEFINE_config_file("config", "configs/speed.py")


def run(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Measures everything; returns the summary and writes it with every raw figure."""
  results = report.Run("speed", config)
  target = specjax.load_model(config.model)
  weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))

  timings = results.item("passes", lambda: _passes(target, config))
  rounds = results.item("rounds", lambda: _rounds(target, config))
  laws = results.item("laws", lambda: _laws(target.vocab_size, config))
  traces = results.item("traces", lambda: _traces(target, config))
  peers = results.item("peers", lambda: speed_peers.run(target, config)) if config.peers else None

  summary = _summary(timings, rounds, traces, weight_bytes, config)
  summary["laws_ms"] = {name: 1e3 * timing["median"] for name, timing in laws.items()}
  if peers:
    summary["peers_ms_a_token"] = {
      name: 1e3 * timing["median"] / peers["tokens"] for name, timing in peers["timings"].items()
    }
    summary["peers_same_text"] = peers["same_text"]
  results.finish(summary)
  _show(summary, config)
  return summary


def _passes(target: LanguageModel, config) -> dict[str, Any]:
  """Timings of the machine's read bandwidth and of passes over caches of several sizes, all in turns."""
  functions = _readers()
  for slots in config.cache_slots:
    functions[f"decode/{slots}"] = target_passes(target, 1, slots, config.context)
    functions[f"verify/{slots}"] = target_passes(target, config.num_draft_tokens + 1, slots, config.context)
  longest = max(config.cache_slots)
  functions[f"decode/{longest} full"] = target_passes(target, 1, longest, longest - 2 * PASSES)
  return report.median_interleaved(functions, config.repeats)


READ_FLOATS = 2**27


def _readers() -> dict[str, Callable[[], Any]]:
  """Two ways to read 512 MiB once: numpy sums on every core, and one matrix-vector product. The faster one counts."""
  cores = os.cpu_count() or 1
  matrix = np.ones((READ_FLOATS // 2**10, 2**10), np.float32)
  parts, pool = np.array_split(matrix, cores), concurrent.futures.ThreadPoolExecutor(cores)
  on_device, vector = jnp.asarray(matrix), jnp.ones(2**10)
  product = jax.jit(lambda vector, matrix: lax.dot_general(vector[None], matrix, (((1,), (1,)), ((), ()))))
  return {
    "read/sum": lambda: list(pool.map(np.sum, parts)),
    "read/product": lambda: product(vector, on_device),
  }


def _rounds(target: LanguageModel, config) -> dict[str, Any]:
  """Timings of generations of SHORT and LONG tokens, whose difference is time in the loop, and of a round's parts.

  A round costs the same whatever it accepts. The model drafter is the target itself, so its draft passes are known.
  """
  gamma = config.num_draft_tokens
  prompt = np.tile(np.arange(10, 20), (1, 4)).astype(np.int32)
  middle = prompt.shape[1] + (SHORT + LONG) // 2
  drafters: dict[str, tuple[Any, int]] = {
    "plain": (None, 0),
    "ngram": (specjax.NGramDrafter(), gamma),
    "model": (specjax.ModelDrafter(target), MODEL_DRAFTS),
  }

  def generate(name: str, count: int):
    drafter, gamma = drafters[name]
    return specjax.sample(
      target, drafter, prompt, key=jax.random.key(0), max_new_tokens=count, num_draft_tokens=gamma,
      max_length=config.max_length, warp=specjax.Warp(temperature=1.0),
    )  # fmt: skip

  functions = _readers()
  count: dict[str, int] = {}
  for name in drafters:
    for length in (SHORT, LONG):
      functions[f"{name}/{length}"] = functools.partial(generate, name, length)
      count[f"{name}/{length}"] = int(generate(name, length).stats.rounds[0])
  for width in sorted({1, 2, MODEL_DRAFTS + 1, gamma + 1}):
    functions[f"pass/{width}"] = target_passes(target, width, config.max_length, middle)
  text = np.resize(prompt, (1, config.max_length))
  functions["propose"] = draft_passes(specjax.NGramDrafter(), target, text, middle, gamma)
  return {"timings": report.median_interleaved(functions, config.repeats), "rounds": count}


def _laws(vocab_size: int, config) -> dict[str, Any]:
  """Timings of the vocabulary-wide work of a round: gamma + 1 laws under each warp, and one draw."""
  rows = config.num_draft_tokens + 1
  logits = 3 * jax.random.normal(jax.random.key(0), (1, rows, vocab_size))
  settings = {
    "temperature": warp.Warp(),
    "top_p": warp.Warp(top_p=0.9),
    "top_k": warp.Warp(top_k=50),
    "greedy": warp.Warp(temperature=0.0),
  }
  law = jax.jit(warp.log_probs)
  functions = {name: functools.partial(law, logits, setting.per_row(1)) for name, setting in settings.items()}
  log_p = law(logits, warp.Warp().per_row(1))[0, 0]
  draw = jax.jit(warp.categorical)
  plain = jax.jit(functools.partial(jax.random.categorical, mode="high"))
  functions["draw"] = lambda: draw(jax.random.key(1), log_p)
  functions["jax.random.categorical"] = lambda: plain(jax.random.key(1), log_p)
  return report.median_interleaved(functions, max(config.repeats, 20))


def _traces(target: LanguageModel, config) -> dict[str, Any]:
  """Traces of the model for one prompt length and for 20, with several limits and warps; and seconds to compile."""
  gamma, traced = config.num_draft_tokens, []

  def counted(params, tokens, cache, start):
    traced.append(tokens.shape)
    return target.apply(params, tokens, cache, start)

  model, drafter, after = dataclasses.replace(target, apply=counted), specjax.NGramDrafter(), []
  for length in range(2, 42, 2):
    specjax.sample(
      model, drafter, np.ones((1, length), np.int32), key=jax.random.key(length), max_new_tokens=length % 5,
      num_draft_tokens=gamma, warp=specjax.Warp(temperature=length / 40, top_k=length, top_p=1 - length / 80),
    )  # fmt: skip
    after.append(len(traced))
  return {"first_call": after[0], "20_calls": after[-1], "compile_s": {g: _compile(target, g) for g in (0, gamma)}}


def _compile(target: LanguageModel, gamma: int) -> float:
  """Seconds from Python to a program of 256 slots that no cache holds."""
  call = functools.partial(
    specjax.sample, key=jax.random.key(0), max_new_tokens=1, num_draft_tokens=gamma, max_length=256
  )
  start = time.perf_counter()
  jax.clear_caches()
  jax.jit(call).lower(target, specjax.NGramDrafter() if gamma else None, np.ones((1, 1), np.int32)).compile()
  return time.perf_counter() - start


def _summary(passes, rounds, traces, weight_bytes: int, config) -> dict[str, Any]:
  """The figures that are claimed. A ratio is the median over turns of the ratio within a turn, since what a machine
  shared with others allows may change from turn to turn.
  """
  gamma, slots, counts = config.num_draft_tokens, config.cache_slots, rounds["rounds"]
  by_slots, cost = _by_turn(passes), _by_turn(rounds["timings"])

  def round_s(name: str) -> np.ndarray:
    long, short = f"{name}/{LONG}", f"{name}/{SHORT}"
    return (cost[long] - cost[short]) / (counts[long] - counts[short])

  def over_smallest(kind: str) -> dict[int, float]:
    return {n: _median(by_slots[f"{kind}/{n}"] / by_slots[f"{kind}/{slots[0]}"]) for n in slots}

  one_pass = {width: cost[f"pass/{width}"] / PASSES for width in (1, 2, MODEL_DRAFTS + 1, gamma + 1)}
  parts = {
    "plain": one_pass[1],
    "ngram": cost["propose"] / PASSES + one_pass[gamma + 1],
    "model": one_pass[2] + (MODEL_DRAFTS - 1) * one_pass[1] + one_pass[MODEL_DRAFTS + 1],
  }
  read = np.minimum(cost["read/sum"], cost["read/product"]) / (4 * READ_FLOATS)  # seconds a byte, of the faster reader
  return {
    "weight_bytes": weight_bytes,
    "read_gb_s": 1e-9 / _median(read),
    "floor_ms": 1e3 * weight_bytes * _median(read),
    "plain_ms_a_token": 1e3 * _median(round_s("plain")),
    "plain_share_of_floor": _median(weight_bytes * read / round_s("plain")),
    "pass_ms": {width: 1e3 * _median(seconds) for width, seconds in one_pass.items()},
    "v": _median(one_pass[gamma + 1] / one_pass[1]),
    "round_ms": {name: 1e3 * _median(round_s(name)) for name in parts},
    "round_over_its_passes": {name: _median(round_s(name) / parts[name]) for name in parts},
    "decode_ms_by_slots": {n: 1e3 * _median(by_slots[f"decode/{n}"]) / PASSES for n in slots},
    "verify_ms_by_slots": {n: 1e3 * _median(by_slots[f"verify/{n}"]) / PASSES for n in slots},
    "decode_over_smallest_cache": over_smallest("decode"),
    "verify_over_smallest_cache": over_smallest("verify"),
    "decode_ms_full_cache": 1e3 * _median(by_slots[f"decode/{max(slots)} full"]) / PASSES,
    "traces": {name: traces[name] for name in ("first_call", "20_calls")},
    "compile_s": traces["compile_s"],
  }


def _by_turn(timings) -> dict[str, np.ndarray]:
  return {name: np.asarray(timing["seconds"]) for name, timing in timings.items()}


def _median(values: np.ndarray) -> float:
  return float(np.median(values))


def _show(summary: dict[str, Any], config) -> None:
  gamma, slots = config.num_draft_tokens, config.cache_slots
  per_slots = [f"{summary['decode_over_smallest_cache'][n]:.2f}" for n in slots[1:]]
  verify_slots = [f"{summary['verify_over_smallest_cache'][n]:.2f}" for n in slots[1:]]
  label = " / ".join(f"{n // 1024}k" for n in slots[1:])
  rows = [
    ("read bandwidth", f"{summary['read_gb_s']:.1f} GB/s", ""),
    ("floor: read the weights once", f"{summary['floor_ms']:.1f} ms", ""),
    ("plain decoding in the loop, a token", f"{summary['plain_ms_a_token']:.1f} ms", ">= 70 % of the floor's speed"),
    ("  share of the floor's speed", f"{100 * summary['plain_share_of_floor']:.0f} %", ""),
    (f"verify pass of {gamma + 1} / decode pass", f"{summary['v']:.2f}", "<= 1.5"),
    *((f"round / its passes, {k}", f"{v:.3f}", "<= 1.05") for k, v in summary["round_over_its_passes"].items()),
    (f"decode pass, {label} slots / {slots[0] // 1024}k", " / ".join(per_slots), "<= 1.10"),
    (f"verify pass, {label} slots / {slots[0] // 1024}k", " / ".join(verify_slots), "<= 1.10"),
    (f"decode pass, {max(slots) // 1024}k slots, all in use", f"{summary['decode_ms_full_cache']:.1f} ms", ""),
    ("traces of the model, 20 lengths / one", "{20_calls} / {first_call}".format(**summary["traces"]), "equal"),
    *((f"compile, gamma = {g}", f"{seconds:.1f} s", "< 15 s") for g, seconds in summary["compile_s"].items()),
    *((f"{gamma + 1} laws or one draw: {name}", f"{ms:.2f} ms", "") for name, ms in summary["laws_ms"].items()),
    *((f"peer: {name}", f"{ms:.1f} ms a token", "") for name, ms in summary.get("peers_ms_a_token", {}).items()),
  ]
  report.print_table(f"Speed of {config.model}", ("", "measured", "wanted"), rows)


def main(_) -> None:
  logging.set_verbosity(logging.WARNING)  # jax reports every backend that is not there
  run(_CONFIG.value)


if __name__ == "__main__":
  app.run(main)
