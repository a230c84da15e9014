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
from specjax import checks
from specjax.audit import Report, Samples, audit
from specjax.audit.core import check_settings
from specjax.language_model import LanguageModel
from specjax.tasks.prompts import prompts, right_padded


def run(config: ml_collections.ConfigDict, results: pathlib.Path = reports.RESULTS) -> Report:
  """Audits, prints the report, and writes its files into results/audit.

  Raises:
    ValueError: a value of the config or a sample that is not allowed; the message says which.
    FileNotFoundError, specjax.fetch.FetchError: no such file or model, or a download that failed.
  """
  warp = specjax.Warp(float(config.temperature), int(config.top_k), float(config.top_p), float(config.min_p))
  _check(config, warp)
  tokenizer = specjax.load_tokenizer(config.model)
  eos = tokenizer.eos_ids if config.eos is None else config.eos
  # Read before the weights are: a bad line is said at once.
  samples = Samples.read(config.samples, tokenizer) if config.samples else None
  if config.rule and (samples is None or samples.labels is None):
    raise ValueError(f"config.rule={config.rule!r} needs config.samples with labels.")
  target = specjax.load_model(config.model)
  found = audit(
    target,
    _demonstration(target, tokenizer, warp, eos, config) if samples is None else samples,
    warp=warp,
    draft=specjax.load_model(config.draft) if config.draft else None,
    rule=config.rule or None,
    eos_id=eos,
    noise=config.noise,
    alpha=config.alpha,
    power=config.power,
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


def _check(config: ml_collections.ConfigDict, warp: specjax.Warp) -> None:
  """What can be said before anything is loaded."""
  if config.samples and not pathlib.Path(config.samples).is_file():
    raise FileNotFoundError(f"config.samples={config.samples!r} is no file.")
  checks.warp_settings(warp, 1)
  check_settings(config.rule or None, config.noise, config.alpha, config.power, config.seed)
  if config.rule and not config.draft:
    raise ValueError(f"config.rule={config.rule!r} needs config.draft, the engine's draft model.")
  if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in config.eos or ()):
    raise ValueError(f"config.eos={config.eos!r} must hold token ids, as (2,) does, or none: ().")
  for name in () if config.samples else ("demo_prompts", "demo_tokens"):
    if config[name] < 1:
      raise ValueError(f"config.{name}={config[name]} must be at least 1.")


def _demonstration(target: LanguageModel, tokenizer, warp: specjax.Warp, eos, config) -> Samples:
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
    eos_id=eos,
  )
  return Samples.from_result(result, lengths)


if __name__ == "__main__":
  reports.launch(run, "audit")
