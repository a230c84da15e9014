"""Samples a real language model plainly and speculatively, side by side: how fast, why, and is the text the same?

  python -m experiments.quickstart --config=configs/quickstart.py [--config.gamma=4 ...]

Both samplers are `specjax.sample` at batch 1 on the same prompts, taking turns, so that what else the machine does hits
both alike. The time of a draft pass and of the target's passes is measured between them, and the closed forms of
`specjax.plan.theory` predict from it what the speed-up should have been. Results go to experiments/results/quickstart:
results.json and quickstart.png. A run that was interrupted goes on where it was.

In a notebook: `results = quickstart.run(get_config())`.

`--config.parts=8` splits the target over 8 devices, those of several processes if a launch script has started them.

This measures time at batch 1. It scores no answers, and is no proof that the law is unchanged.
"""

import dataclasses
import functools
import math
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm
from jax import Array

import specjax
from experiments import processes, quickstart_show, report
from experiments.passes import PASSES, draft_passes, target_passes
from experiments.quickstart_show import SAMPLERS
from specjax.checks import PREFILL_CHUNK, slots
from specjax.draft.base import Drafter
from specjax.language_model import LanguageModel, prefill
from specjax.language_model import run as run_model
from specjax.models.load import resolve
from specjax.models.tokenizer import Tokenizer
from specjax.plan import theory
from specjax.tasks.prompts import SOURCES, prompts, right_padded


def run(config: ml_collections.ConfigDict, results: pathlib.Path = report.RESULTS) -> dict[str, Any]:
  """Runs the whole experiment, prints its tables, writes its files into results/quickstart.

  Returns what results.json holds: "environment", "config", "summary" (see `summarise`), and "items", every figure of
  every prompt.

  Raises:
    ValueError: a value of the config that is not allowed, before anything is loaded.
    FileNotFoundError, specjax.fetch.FetchError: no such model, or a download that failed.
  """
  check(config)
  texts = {f"{s}/{p.name}": p.text for s in config.sources for p in prompts(s, config.prompts_per_source, config.seed)}
  kept = report.Run("quickstart", config, results)
  steps = len(texts) * len(config.temperatures) * len(SAMPLERS)
  with tqdm.tqdm(total=steps, desc="Loading", unit="text", smoothing=0, disable=None) as bar:
    bench = Bench.load(config)
    encoded = {name: bench.tokenizer.encode(text) for name, text in texts.items()}
    if not kept.items.keys() >= texts.keys():
      bar.set_description("Compiling, a minute or so")
      bench.measure(max(encoded.values(), key=len), 0)
      bar.unpause()
    for index, (name, ids) in enumerate(encoded.items()):
      bar.set_description(name)
      kept.item(name, lambda ids=ids, index=index: bench.measure(ids, index))
      bar.update(steps // len(texts))
  items = {name: kept.items[name] for name in texts}
  summary = summarise(items, config)
  kept.finish(summary)
  output = {"environment": kept.environment, "config": kept.config, "summary": summary, "items": items}
  figure = kept.folder / "quickstart.png"
  quickstart_show.save_figure(output, figure)
  quickstart_show.print_results(output)
  print(f"Written: {figure} and results.json beside it.")
  return output


def check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for a value that is not allowed, saying what is."""

  def require(allowed: bool, name: str, words: str) -> None:
    if not allowed:
      raise ValueError(f"config.{name}={config[name]!r}: it must be {words}.")

  for name in ("prompts_per_source", "max_prompt_tokens", "max_new_tokens", "gamma", "parts"):
    require(isinstance(config[name], int) and config[name] >= 1, name, "a whole number, 1 or more")
  require(isinstance(config.seed, int) and 0 <= config.seed < 2**32, "seed", "a whole number from 0 to 2^32 - 1")
  devices = jax.device_count()
  allowed = {1, devices} if processes.several() else range(1, devices + 1)
  require(config.parts in allowed, "parts", f"one of {sorted(allowed)}, for {devices} devices")
  for name in ("sources", "temperatures"):
    values = config[name]
    require(isinstance(values, list | tuple) and len(values) > 0, name, "a tuple of one value or more, like ('a',)")
    require(len(set(values)) == len(values), name, "a tuple without repetitions")
  require(set(config.sources) <= set(SOURCES), "sources", f"a tuple of some of {SOURCES}")
  require(all(0 <= t < math.inf for t in config.temperatures), "temperatures", "a tuple of numbers, 0 (argmax) or more")
  is_drafter = re.fullmatch("ngram|model:.+", config.drafter) is not None
  require(is_drafter, "drafter", "'ngram', or 'model:' and the name or path of a model")


@dataclasses.dataclass(frozen=True)
class Bench:
  """Models and settings; what it measures comes back as plain values for JSON."""

  config: ml_collections.ConfigDict
  target: LanguageModel
  drafter: Drafter
  tokenizer: Tokenizer

  @classmethod
  def load(cls, config: ml_collections.ConfigDict) -> "Bench":
    draft = config.drafter.removeprefix("model:")
    for name in {config.model} | ({draft} - {"ngram"}):
      resolve(name)  # a name that is wrong is said before a model is loaded
    mesh = rules = None
    if config.parts > 1:
      mesh = specjax.sharding.mesh(model=config.parts, devices=jax.devices()[: config.parts])
      rules = specjax.sharding.DRAFT_RULES
    load_draft = lambda: specjax.ModelDrafter(specjax.load_model(draft, mesh=mesh, rules=rules))  # noqa: E731
    return cls(
      config=config,
      target=specjax.load_model(config.model, mesh=mesh),
      drafter=specjax.NGramDrafter() if draft == "ngram" else load_draft(),
      tokenizer=specjax.load_tokenizer(config.model),
    )

  @property
  def max_length(self) -> int:
    """Of every buffer, whatever the prompt: one program a sampler."""
    width = self.config.max_prompt_tokens
    return slots(width, width + self.config.max_new_tokens, self.config.gamma)

  def measure(self, ids: Sequence[int], index: int) -> dict[str, Any]:
    """Every figure of prompt number `index`; the samplers swap places from prompt to prompt."""
    gammas = dict(zip(SAMPLERS, (0, self.config.gamma), strict=True))
    order = SAMPLERS[:: -1 if index % 2 == 0 else 1]  # speculative first: a drafter that doesn't fit is refused at once
    prompt = list(ids)[-self.config.max_prompt_tokens :]
    draw = functools.partial(self._sample, prompt, index)
    runs: dict[str, Any] = {}
    generated: dict[tuple[float, str], list[int]] = {}
    for temperature in self.config.temperatures:
      for name in order:
        result, seconds = _timed(lambda n=name, t=temperature: draw(gammas[n], t, self.config.max_new_tokens))
        generated[temperature, name] = np.asarray(result.tokens[0, len(prompt) : result.lengths[0]]).tolist()
        runs.setdefault(str(float(temperature)), {})[name] = {
          "seconds": seconds,
          **{field: value[0] for field, value in vars(jax.device_get(result.stats)).items()},
          "text": self.tokenizer.decode(generated[temperature, name]),
        }
    # With nothing to generate the same program reads the prompt and stops.
    reading = {name: _timed(lambda n=name: draw(gammas[n], 1.0, 0))[1] for name in order}
    item: dict[str, Any] = {
      "prompt_tokens": len(prompt),
      "prompt_tokens_cut": len(ids) - len(prompt),
      "prompt_seconds": reading,
      "pass_seconds": self._time_passes(prompt),
      "runs": runs,
    }
    if 0 in self.config.temperatures:
      item["greedy_difference"] = self._difference(prompt, *(generated[0, name] for name in SAMPLERS))
    return item

  def _sample(self, prompt: list[int], index: int, gamma: int, temperature: float, max_new_tokens: int):
    padded, lengths = right_padded([prompt], self.config.max_prompt_tokens)
    return specjax.sample(
      self.target,
      self.drafter if gamma else None,
      padded,
      key=jax.random.fold_in(jax.random.key(self.config.seed), index),
      prompt_lengths=lengths,
      max_new_tokens=max_new_tokens,
      num_draft_tokens=gamma,
      warp=specjax.Warp(temperature=float(temperature)),
      eos_id=self.tokenizer.eos_ids,
      max_length=self.max_length,
    )

  def _time_passes(self, prompt: list[int]) -> dict[str, float]:
    """Seconds of a one-token target pass, of one over gamma + 1 tokens, and of drafting gamma tokens, in turn."""
    length, gamma = len(prompt), self.config.gamma
    text = np.resize(np.asarray(prompt, np.int32), (1, self.max_length))
    calls = {
      "decode": target_passes(self.target, 1, self.max_length, length - 1),
      "verify": target_passes(self.target, gamma + 1, self.max_length, length - 1),
      "draft": draft_passes(self.drafter, self.target, text, length, gamma),
    }
    return {name: _timed(call)[1] / PASSES for name, call in calls.items()}

  def _difference(self, prompt: list[int], plain: list[int], speculative: list[int]) -> dict[str, Any] | None:
    """Where two greedy texts part, and by how little the target preferred its first choice there; None if nowhere."""
    if plain == speculative:
      return None
    pairs = enumerate(zip(plain, speculative, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(speculative)))
    prefix = np.zeros((1, self.max_length), np.int32)
    prefix[0, : len(prompt) + at] = prompt + plain[:at]
    logits = processes.whole(_next_logits(self.target, prefix, np.asarray([len(prompt) + at], np.int32)))
    second, first = np.partition(logits, -2)[-2:]
    return {
      "position": at,
      "top2_margin": first - second,
      "plain": self.tokenizer.decode(plain[at : at + 1]),
      "speculative": self.tokenizer.decode(speculative[at : at + 1]),
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
  start = time.perf_counter()
  result = jax.block_until_ready(call())
  return result, time.perf_counter() - start


@jax.jit
def _next_logits(target: LanguageModel, tokens: Array, length: Array) -> Array:
  """Logits[V] behind tokens[1, :length[1]], the last of them fed alone, as plain decoding does."""
  cache = prefill(target, target.init_cache(target.params, *tokens.shape), tokens, length - 1, PREFILL_CHUNK)
  last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
  return run_model(target, last, cache, length - 1)[0][0, 0]


def summarise(items: Mapping[str, Any], config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Pooled figures: counts and seconds are added up over prompts before anything is divided.

  items: "source/name" -> what `Bench.measure` returned.

  Returns "costs", the medians over prompts of what was measured in turn: "decode_ms", one target pass over one token;
  "v", the pass over gamma + 1 tokens in units of it; "c", a draft in units of it. And "settings", one for each source
  and temperature, with `ms_per_token` without the time that reading the prompt took, and two predictions:

    predicted_from_block_efficiency  measured tokens a round / (gamma c + v).
    predicted_from_alpha             theorem 3.8 with the pooled alpha for the share of rounds that drafted; a round
                                     that found nothing to draft yields one token at the same cost.
  """
  passes = [item["pass_seconds"] for item in items.values()]
  costs = {
    "decode_ms": 1e3 * statistics.median(p["decode"] for p in passes),
    "v": statistics.median(p["verify"] / p["decode"] for p in passes),
    "c": statistics.median(p["draft"] / p["decode"] for p in passes) / config.gamma,
  }
  settings = []
  for source in config.sources:
    own = [item for name, item in items.items() if name.startswith(f"{source}/")]
    for temperature in config.temperatures:
      runs = {name: [item["runs"][str(float(temperature))][name] for item in own] for name in SAMPLERS}
      plain, speculative = (_pool(runs[name], sum(item["prompt_seconds"][name] for item in own)) for name in SAMPLERS)
      settings.append(
        {
          "source": source,
          "temperature": temperature,
          "prompts": len(own),
          "plain": plain,
          "speculative": speculative | _drafts(runs["speculative"], costs, config.gamma),
          "speedup": plain["ms_per_token"] / speculative["ms_per_token"],
          "speedup_with_prompt": plain["ms_per_token_with_prompt"] / speculative["ms_per_token_with_prompt"],
          "same_greedy_text": None if temperature else sum(item["greedy_difference"] is None for item in own),
        }
      )
  return {"costs": costs, "settings": settings}


def _pool(runs: Sequence[Mapping[str, Any]], prompt_seconds: float) -> dict[str, Any]:
  tokens, rounds, seconds = (sum(run[field] for run in runs) for field in ("generated", "rounds", "seconds"))
  return {
    "tokens": tokens,
    "target_passes": rounds,
    "block_efficiency": tokens / rounds,
    "ms_per_token": 1e3 * (seconds - prompt_seconds) / tokens,
    "ms_per_token_with_prompt": 1e3 * seconds / tokens,
    "prompt_ms": 1e3 * prompt_seconds / len(runs),
  }


def _drafts(runs: Sequence[Mapping[str, Any]], costs: Mapping[str, float], gamma: int) -> dict[str, Any]:
  """What the drafts were worth, and the speed-up that follows from it. Rates of nothing are None."""
  rounds, drafted, accepted, overlap = (
    sum(run[field] for run in runs) for field in ("rounds", "drafted", "accepted", "overlap")
  )
  tested, accepted_at = (np.sum([run[field] for run in runs], axis=0) for field in ("tested", "accepted_at"))
  alpha = min(overlap / tested.sum(), 1.0) if drafted else None  # a float32 sum may pass 1 by a rounding
  share = tested[0] / rounds
  speedup = functools.partial(theory.speedup, gamma=gamma, c=costs["c"], v=costs["v"])
  return {
    "acceptance_rate": accepted / drafted if drafted else None,
    "alpha": alpha,
    "share_of_rounds_with_drafts": float(share),
    "share_of_rounds_accepting": (accepted_at / rounds).tolist(),  # draft 1, 2, ... gamma
    "predicted_from_alpha": float(share * speedup(alpha or 0.0) + (1 - share) * speedup(0.0)),
    "predicted_from_block_efficiency": float(sum(run["generated"] for run in runs) / rounds * speedup(0.0)),
  }


if __name__ == "__main__":
  report.launch(run, "quickstart")
