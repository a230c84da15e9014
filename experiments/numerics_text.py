"""From numerics to text: how often do plain and speculative sampling write other text, why, and is it worse?

A part of experiments/numerics.py. Real prompts are sampled plainly and speculatively in each dtype, greedily and at
T = 1 with shared noise (the `coupled` rule; under temperature 0 it is greedy decoding like any other), both in one
batch. Both texts' passes are then run again along the plain text, for the laws from which the differences are predicted
and explained; and float32 scores both, to see whether one is worse.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import scipy.special
import scipy.stats
import tqdm

import specjax
from experiments import numerics_text_show, report
from experiments.numerics_matrix import TOY, toy
from specjax.checks import slots
from specjax.language_model import LanguageModel
from specjax.numerics import (
  Explanation,
  Graph,
  Run,
  explain,
  first_difference,
  judge,
  logits,
  replay,
  shared_noise,
)
from specjax.numerics.graphs import prepare
from specjax.tasks.prompts import prompts, right_padded

MODES = {"greedy": 0.0, "coupled": 1.0}  # temperatures
EXACT = "float32"  # scores every text, and is the reference of the others
DTYPES = (EXACT, "bfloat16", "float16")


def run(config: ml_collections.ConfigDict, kept: report.Run) -> dict[str, Any]:
  """Samples, predicts, explains and scores batch by batch; prints tables, draws text-MODEL.png; returns the summary.

  Raises ValueError for settings that are not allowed, before a model is loaded.
  """
  own = config.text
  _check(own)
  dtypes = [dtype for dtype in DTYPES if any(own.prompts.get(dtype, ()))]
  steps = [(dtype, batch) for dtype in dtypes for batch in range(-(-sum(own.prompts[dtype]) // own.rows))]
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
  rows = {dtype: [row for d, b in steps if d == dtype for row in kept.items[f"text {dtype} {b}"]] for dtype in dtypes}
  found = {
    dtype: {mode: mine for mode in MODES if (mine := [row for row in rows[dtype] if row["mode"] == mode])}
    for dtype in dtypes
  }
  held_out = {dtype: kept.items[f"held out {dtype}"] for dtype in read}
  return numerics_text_show.show(found, held_out, config, kept.folder / f"text-{config.model}.png")


def _check(own: ml_collections.ConfigDict) -> None:
  if unknown := set(own.prompts) - set(DTYPES):
    raise ValueError(f"config.text.prompts has {sorted(unknown)}; allowed: {', '.join(DTYPES)}.")
  for dtype, counts in own.prompts.items():
    if len(counts) != len(MODES) or any(count == 1 or count < 0 for count in counts):
      raise ValueError(
        f"config.text.prompts.{dtype}={counts} must be two numbers, greedy and coupled: 0, or 2 or more."
      )
  for name, low in (("rows", 1), ("prompt_tokens", 1), ("new_tokens", 1), ("gamma", 1), ("held_out", 2)):
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
  """Some rows of one dtype: prompts that are sampled greedily, and behind the last of them those at T = 1."""

  STAGES = ("plain", "speculative", "both again", "scores")

  def __init__(self, config: ml_collections.ConfigDict, dtype: str, index: int):
    own = config.text
    self.config, self.own, self.dtype = config, own, dtype
    jobs = [(mode, i) for mode, count in zip(MODES, own.prompts[dtype], strict=True) for i in range(count)]
    jobs = jobs[index * own.rows : (index + 1) * own.rows]
    self.count = len(jobs)
    # A batch that is not full is filled up with its own rows: one program for all.
    jobs = [jobs[b % self.count] for b in range(own.rows)]
    self.modes = [mode for mode, _ in jobs]
    texts = _encoded(config, "mixed", max(i for _, i in jobs) + 1)
    self.tokens, self.lengths = right_padded([texts[i][-own.prompt_tokens :] for _, i in jobs], own.prompt_tokens)
    self.key = jax.random.fold_in(jax.random.key(config.seed), index)
    self.warp = specjax.Warp(jnp.array([MODES[mode] for mode in self.modes]))
    self.model, self.reference = _model(config.model, dtype), _model(config.model, EXACT)
    self.stops = () if config.model == TOY else tuple(specjax.load_tokenizer(config.model).eos_ids)
    # As many slots as `specjax.sample` and `explain` would choose.
    need = slots(own.prompt_tokens, own.prompt_tokens + own.new_tokens, own.gamma, own.prompt_tokens)
    self.buffers = {"max_length": max(128, 1 << (need - 1).bit_length()), "prefill_chunk": own.prompt_tokens}

  def measure(self, done: Callable[[], Any]) -> list[dict[str, Any]]:
    """A dictionary a row:

    mode. plain, speculative: the generated tokens. different: index of the first that differs, or None.
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
    return [{"mode": mode, **row} for mode, row in zip(self.modes, rows, strict=True)][: self.count]

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
