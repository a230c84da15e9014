"""The same graph: is the text of plain sampling that of speculative sampling, and what does it cost?

A part of experiments/numerics.py. One batch of real prompts, half of its rows greedy and half at T = 1 under the
`coupled` rule, is sampled speculatively, plainly through passes as wide (`fixed_graph=True`), and plainly through
passes of one token. Times are of the same calls, in turn.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

import specjax
from experiments import report
from specjax.fixed_graph import row_error
from specjax.tasks.prompts import prompts, right_padded


def run(config: ml_collections.ConfigDict, kept: report.Run) -> dict[str, Any]:
  """Measures every dtype and gamma of config.fixed, prints a table; returns the items by "dtype gamma"."""
  own = config.fixed
  cases = [(dtype, gamma) for dtype in own.dtypes for gamma in own.gammas]
  found = {}
  for dtype, gamma in tqdm.tqdm(cases, desc="Fixed graph", unit="pair", disable=None):
    key = f"fixed {dtype} {gamma}"
    found[f"{dtype} {gamma}"] = kept.item(key, lambda dtype=dtype, gamma=gamma: _measure(config, dtype, gamma))
  report.print_table(
    f"Plain and speculative texts of {own.rows} prompts, {own.new_tokens} tokens each, coupled: the same?",
    ("", "gamma", "drafts rejected", "fixed: same text", "same bits at T=1", "plain: same text", "same bits at T=1",
     "ms a step: plain", "fixed", "fixed / plain", "speculative, a token"),
    [
      (
        one["dtype"],
        str(one["gamma"]),
        str(one["rejected"]),
        *(
          f"{one[name][what]}/{count}"
          for name in ("fixed", "plain")
          for what, count in (("text", own.rows), ("bits", own.rows // 2))
        ),
        *(f"{one['ms'][name]:.1f}" for name in ("plain", "fixed")),
        f"{one['ms']['fixed'] / one['ms']['plain']:.2f}",
        f"{one['ms']['speculative']:.1f}",
      )
      for one in found.values()
    ],
  )  # fmt: skip
  return found


@functools.cache
def _model(name: str, dtype: str) -> specjax.LanguageModel:
  return specjax.load_model(name, dtype=dtype)


def _measure(config: ml_collections.ConfigDict, dtype: str, gamma: int) -> dict[str, Any]:
  own, model, tokenizer = config.fixed, _model(config.model, dtype), specjax.load_tokenizer(config.model)
  encoded = [tokenizer.encode(prompt.text) for prompt in prompts("mixed", own.rows, config.seed)]
  tokens, lengths = right_padded(encoded)

  def sample(num_draft_tokens: int, fixed_graph: bool = False) -> specjax.SampleResult:
    return specjax.sample(
      model, specjax.NGramDrafter(), tokens, prompt_lengths=lengths, key=jax.random.key(config.seed),
      max_new_tokens=own.new_tokens, num_draft_tokens=num_draft_tokens, verifier="coupled",
      warp=specjax.Warp(jnp.arange(own.rows) % 2), fixed_graph=fixed_graph, max_length=own.max_length,
    )  # fmt: skip

  calls = {"speculative": lambda: sample(gamma), "fixed": lambda: sample(gamma, True), "plain": lambda: sample(0)}
  results = {name: call() for name, call in calls.items()}
  timings = report.median_interleaved(calls, own.repeats)
  stats = results["speculative"].stats
  return {
    "dtype": dtype,
    "gamma": gamma,
    "row_error": row_error(model, own.rows, own.max_length, gamma),
    **{name: _agree(results["speculative"], results[name]) for name in ("fixed", "plain")},
    "rejected": int(np.asarray(stats.tested).sum() - np.asarray(stats.accepted).sum()),
    "accepted": int(np.asarray(stats.accepted).sum()),
    "ms": {name: 1e3 * timing.median / own.new_tokens for name, timing in timings.items()},
    "seconds": {name: timing.seconds for name, timing in timings.items()},  # of `new_tokens` a row, and the prompts
  }


def _agree(a: specjax.SampleResult, b: specjax.SampleResult) -> dict[str, int]:
  """Rows with the same text; of those at T = 1 (greedy ones have log-probability 0), with the same bits besides."""
  text = (np.asarray(a.tokens) == np.asarray(b.tokens)).all(-1)
  bits = (np.asarray(a.logprobs).view(np.int32) == np.asarray(b.logprobs).view(np.int32)).all(-1)
  return {"text": int(text.sum()), "bits": int((text & bits)[1::2].sum())}
