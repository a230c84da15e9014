"""One graph against a reference: what it does to the logits and to the law, position by position.

Laws are those at temperature 1. Nothing here is averaged or judged.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import scipy.special

from specjax import warp
from specjax.numerics.graphs import Graph

ROWS = 16  # positions looked at together: bounds the memory, about 10 arrays of [ROWS, V] in float64
SKETCH = 8  # logits kept of every position


@dataclasses.dataclass(frozen=True)
class Measurement:
  """A graph's logits z against the reference's r, at N positions: those of the first context, then the second's, ...

  p and q are the laws softmax(r) and softmax(z).
  """

  graph: Graph
  max_error: np.ndarray  # float64[N], max_v |z(v) - r(v)|
  rms_error: np.ndarray  # float64[N], the root of the mean over v of (z(v) - r(v))^2
  kl: np.ndarray  # float64[N], sum_v p(v) log(p(v) / q(v)) in nats
  tv: np.ndarray  # float64[N], sum_v |p(v) - q(v)| / 2
  flip: np.ndarray  # bool[N], whether argmax z differs from argmax r (the lowest id among equals)
  margin: np.ndarray  # float64[N], the graph's own largest logit less its second largest; 0 is a tie
  support: np.ndarray  # int64[N], tokens that entered or left the top-p support
  digest: np.ndarray  # uint64[N], a hash of z's bytes: equal digests mean equal bits
  sketch: np.ndarray  # float64[N, S], z at a few fixed tokens: tells any two graphs' difference without a second run

  @classmethod
  def of_plain(cls, values: Mapping[str, Any]) -> "Measurement":
    """From what `specjax.files.plain` made of one, or JSON."""
    types = {"flip": bool, "support": np.int64, "digest": np.uint64}
    arrays = {
      f.name: np.asarray(values[f.name], types.get(f.name, np.float64))
      for f in dataclasses.fields(cls)
      if f.name != "graph"
    }
    return cls(graph=Graph.of_plain(values["graph"]), **arrays)


def measure(
  graph: Graph,
  runs: Iterable[Iterable[tuple[np.ndarray, np.ndarray]]],
  reference: Sequence[np.ndarray],
  *,
  top_p: float,
) -> Measurement:
  """Compares what `logits` yields for each context with the reference's logits [T-1, V] of it."""
  parts = []
  for run, logits in zip(runs, reference, strict=True):
    for positions, out in run:
      for start in range(0, len(out), ROWS):
        rows = positions[start : start + ROWS]
        parts.append(_rows(out[start : start + ROWS], logits[rows[0] : rows[-1] + 1], top_p))
  return Measurement(graph, *map(np.concatenate, zip(*parts, strict=True)))


def collect(chunks: Iterable[tuple[np.ndarray, np.ndarray]], into: np.ndarray) -> np.ndarray:
  """Writes what `logits` yields into an array [T-1, V]; a memory map keeps it off the memory."""
  for positions, out in chunks:
    into[positions[0] : positions[-1] + 1] = out
  return into


def _rows(out: np.ndarray, reference: np.ndarray, top_p: float) -> tuple[np.ndarray, ...]:
  """All of a Measurement's arrays for logits out[t, V] against reference[t, V]."""
  z, r = np.asarray(out, np.float64), np.asarray(reference, np.float64)
  error = difference(z, r)
  log_q, log_p = scipy.special.log_softmax(z, axis=-1), scipy.special.log_softmax(r, axis=-1)
  p, gap = np.exp(log_p), difference(log_p, log_q)
  # The laws add up to 1, so sum p (e^-gap - 1) is 0: with it no term is negative, and small ones don't cancel.
  with np.errstate(over="ignore", invalid="ignore"):
    kl = np.where(p > 0, p * (np.expm1(-gap) + gap), 0.0).sum(-1) + np.where(p > 0, 0.0, np.exp(log_q)).sum(-1)
  top = np.partition(z, -2, axis=-1)[:, -2:] if z.shape[1] > 1 else np.pad(z, ((0, 0), (1, 0)), constant_values=-np.inf)
  return (
    np.abs(error).max(-1),
    np.sqrt(np.square(error).mean(-1)),
    kl,
    np.abs(p - np.exp(log_q)).sum(-1) / 2,
    z.argmax(-1) != r.argmax(-1),
    top[:, 1] - top[:, 0],
    (_support(out, top_p) != _support(reference, top_p)).sum(-1),
    np.array([_digest(row) for row in np.ascontiguousarray(out)], np.uint64),
    z[:, _sketched(z.shape[1])],
  )


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """a - b, and 0 where both are the same infinity: a token that neither has."""
  with np.errstate(invalid="ignore"):
    return np.where(a == b, 0.0, a - b)


def _support(logits: np.ndarray, top_p: float) -> np.ndarray:
  """Which tokens `specjax.sample` would keep under top_p, bool[t, V]; rows are padded, so that one program does."""
  padded = np.pad(np.asarray(logits, np.float32), ((0, ROWS - len(logits)), (0, 0)), mode="edge")
  return np.asarray(_kept(padded, top_p))[: len(logits)]


@jax.jit
def _kept(logits: jax.Array, top_p: jax.Array) -> jax.Array:
  return warp.log_probs(logits, warp.Warp(top_p=top_p)) > -np.inf


def _digest(row: np.ndarray) -> int:
  return int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little")


@functools.cache
def _sketched(vocab_size: int) -> np.ndarray:
  """The tokens of the sketch, the same for every graph of every process."""
  return np.sort(np.random.default_rng(0).permutation(vocab_size)[:SKETCH])
