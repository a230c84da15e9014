"""Prompts from public data: Python functions to complete (HumanEval) and encyclopedia text to continue (Wikipedia).

This module applies no chat template, encodes no text and scores no answers.
"""

import dataclasses
import gzip
import hashlib
import json
import re
from collections.abc import Sequence

import numpy as np

from specjax.fetch import HUMAN_EVAL, WIKIPEDIA, fetch

SOURCES = ("humaneval", "wikipedia", "mixed")

_CONTEXT_WORDS = 80
_CUT_WORDS = 40  # at least this many words follow the context in the extract, so the text does not end with the prompt
_CONTEXT = re.compile(rf"(?:\S+\s+){{{_CONTEXT_WORDS - 1}}}\S+(?=(?:\s+\S+){{{_CUT_WORDS}}})")


@dataclasses.dataclass(frozen=True)
class Prompt:
  name: str  # "HumanEval/0", or the title of the article
  source: str  # "humaneval" or "wikipedia"
  text: str


def right_padded(rows: Sequence[Sequence[int]], width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
  """Rows of ids as `specjax.sample` takes them: tokens int32[B, width], 0 behind each row, and lengths int32[B].

  width: default: of the longest row.
  """
  lengths = np.array([len(row) for row in rows], np.int32)
  tokens = np.zeros((len(rows), lengths.max() if width is None else width), np.int32)
  for to, row in zip(tokens, rows, strict=True):
    to[: len(row)] = row
  return tokens, lengths


def prompts(source: str, count: int, seed: int = 0) -> list[Prompt]:
  """`count` different prompts in an order drawn by `seed`: the same ones on every machine, now and later.

  A smaller count gives the first of those that a larger one gives.

  Args:
    source: "humaneval" is the function's signature and docstring, as published. "wikipedia" is the first 80 words of an
      English extract, spaces and line breaks kept, of those extracts that go on for at least 40 more. "mixed" takes
      turns between the two.
    count: at least 1, at most what the source holds.

  Raises:
    ValueError: an unknown source, or a count out of range.
    FetchError: the data could not be downloaded.
  """
  if source not in SOURCES:
    raise ValueError(f"Unknown prompt source {source!r}; known are {', '.join(SOURCES)}.")
  if source == "mixed":
    pairs = zip(_ordered(_human_eval(), seed), _ordered(_wikipedia(), seed), strict=False)
    pool = [prompt for pair in pairs for prompt in pair]
  else:
    pool = _ordered(_human_eval() if source == "humaneval" else _wikipedia(), seed)
  if not 1 <= count <= len(pool):
    raise ValueError(f"count={count} prompts asked for; {source!r} holds 1 to {len(pool)}.")
  return pool[:count]


def _ordered(pool: list[Prompt], seed: int) -> list[Prompt]:
  """Ordered by a hash and not by a random generator, whose stream may change between versions of its library."""
  return sorted(pool, key=lambda prompt: hashlib.sha256(f"{seed} {prompt.name}".encode()).digest())


def _human_eval() -> list[Prompt]:
  with gzip.open(fetch(HUMAN_EVAL), "rt", encoding="utf-8") as file:
    problems = [json.loads(line) for line in file]
  return [Prompt(problem["task_id"], "humaneval", problem["prompt"]) for problem in problems]


def _wikipedia() -> list[Prompt]:
  articles = json.loads(fetch(WIKIPEDIA).read_text(encoding="utf-8"))
  contexts = ((title, _CONTEXT.match(article["extract"].strip())) for title, article in articles.items())
  return [Prompt(title, "wikipedia", context.group()) for title, context in contexts if context]
