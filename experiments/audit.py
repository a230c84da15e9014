"""Audits a file of samples: were these tokens drawn from the model's law, and if not, where do they leave it?

  python -m experiments.audit --config=configs/audit.py --config.samples=engine.jsonl [--config.temperature=0.7 ...]

The file has a generation a line, {"prompt_tokens": [...], "tokens": [...]}, from any engine; docs/audit.md says what
else a line may hold. Results go to experiments/results/audit: results.json and audit.png. Without a file it samples a
little text with specjax itself and audits that.

In a notebook: `report = audit.run(get_config())`.
"""

import pathlib

import jax
import ml_collections

import specjax
from experiments import processes
from experiments import report as reports
from specjax.audit import Report, Samples, audit
from specjax.language_model import LanguageModel
from specjax.tasks.prompts import prompts, right_padded


def run(config: ml_collections.ConfigDict, results: pathlib.Path = reports.RESULTS) -> Report:
  """Audits, prints the report, and writes its files into results/audit.

  Raises:
    ValueError: a value of the config or a sample that is not allowed; the message says which.
    FileNotFoundError, specjax.fetch.FetchError: no such file or model, or a download that failed.
  """
  if config.samples and not pathlib.Path(config.samples).is_file():
    raise FileNotFoundError(f"config.samples={config.samples!r} is no file.")
  tokenizer = specjax.load_tokenizer(config.model)
  warp = specjax.Warp(float(config.temperature), int(config.top_k), float(config.top_p), float(config.min_p))
  # Read before the weights are: a bad line is said at once.
  samples = Samples.read(config.samples, tokenizer) if config.samples else None
  target = specjax.load_model(config.model)
  found = audit(
    target,
    _demonstration(target, tokenizer, warp, config) if samples is None else samples,
    warp=warp,
    draft=specjax.load_model(config.draft) if config.draft else None,
    rule=config.rule or None,
    eos_id=tokenizer.eos_ids,
    noise=config.noise,
    alpha=config.alpha,
    seed=config.seed,
  )
  folder = results / "audit"
  reports.write_json(
    folder / "results.json", {"environment": reports.environment(), "config": config, "report": found.to_dict()}
  )
  if processes.first():
    found.plot(folder / "audit.png")
  print(found)
  print(f"Written: {folder / 'audit.png'} and results.json beside it.")
  return found


def _demonstration(target: LanguageModel, tokenizer, warp: specjax.Warp, config: ml_collections.ConfigDict) -> Samples:
  """Speculative samples of our own, one batch."""
  texts = [tokenizer.encode(prompt.text)[-96:] for prompt in prompts("mixed", config.demo_prompts, config.seed)]
  padded, lengths = right_padded(texts)
  result = specjax.sample(
    target,
    specjax.NGramDrafter(),
    padded,
    key=jax.random.key(config.seed),
    prompt_lengths=lengths,
    max_new_tokens=config.demo_tokens,
    num_draft_tokens=3,
    warp=warp,
    eos_id=tokenizer.eos_ids,
  )
  return Samples.from_result(result, lengths)


if __name__ == "__main__":
  reports.launch(run, "audit")
