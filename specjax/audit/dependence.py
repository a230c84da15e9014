"""What draws must not know of each other: those of one round, of the rows of a batch, of one prompt, of one file.

Every draw may follow the target's law and be no draw of its own: an engine that tests all drafts of a round with one
u, or gives every request the same seed, can be right in each token's law and wrong in their joint one. Here tokens that
came before, of the same generation or of earlier ones, decide at each position which tokens to watch
(`earlier_choices`, `aligned_choices`), or with what weight the draft score counts (`serial`, `across`). That is decided
by the past, so under the null every such score has mean 0, as all others have. No model is run here.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from specjax.audit.samples import Samples

EARLIER = 4  # choices of earlier generations with the same text so far
ALIGNED = 8  # of those with the same draw
LEAN = 3.0  # nats; the largest weight
_END = -1  # in place of the offset: the draw that ends a round


def earlier_choices(samples: Samples) -> dict[int, np.ndarray]:
  """For generations whose prompt came before: int32[n_i, EARLIER], the latest different tokens that earlier generations
  with the same prompt and the same tokens so far drew at each position; -1 where there were fewer."""
  roots: dict[bytes, int] = {}
  children: dict[tuple[int, int], int] = {}  # (node, token) -> node: a tree of the texts so far
  latest: dict[int, list[int]] = {}  # node -> tokens, the latest last
  out = {}
  for i, (prompt, tokens) in enumerate(zip(samples.prompts, samples.tokens, strict=True)):
    known = prompt.tobytes() in roots
    node = roots.setdefault(prompt.tobytes(), len(roots) + len(children))
    choices = np.full((len(tokens), EARLIER), -1, np.int32)
    for at, token in enumerate(tokens.tolist()):
      seen = latest.get(node, [])
      choices[at, : len(seen)] = seen
      latest[node] = _with(seen, token, EARLIER)
      node = children.setdefault((node, token), len(roots) + len(children))
    if known:
      out[i] = choices
  return out


def aligned_choices(samples: Samples) -> list[np.ndarray]:
  """For each generation int32[n_i, ALIGNED]: the latest different tokens that earlier rows of its batch, and its own
  row in earlier batches, have at the same draw; -1 where there were fewer.

  The same draw is the same offset of the same round, or the end of that round, since whether a token ends its round is
  not decided by the past; without labels, the same position. Without rows all generations are one batch.
  """
  out, most = [], ALIGNED // (2 if samples.rows is None else 4)
  for i, known in _peers(samples, dict[tuple[int, int], list[int]]):
    choices = np.full((len(samples.tokens[i]), ALIGNED), -1, np.int32)
    for at, (token, round_, offset, end) in enumerate(
      zip(samples.tokens[i].tolist(), *_draws(samples, i), strict=True)
    ):
      seen = [t for own in known for draw in (offset, _END) for t in own.get((round_, draw), ())]
      choices[at, : len(seen)] = seen
      for own in known:
        draw = (round_, _END if end else offset)
        own[draw] = _with(own.get(draw, []), token, most)
    out.append(choices)
  return out


def _with(seen: list[int], token: int, most: int) -> list[int]:
  return [*(t for t in seen if t != token), token][-most:]


def serial(samples: Samples, leaning: np.ndarray) -> np.ndarray:
  """float[n], the weight of the draft score at each token: log q/p of the accepted draft before it, where positive.

  A u that let that draft pass is small, and if it serves again the next draft passes too.
  leaning: float[n], log q(x)/p(x) of every token. Without labels any token before may have been accepted.
  """
  counts = samples.counts
  starts = np.cumsum(counts) - counts
  weights = np.zeros_like(leaning)
  weights[1:] = np.clip(leaning[:-1], 0.0, LEAN)
  weights[starts[counts > 0]] = 0.0
  if samples.labels is not None:
    weights[1:][np.concatenate(samples.labels)[:-1] != "accepted"] = 0.0
  return weights


def across(samples: Samples, leaning: np.ndarray) -> np.ndarray | None:
  """float[n], the weight of the draft score at each token: what tests of earlier rows of the batch, and of its own row
  in earlier batches, tell of a shared u.

  That is the mean, over those at the same offset of the same round, of log q/p where positive for accepted drafts, and
  of -1 for rejected ones. None without labels, or without rows.
  """
  if samples.labels is None or samples.rows is None:
    return None
  labels = np.concatenate(samples.labels)
  tested = ((labels == "accepted") | (labels == "residual")).tolist()
  told = np.where(labels == "accepted", np.clip(leaning, 0.0, LEAN), -1.0).tolist()
  weights, at = np.zeros_like(leaning), 0
  for i, known in _peers(samples, dict[tuple[int, int], tuple[float, int]]):
    rounds, offsets, _ = _draws(samples, i)
    for draw in zip(rounds, offsets, strict=True):
      total, count = (sum(x) for x in zip(*(own.get(draw, (0.0, 0)) for own in known), strict=True))
      weights[at] = total / max(count, 1)
      if tested[at]:
        for own in known:
          before = own.get(draw, (0.0, 0))
          own[draw] = before[0] + told[at], before[1] + 1
      at += 1
  return weights


def _peers(samples: Samples, new: Callable[[], Any]) -> Iterator[tuple[int, list[Any]]]:
  """Of each generation what is known of its peers: of the batch it is in, and of its row, if rows are known. Both are
  made by `new`, and filled by the caller. Rows go up within a batch."""
  batch, of_row, last = new(), collections.defaultdict[int, Any](new), -1
  for i in range(len(samples.tokens)):
    if samples.rows is None:
      yield i, [batch]
      continue
    row = int(samples.rows[i])
    if row <= last:
      batch = new()
    last = row
    yield i, [batch, of_row[row]]


def _draws(samples: Samples, index: int) -> tuple[list[int], list[int], list[bool]]:
  """Of each token of a generation: its round, its offset in it, and whether it ends it; without labels all of them are
  of round 0, at their positions."""
  count = len(samples.tokens[index])
  labels = None if samples.labels is None else samples.labels[index]
  if labels is None or (labels == "").any():
    return [0] * count, list(range(count)), [False] * count
  ends = labels != "accepted"
  rounds = np.cumsum(ends) - ends
  starts = np.searchsorted(rounds, rounds)
  return rounds.tolist(), (np.arange(count) - starts).tolist(), ends.tolist()
