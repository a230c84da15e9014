"""Who was right: can speculative decoding write worse text? Four engines, one law, and the audit's verdicts.

  python -m experiments.who_was_right --config=configs/who_was_right.py

The engines are speculative samplers of one model: a correct one; one whose batch keeps one cache position for all its
rows; one that computes in bfloat16; one whose acceptance is lenient. All write other text than plain decoding does
under the same keys, so that a difference in text says nothing; the audit tells them apart from tokens alone. Results go
to experiments/results/who_was_right: results.json and who_was_right.png. A run that was interrupted goes on where it
was.

In a notebook: `results = who_was_right.run(get_config())`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

import specjax
from experiments import report
from specjax.audit import Samples, audit
from specjax.audit.mutants import MUTANTS
from specjax.checks import slots
from specjax.language_model import LanguageModel
from specjax.tasks.prompts import prompts, right_padded

PLAIN = "plain"
ENGINES = {
  "correct": "speculative, token verification",
  "batching fault": "all rows of a batch advance by the most accepted drafts",
  "bfloat16": "the correct sampler, computed in bfloat16",
  "lenient rule": "accepts drafts that it should reject",
}
_COLOURS = {"correct": "#009e73", "batching fault": "#d55e00", "bfloat16": "#0072b2", "lenient rule": "#cc79a7"}
_MARKS = dict(zip(ENGINES, "osD^", strict=True))


def run(config: ml_collections.ConfigDict, results: pathlib.Path = report.RESULTS) -> dict[str, Any]:
  """Samples, audits, prints a table, and writes results/who_was_right. Returns what results.json holds."""
  kept = report.Run("who_was_right", config, results)
  tokenizer = specjax.load_tokenizer(config.model)
  target = specjax.load_model(config.model)
  batch = Batch.of([tokenizer.encode(p.text) for p in prompts("mixed", config.prompts, config.seed)], config)
  with tqdm.tqdm(total=2 * len(ENGINES) + 1, desc="Sampling", unit="step", disable=None) as bar:
    for name in (PLAIN, *ENGINES):
      bar.set_description(f"Sampling: {name}")
      kept.item(name, lambda name=name: _generate(_engine(name, target, config), batch, tokenizer.eos_ids, config))
      bar.update()
    for name in ENGINES:
      bar.set_description(f"Auditing: {name}")
      kept.item(
        f"audit of {name}", lambda name=name: _audit(target, tokenizer.eos_ids, kept.items[name], batch, config)
      )
      bar.update()
  summary = {name: _summarise(kept.items, name, tokenizer) for name in ENGINES}
  kept.finish(summary)
  figure = kept.folder / "who_was_right.png"
  save_figure(kept.items, summary, config, figure)
  _show(summary)
  print(f"Written: {figure} and results.json beside it.")
  return {"environment": kept.environment, "config": kept.config, "summary": summary, "items": kept.items}


@dataclasses.dataclass(frozen=True)
class Batch:
  """The prompts, padded on the right: tokens int32[B, P], lengths int32[B]."""

  tokens: np.ndarray
  lengths: np.ndarray

  @classmethod
  def of(cls, texts: Sequence[Sequence[int]], config: ml_collections.ConfigDict) -> "Batch":
    cut = [list(text)[-config.max_prompt_tokens :] for text in texts]
    return cls(*right_padded(cut, config.max_prompt_tokens))


Engine = Callable[..., specjax.SampleResult]


def _engine(name: str, target: LanguageModel, config: ml_collections.ConfigDict) -> Engine:
  speculative = functools.partial(specjax.sample, num_draft_tokens=config.gamma)
  drafter = specjax.NGramDrafter()
  if name == PLAIN:
    return functools.partial(specjax.sample, target, None, num_draft_tokens=0)
  if name == "correct":
    return functools.partial(speculative, target, drafter)
  if name == "batching fault":
    (fault,) = (mutant for mutant in MUTANTS if mutant.name == "rows advance by the most accepted")
    return functools.partial(fault.engine, target, drafter, num_draft_tokens=config.gamma)
  if name == "bfloat16":
    return functools.partial(speculative, specjax.load_model(config.model, dtype=jnp.bfloat16), drafter)
  return functools.partial(speculative, target, drafter, verifier=specjax.verify.lenient(config.leniency))


def _generate(
  engine: Engine, batch: Batch, eos_ids: Sequence[int], config: ml_collections.ConfigDict
) -> dict[str, Any]:
  """All batches of one engine; every engine gets the same keys."""
  outputs = []
  for index in range(config.batches):
    result = engine(
      batch.tokens,
      prompt_lengths=batch.lengths,
      key=jax.random.fold_in(jax.random.key(config.seed), index),
      max_new_tokens=config.max_new_tokens,
      max_length=slots(batch.tokens.shape[1], batch.tokens.shape[1] + config.max_new_tokens, config.gamma),
      eos_id=tuple(eos_ids) or None,
    )
    outputs.append(jax.device_get(result))
  rows = [
    row[start:end].tolist()
    for out in outputs
    for row, start, end in zip(out.tokens, batch.lengths, out.lengths, strict=True)
  ]
  pooled = {name: int(sum(np.sum(getattr(out.stats, name)) for out in outputs)) for name in ("rounds", "generated")}
  return {"tokens": rows, **pooled}


def _audit(
  target: LanguageModel, eos_ids: Sequence[int], generated: Mapping[str, Any], batch: Batch, config
) -> dict[str, Any]:
  count = len(batch.lengths)
  starts = [row[:length] for row, length in zip(batch.tokens, batch.lengths, strict=True)]
  samples = Samples(
    prompts=starts * config.batches, tokens=generated["tokens"], rows=np.tile(np.arange(count), config.batches)
  )
  found = audit(target, samples, eos_id=eos_ids or None, alpha=config.alpha)
  return found.to_dict()


def _summarise(items: Mapping[str, Any], name: str, tokenizer) -> dict[str, Any]:
  own, found = items[name], items[f"audit of {name}"]
  pairs = list(zip(own["tokens"], items[PLAIN]["tokens"], strict=True))
  surprise = next(test for test in found["tests"] if test["name"] == "surprise")
  return {
    "engine": ENGINES[name],
    "tokens": own["generated"],
    "tokens_a_pass": own["generated"] / own["rounds"],
    "same_text_as_plain": sum(a == b for a, b in pairs) / len(pairs),
    "surprise_excess": surprise["excess"],
    "surprise_z": surprise["z"],
    "repeated": _repeated(own["tokens"]),
    "fault": found["ok"] is False,
    "verdict": found["verdict"],
    "example": tokenizer.decode(own["tokens"][1]),
  }


def _repeated(rows: Sequence[Sequence[int]], n: int = 3) -> float:
  """Share of n-grams that occurred before in their own generation: the commonest form of poor text."""
  grams = [[tuple(row[i : i + n]) for i in range(len(row) - n + 1)] for row in rows]
  count = sum(map(len, grams))
  return (count - sum(len(set(row)) for row in grams)) / max(1, count)


def _show(summary: Mapping[str, Any]) -> None:
  report.print_table(
    "Who was right?",
    (
      "engine",
      "same text as plain",
      "tokens a pass",
      "repeated 3-grams",
      "surprise, nats above the law's",
      "z",
      "audit",
    ),
    [
      (
        name,
        f"{own['same_text_as_plain']:.0%}",
        f"{own['tokens_a_pass']:.2f}",
        f"{own['repeated']:.0%}",
        f"{own['surprise_excess']:+.3f}",
        f"{own['surprise_z']:+.1f}",
        "fault" if own["fault"] else "no sign of a fault",
      )
      for name, own in summary.items()
    ],
  )
  for name, own in summary.items():
    print(f"\n{name} ({own['engine']})\n{own['verdict']}")


def save_figure(items: Mapping[str, Any], summary: Mapping[str, Any], config, path: pathlib.Path) -> None:
  """Left, the evidence against each engine as tokens come in; right, how far each score is from the law's."""
  report.plot_style()
  import matplotlib.pyplot as plt

  figure, (left, right) = plt.subplots(1, 2, figsize=(15, 6))
  figure.suptitle(f"{config.model}: all four write other text than plain decoding. Which of them sample its law?")
  for name in summary:
    evidence = items[f"audit of {name}"]["evidence"]
    left.plot(evidence["tokens"], evidence["path"], color=_COLOURS[name], lw=2, label=f"{name}: {ENGINES[name]}")
  left.axhline(-np.log10(config.alpha), color="black", ls=":", lw=1)
  left.text(0, -np.log10(config.alpha), f" a fault, wrong once in {1 / config.alpha:,.0f}", va="bottom", fontsize=11)
  left.set_yscale("symlog", linthresh=3)
  left.set_title("Evidence against the engine")
  left.set_xlabel("tokens seen")
  left.set_ylabel("log10 of the bets' capital")
  left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=11)
  scores = [test["name"] for test in items[f"audit of {next(iter(summary))}"]["tests"]]
  for index, name in enumerate(summary):
    tests = {test["name"]: test["z"] for test in items[f"audit of {name}"]["tests"]}
    x = np.arange(len(scores)) + 0.15 * (index - 1.5)
    heights = [tests.get(score, np.nan) for score in scores]
    right.plot(x, heights, _MARKS[name], color=_COLOURS[name], ms=9, label=name)
  right.axhspan(-4, 4, color="0.92", zorder=0, label="what chance does")
  right.set_yscale("symlog", linthresh=5)
  right.set_xticks(range(len(scores)), scores)
  right.set_title("How far its tokens are from the law")
  right.set_ylabel("standard deviations from the law's mean")
  right.legend(fontsize=10)
  for axes in (left, right):
    axes.yaxis.set_major_formatter("{x:g}")
  report.save_figure(figure, path)


if __name__ == "__main__":
  report.launch(run, "who_was_right")
