"""From numerics to text: how often do plain and speculative sampling write other text, why, and is it worse?

A part of experiments/numerics.py. Real prompts are sampled plainly and speculatively in each dtype, greedily and at
T = 1 with shared noise (the `coupled` rule; under temperature 0 it is greedy decoding like any other), both in one
batch. Both texts' passes are then run again along the plain text, for the laws from which the differences are predicted
and explained; and float32 scores both, to see whether one is worse.
"""

import functools
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import scipy.special
import scipy.stats
import tqdm

import specjax
from experiments import report
from experiments.numerics_matrix import TOY, toy
from specjax.checks import slots
from specjax.language_model import LanguageModel
from specjax.numerics import (
  Curve,
  Explanation,
  Graph,
  Run,
  explain,
  first_difference,
  flip_probability,
  judge,
  logits,
  measured,
  predicted,
  replay,
  shared_noise,
)
from specjax.numerics.graphs import prepare
from specjax.tasks.prompts import prompts, right_padded

MODES = {"greedy": 0.0, "coupled": 1.0}  # temperatures
SAMPLERS = ("plain", "speculative")
KINDS = ("numerics", "another draw", "fault")
EXACT = "float32"  # scores every text, and is the reference of the others
_COLOURS = {"float32": "#009e73", "bfloat16": "#d55e00", "float16": "#0072b2"}


def run(config: ml_collections.ConfigDict, kept: report.Run) -> dict[str, Any]:
  """Samples, predicts, explains and scores batch by batch; prints tables, draws text-MODEL.png; returns the summary.

  Raises ValueError for settings that are not allowed, before a model is loaded.
  """
  own = config.text
  _check(own)
  dtypes = [dtype for dtype in _COLOURS if own.prompts.get(dtype)]
  steps = [(dtype, batch) for dtype in dtypes for batch in range(-(-own.prompts[dtype] // own.batch))]
  read = list(dict.fromkeys((EXACT, *dtypes)))
  total = len(steps) * len(_Batch.STAGES) + len(read)
  with tqdm.tqdm(total=total, desc="Texts", disable=None) as bar:
    for n, (dtype, batch) in enumerate(steps):
      bar.set_description(f"Texts in {dtype}")
      kept.item(f"text {dtype} {batch}", lambda d=dtype, b=batch: _Batch(config, d, b).measure(bar.update))
      bar.update((n + 1) * len(_Batch.STAGES) - bar.n)
    for dtype in read:
      bar.set_description(f"Perplexity in {dtype}")
      kept.item(f"held out {dtype}", lambda dtype=dtype: _held_out(config, dtype))
      bar.update()
  found = {
    dtype: {
      mode: [row for d, batch in steps if d == dtype for row in kept.items[f"text {dtype} {batch}"][mode]]
      for mode in MODES
    }
    for dtype in dtypes
  }
  curves = {dtype: {mode: _curves(mode, rows) for mode, rows in modes.items()} for dtype, modes in found.items()}
  summary = {
    dtype: {mode: _summarise(rows, *curves[dtype][mode]) for mode, rows in modes.items()}
    for dtype, modes in found.items()
  }
  held_out = {dtype: _paired(kept.items[f"held out {dtype}"], kept.items[f"held out {EXACT}"]) for dtype in read}
  _show(config, summary, held_out, found)
  path = kept.folder / f"text-{config.model}.png"
  save_figure(curves, config, path)
  return {"texts": summary, "held_out": held_out}


def _check(own: ml_collections.ConfigDict) -> None:
  if unknown := set(own.prompts) - set(_COLOURS):
    raise ValueError(f"config.text.prompts has {sorted(unknown)}; allowed: {', '.join(_COLOURS)}.")
  if bad := [f"{dtype}={count}" for dtype, count in own.prompts.items() if count == 1 or count < 0]:
    raise ValueError(f"config.text.prompts.{bad[0]} must be 0, to leave it out, or at least 2.")
  for name, low in (("batch", 1), ("prompt_tokens", 1), ("new_tokens", 1), ("gamma", 1), ("held_out", 2)):
    if own[name] < low:
      raise ValueError(f"config.text.{name}={own[name]} must be at least {low}.")
  if own.held_out_tokens < 2:
    raise ValueError(f"config.text.held_out_tokens={own.held_out_tokens} must be at least 2.")


@functools.cache
def _model(name: str, dtype: str) -> LanguageModel:
  if name == TOY:
    return prepare(toy(), Graph(activations=dtype))
  return specjax.load_model(name, dtype=dtype)


def _encoded(config: ml_collections.ConfigDict, source: str, count: int) -> list[list[int]]:
  """Token ids of that many prompts; of a toy, random ones of 1 to 99 tokens."""
  if config.model == TOY:
    random = np.random.default_rng(config.seed)
    return [random.integers(0, toy().vocab_size, length).tolist() for length in random.integers(1, 100, count)]
  tokenizer = specjax.load_tokenizer(config.model)
  return [tokenizer.encode(prompt.text) for prompt in prompts(source, count, config.seed)]


class _Batch:
  """Some prompts in one dtype, each in two rows: one for each mode."""

  STAGES = ("plain", "speculative", "both again", "scores")

  def __init__(self, config: ml_collections.ConfigDict, dtype: str, index: int):
    own = config.text
    self.config, self.own, self.dtype = config, own, dtype
    count = min(own.batch, own.prompts[dtype] - index * own.batch)
    texts = _encoded(config, "mixed", index * own.batch + count)[index * own.batch :]
    self.count = count
    # A last batch that is not full is filled up with its own prompts: one program for all.
    texts = [texts[i % count][-own.prompt_tokens :] for i in range(own.batch)]
    self.tokens, self.lengths = right_padded(texts * len(MODES), own.prompt_tokens)
    self.key = jax.random.fold_in(jax.random.key(config.seed), index)
    self.warp = specjax.Warp(jnp.repeat(jnp.array([*MODES.values()]), own.batch))
    self.model, self.reference = _model(config.model, dtype), _model(config.model, EXACT)
    self.stops = () if config.model == TOY else tuple(specjax.load_tokenizer(config.model).eos_ids)
    # As many slots as `specjax.sample` and `explain` would choose.
    need = slots(own.prompt_tokens, own.prompt_tokens + own.new_tokens, own.gamma, own.prompt_tokens)
    self.buffers = {"max_length": max(128, 1 << (need - 1).bit_length()), "prefill_chunk": own.prompt_tokens}

  def measure(self, done: Callable[[], Any]) -> dict[str, list[dict[str, Any]]]:
    """For each mode, a dictionary a prompt:

    plain, speculative: the generated tokens. different: index of the first that differs, or None.
    margins, changes: of greedy texts, at every token of the plain one: the first two tokens' margin in plain decoding,
      and what it gains in verification. differs, kept: of coupled ones; see `specjax.numerics.predicted`.
    nll: nats of both texts under the float32 target at temperature 1. explanation: of the difference.
    """
    plain, other = self._sample(0), self._sample(self.own.gamma)
    done(), done()
    rows = self._follow(plain, other)
    done()
    if any(row["different"] is not None for row in rows):
      scores = self._score(other)
    else:
      scores = [row["nll"]["plain"] for row in rows]
    for row, score in zip(rows, scores, strict=True):
      row["nll"]["speculative"] = score
    size = self.own.batch
    return {mode: rows[m * size : m * size + self.count] for m, mode in enumerate(MODES)}

  def _sample(self, gamma: int) -> list[Run]:
    settings = {"num_draft_tokens": gamma, "key": self.key, "warp": self.warp, "verifier": "coupled"}
    result = specjax.sample(
      self.model,
      specjax.NGramDrafter(),
      self.tokens,
      prompt_lengths=self.lengths,
      max_new_tokens=self.own.new_tokens,
      eos_id=self.stops,
      **self.buffers,
      **settings,
    )
    return Run.from_result(result, activations=self.dtype, **settings)

  def _follow(self, plain: Sequence[Run], other: Sequence[Run]) -> list[dict[str, Any]]:
    """Both samplers' passes along the plain texts, beside those of the reference."""
    width, exact = self.own.gamma + 1, self.dtype == EXACT
    rows = [self._row(a, b) for a, b in zip(plain, other, strict=True)]
    passes = replay(self.model, plain, 1, width, **self.buffers)
    if exact:
      triples = ((decode, verify, decode) for decode, verify in passes)
    else:
      references = replay(self.reference, plain, width, **self.buffers)
      triples = ((*pair, reference) for pair, (reference,) in zip(passes, references, strict=True))
    for j, blocks in enumerate(triples):
      for b, (row, a, c) in enumerate(zip(rows, plain, other, strict=True)):
        for i in range(min(width, len(a.tokens) - j * width)):
          self._token(row, a, c, j * width + i, *(block[b, i] for block in blocks))
    if exact:
      for row, a, c in zip(rows, plain, other, strict=True):
        if row["different"] is not None:  # rare: each from the start, against float64
          row["explanation"] = _plain(explain(a, c, self.model, eos_id=self.stops))
    return rows

  def _row(self, a: Run, b: Run) -> dict[str, Any]:
    empty = ("margins", "changes") if a.greedy else ("differs", "kept")
    return {
      "plain": a.tokens,
      "speculative": b.tokens,
      "different": first_difference(a.tokens, b.tokens),
      "explanation": None,
      "nll": {"plain": 0.0},
      **{name: [] for name in empty},
    }

  def _token(
    self, row: dict[str, Any], a: Run, b: Run, at: int, decode: np.ndarray, verify: np.ndarray, reference: np.ndarray
  ) -> None:
    """Adds what the laws behind token `at` of the plain text say of it; logits [V]."""
    token = a.tokens[at]
    row["nll"]["plain"] += float(_nll(reference, token))
    if a.greedy:
      first = int(decode.argmax())
      second = int(np.where(np.arange(len(decode)) == first, -np.inf, decode).argmax())
      row["margins"].append(float(decode[first] - decode[second]))
      row["changes"].append(float(verify[first] - verify[second]) - row["margins"][-1])
    else:
      differs, kept = shared_noise(decode, verify)  # normalises: the laws at T = 1
      row["differs"].append(float(differs))
      row["kept"].append(float(kept[token]))
    if at == row["different"] and self.dtype != EXACT:
      row["explanation"] = _plain(judge(a, b, reference, decode, verify, stop_ids=self.stops))

  def _score(self, runs: Sequence[Run]) -> list[float]:
    """Nats of each run's tokens under the float32 target."""
    width, scores = self.own.gamma + 1, [0.0] * len(runs)
    for j, (found,) in enumerate(replay(self.reference, runs, width, **self.buffers)):
      for b, own in enumerate(runs):
        tokens = own.tokens[j * width : (j + 1) * width]
        scores[b] += float(_nll(found[b, : len(tokens)], tokens).sum())
    return scores


def _nll(logits: np.ndarray, tokens: Any) -> np.ndarray:
  """-log p of tokens[...] under softmax(logits[..., V]), float64."""
  log_p = scipy.special.log_softmax(np.asarray(logits, np.float64), axis=-1)
  return -np.take_along_axis(log_p, np.asarray(tokens)[..., None], axis=-1)[..., 0]


def _plain(found: Explanation) -> dict[str, Any]:
  margins = [e.margin for e in found.evidence if e.margin is not None]
  return {
    "kind": found.kind,
    "margin": max(margins, default=None),
    "error": max((e.error for e in found.evidence), default=None),
    "repeated": [e.repeated for e in found.evidence],
    "words": str(found),
  }


def _held_out(config: ml_collections.ConfigDict, dtype: str) -> list[float]:
  """Nats a token of each of some Wikipedia texts, read in one pass."""
  own, model = config.text, _model(config.model, dtype)
  texts = _encoded(config, "wikipedia", own.held_out)
  texts = [text[: own.held_out_tokens] for text in texts if len(text) >= own.held_out_tokens]
  scores = []
  for text in texts:
    chunks = [out for _, out in logits(model, Graph(width=None), np.array(text))]
    scores.append(float(_nll(np.concatenate(chunks), text[1:]).mean()))
  return scores


def _curves(mode: str, rows: Sequence[Mapping[str, Any]]) -> tuple[Curve, Curve]:
  """Measured and predicted."""
  lengths = np.array([len(row["plain"]) for row in rows])
  shorter = [min(len(row["plain"]), len(row["speculative"])) for row in rows]
  seen = measured(shorter, [row["different"] for row in rows])

  def table(name: str) -> np.ndarray:
    return np.array([np.pad(row[name], (0, lengths.max() - len(row[name]))) for row in rows])

  if mode == "coupled":
    return seen, predicted(table("differs"), table("kept"), lengths)
  margins, differs = table("margins"), np.zeros((len(rows), lengths.max()))
  even = np.arange(len(rows)) % 2 == 0
  for own in (even, ~even):  # each half by the errors of the other
    changes = np.concatenate([row["changes"] for row, mine in zip(rows, own, strict=True) if not mine])
    differs[own] = flip_probability(margins[own].ravel(), changes).reshape(-1, lengths.max())
  return seen, predicted(differs, 1 - differs, lengths)


def _summarise(rows: Sequence[Mapping[str, Any]], seen: Curve, said: Curve) -> dict[str, Any]:
  different = [row for row in rows if row["different"] is not None]
  same = scipy.stats.binomtest(len(rows) - len(different), len(rows)).proportion_ci(method="exact")
  tokens = {name: sum(len(row[name]) for row in rows) for name in SAMPLERS}
  nll = {name: sum(row["nll"][name] for row in rows) for name in SAMPLERS}
  each = {name: [row["nll"][name] / len(row[name]) for row in rows] for name in SAMPLERS}
  margins = [row["explanation"]["margin"] for row in different if row["explanation"]["margin"] is not None]
  return {
    "prompts": len(rows),
    "tokens": tokens["plain"],
    "same": len(rows) - len(different),
    "same_share": ((len(rows) - len(different)) / len(rows), same.low, same.high),
    "measured": (seen.survival[-1], seen.low[-1], seen.high[-1]),
    "predicted": (said.survival[-1], said.low[-1], said.high[-1]),
    "length": len(seen.survival) - 1,
    "kinds": {kind: count for kind in KINDS if (count := Counter(r["explanation"]["kind"] for r in different)[kind])},
    "given_again": sum(all(row["explanation"]["repeated"]) for row in different),
    "largest_margin": max(margins, default=None),
    "perplexity": {name: float(np.exp(nll[name] / tokens[name])) for name in SAMPLERS},
    "nll_change": _mean(np.subtract(each["speculative"], each["plain"])),
  }


def _paired(own: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
  """Of held-out texts: perplexity, and nats a token more than in another dtype."""
  return {"texts": len(own), "perplexity": float(np.exp(np.mean(own))), "nll_change": _mean(np.subtract(own, base))}


def _mean(values: np.ndarray) -> tuple[float, float, float]:
  """The mean and its 95 % interval by Student's t."""
  reach = scipy.stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
  return float(values.mean()), float(values.mean() - reach), float(values.mean() + reach)


def _show(
  config: ml_collections.ConfigDict, summary: Mapping[str, Any], held_out: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
  def interval(values: Sequence[float], style: str) -> str:
    return "{} [{}, {}]".format(*(style.format(value) for value in values))

  own = config.text
  report.print_table(
    f"{config.model}: plain and speculative text (gamma {own.gamma}), {own.new_tokens} tokens, 95 % intervals",
    ("", "prompts", "same text", "S at the end", "predicted", "differences", "given again", "largest margin",
     "perplexity: plain", "speculative", "nats a token more"),
    [
      (
        f"{dtype} {mode}",
        str(one["prompts"]),
        f"{one['same']}: " + interval(one["same_share"], "{:.0%}"),
        interval(one["measured"], "{:.3f}"),
        interval(one["predicted"], "{:.3f}"),
        ", ".join(f"{count} {kind}" for kind, count in one["kinds"].items()) or "none",
        str(one["given_again"]),
        "" if one["largest_margin"] is None else f"{one['largest_margin']:.2g}",
        *(f"{one['perplexity'][name]:.2f}" for name in SAMPLERS),
        interval(one["nll_change"], "{:+.3f}") if one["same"] < one["prompts"] else "the same",
      )
      for dtype, modes in summary.items()
      for mode, one in modes.items()
    ],
  )  # fmt: skip
  report.print_table(
    f"{config.model}: perplexity of {next(iter(held_out.values()))['texts']} Wikipedia texts",
    ("", "perplexity", f"nats a token more than {EXACT}"),
    [
      (dtype, f"{one['perplexity']:.3f}", interval(one["nll_change"], "{:+.4f}") if dtype != EXACT else "")
      for dtype, one in held_out.items()
    ],
  )
  different = [
    row["explanation"] for modes in found.values() for rows in modes.values() for row in rows if row["explanation"]
  ]
  for one in [e for e in different if e["kind"] != KINDS[0]] or different[:1]:
    print(one["words"])


def save_figure(
  curves: Mapping[str, Mapping[str, tuple[Curve, Curve]]], config: ml_collections.ConfigDict, path: pathlib.Path
) -> None:
  """S(t) of every dtype, measured and predicted; greedy left, coupled right."""
  report.plot_style()
  import matplotlib.pyplot as plt

  figure, panels = plt.subplots(1, len(MODES), figsize=(13, 5.5), sharey=True)
  for axes, mode in zip(panels, MODES, strict=True):
    for dtype, modes in curves.items():
      (seen, said), colour = modes[mode], _COLOURS[dtype]
      t = np.arange(len(seen.survival))
      axes.step(
        t, seen.survival, where="post", color=colour, lw=2, label=f"{dtype}, measured ({seen.at_risk[0]} texts)"
      )
      axes.fill_between(t, seen.low, seen.high, step="post", color=colour, alpha=0.15, lw=0)
      axes.plot(np.arange(len(said.survival)), said.survival, color=colour, ls="--", lw=2, label="predicted")
    axes.set_title({"greedy": "Greedy", "coupled": "T = 1, shared noise"}[mode])
    axes.set_xlabel("tokens generated, t")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=10, loc="lower left")
  panels[0].set_ylabel("S(t): the first t tokens are the same")
  figure.suptitle(f"{config.model}: plain against speculative text (gamma {config.text.gamma}); bands: 95 %")
  report.save_figure(figure, path)
