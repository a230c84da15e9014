"""The audit of our own sampler: does every lossless rule sample its model's law?

  python -m experiments.own_rules --config=configs/own_rules.py
  python -m experiments.own_rules --config=configs/own_rules.py:toy
  ./launch/multiprocess.sh --processes=2 --devices=4 own_rules --config=configs/own_rules.py:toy --config.mesh="(2, 4)"

The model is a real one, drafted for by n-grams, or two random layers, drafted for by themselves at another temperature.

Each rule samples the same prompts with keys of its own, and the audit looks at all of it, with the model whole. Results
go to experiments/results/own_rules/results.json. A run that was interrupted goes on where it was.

In a notebook: `results = own_rules.run(get_config())`.
"""

import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
import numpy as np
import tqdm
from jax.sharding import Mesh

import specjax
from experiments import processes, report
from experiments.labs import scaled
from experiments.numerics_matrix import TOY, toy
from specjax import sharding, verify
from specjax.audit import Samples, audit
from specjax.draft import Drafter
from specjax.language_model import LanguageModel
from specjax.tasks.prompts import prompts, right_padded


def run(config: ml_collections.ConfigDict, results: pathlib.Path = report.RESULTS) -> dict[str, Any]:
  """Samples until each rule has `config.tokens`, audits, prints a table; returns what results.json has as "summary".

  Raises ValueError for a rule that is not one of the lossless ones, and for a mesh that does not take all devices or
  can't share the rows.
  """
  lossless = [name for name, rule in verify.RULES.items() if rule.lossless]
  rules = list(config.rules or lossless)
  if unknown := sorted(set(rules) - set(lossless)):
    raise ValueError(f"config.rules has {unknown}; lossless rules: {', '.join(lossless)}.")
  mesh = _mesh(config)
  kept = report.Run("own_rules", config, results)
  target, drafter, texts, eos_ids = _load(config)
  tokens, lengths = right_padded(texts, config.max_prompt_tokens)
  sampled, drafts = target, drafter
  if mesh is not None:
    sampled, drafts = sharding.shard(target, mesh), sharding.shard(drafter, mesh)

  def sample(rule: str, index: int) -> dict[str, Any]:
    start = time.perf_counter()
    result = specjax.sample(
      sampled,
      drafts,
      tokens,
      key=jax.random.fold_in(jax.random.key(config.seed), list(verify.RULES).index(rule) + 1000 * index),
      prompt_lengths=lengths,
      max_new_tokens=config.new_tokens,
      num_draft_tokens=config.gamma,
      verifier=rule,
      eos_id=eos_ids,
    )
    result = jax.tree.map(processes.whole, result)
    made = [row[a:b] for row, a, b in zip(result.tokens, lengths, result.lengths, strict=True)]
    counts = {name: int(getattr(result.stats, name).sum()) for name in ("drafted", "accepted", "rounds", "generated")}
    return {"tokens": made, "seconds": time.perf_counter() - start, **counts}

  def judge(made: list[Mapping[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    generations = [row for one in made for row in one["tokens"]]
    found = audit(
      target,
      Samples(
        texts * len(made),
        generations,
        rows=np.tile(np.arange(len(texts)), len(made)),
        max_new_tokens=np.full(len(generations), config.new_tokens),
      ),
      eos_id=eos_ids,
      noise="float32",
      alpha=config.alpha,
    )
    return found.to_dict() | {"seconds": time.perf_counter() - start}

  summary = {}
  with tqdm.tqdm(total=len(rules) * config.tokens, desc="Sampling", unit=" tokens", disable=None) as bar:
    for rule in rules:
      made: list[Mapping[str, Any]] = []
      while sum(one["generated"] for one in made) < config.tokens:
        bar.set_description(f"Sampling: {rule}")
        index = len(made)
        made.append(kept.item(f"{rule}/{index}", lambda rule=rule, index=index: sample(rule, index)))
        bar.update(made[-1]["generated"])
      bar.set_description(f"Auditing: {rule}")
      found = kept.item(f"{rule}/audit", lambda made=made: judge(made))
      pooled = {name: sum(one[name] for one in made) for name in ("drafted", "accepted", "rounds", "generated")}
      summary[rule] = pooled | {
        "ok": found["ok"],
        "verdict": found["verdict"],
        "tests": {test["name"]: {"z": test["z"], "p": test["p_value"]} for test in found["tests"]},
        "seconds": {"sampling": sum(one["seconds"] for one in made), "audit": found["seconds"]},
      }
  kept.finish(summary)
  _show(summary)
  return summary


def _mesh(config: ml_collections.ConfigDict) -> Mesh | None:
  """All devices; None for the default one."""
  if not config.mesh:
    return None
  given, count = f"config.mesh={tuple(config.mesh)}", jax.device_count()
  if len(config.mesh) != 2 or not all(type(size) is int and size >= 1 for size in config.mesh):
    raise ValueError(f"{given} must be two whole numbers, 1 or more: devices for rows, and for parameters.")
  data, model = config.mesh
  if data * model != count:
    raise ValueError(f"{given} takes {data * model} devices, and jax has {count}: it must take all of them.")
  if config.rows % data:
    raise ValueError(f"config.rows={config.rows} can't be shared evenly by the {data} devices for rows of {given}.")
  return sharding.mesh(data=data, model=model)


def _load(config: ml_collections.ConfigDict) -> tuple[LanguageModel, Drafter, list[list[int]], tuple[int, ...]]:
  """The model, a drafter, a prompt a row, and the tokens that end one."""
  if config.model == TOY:
    target, random = toy(), np.random.default_rng(config.seed)
    lengths = random.integers(1, config.max_prompt_tokens + 1, config.rows)
    texts = [random.integers(0, target.vocab_size, length).tolist() for length in lengths]
    return target, specjax.ModelDrafter(scaled(target, 0.6)), texts, (0,)
  tokenizer = specjax.load_tokenizer(config.model)
  texts = [tokenizer.encode(p.text)[-config.max_prompt_tokens :] for p in prompts("mixed", config.rows, config.seed)]
  return specjax.load_model(config.model), specjax.NGramDrafter(), texts, tuple(tokenizer.eos_ids)


def _show(summary: Mapping[str, Any]) -> None:
  names = sorted({name for own in summary.values() for name in own["tests"]})
  report.print_table(
    "Our own sampler, audited: z of each score",
    ("rule", "tokens", "accepted", *names, "audit", "s sampling", "s audit"),
    [
      (
        rule,
        f"{own['generated']:,}",
        f"{own['accepted'] / max(1, own['drafted']):.2f}",
        *(f"{own['tests'][name]['z']:+.1f}" if name in own["tests"] else "" for name in names),
        {True: "no sign of a fault", False: "FAULT", None: "can't say"}[own["ok"]],
        f"{own['seconds']['sampling']:.0f}",
        f"{own['seconds']['audit']:.0f}",
      )
      for rule, own in summary.items()
    ],
  )
  for rule, own in summary.items():
    print(f"\n{rule}: {own['verdict']}")


if __name__ == "__main__":
  report.launch(run, "own_rules")
