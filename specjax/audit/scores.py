"""The target's own law at every generated token, reduced to a few numbers a token inside the compiled program.

A score f is any function of the next token that the past decides. Under the null hypothesis (each token drawn from the
warped law p of the target given its past) f(x) - E_p f has mean zero and variance Var_p f whatever the past was, and
both are exact here: they are sums over the vocabulary. `specjax.audit.stats` adds them up; nothing here tests.

Arrays over the vocabulary exist for one chunk of positions at a time and never leave the program.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array, lax

from specjax.audit.dependence import ALIGNED, EARLIER, aligned_choices, earlier_choices
from specjax.audit.samples import Samples
from specjax.language_model import LanguageModel, fit_vocabulary, run, take_window
from specjax.warp import Warp, log_probs

SURPRISE_CLIP = 12.0  # nats; a score with a bound can be bet on
ROUNDING = 1e-5  # of a score's span: a law under which it varies less has it constant, and float32 sums vary as much
DRAFT_CLIP = 3.0
REPEAT_WINDOW = 16  # tokens back
LEAST_SLOTS = 128
MOST_ROWS = 512  # a batch
CHUNK = 32  # positions a pass
VOCABULARY_FLOATS = 2**24  # B * CHUNK * V, the size of an array over the vocabulary: 64 MiB in float32


class Moments(NamedTuple):
  """A score at each position: f(x) - E_p f, its variance, third and fourth cumulants, and its bounds."""

  deviation: Any
  variance: Any
  third: Any
  fourth: Any
  low: Any
  high: Any


class Scores(NamedTuple):
  """A few numbers for each of n generated tokens x, in the order of the samples; p is the warped law of the target.

  moments: of each score. Tests of the rule: `overlap` is sum_v min(p, q), and `accepted` and
  `residual` hold the draft score's moments under min(p, q) and max(p - q, 0), normalised; None without a draft model.
  log_p: log p(x), -inf where x lies outside the law's support; scaled_log_p: of the law with the temperature alone,
  raw_log_p: without any warp. log_q: of the draft model. single: whether the law's support is one token.
  above, tied: the mass of tokens with more than x's probability, and with just as much (x included).
  margin: logits that x lacks to the least likely token of the support; 0 inside it.
  excess: mass of the tokens more likely than x beyond top_p, for an x outside the support; inf where there is no top_p.
  """

  moments: dict[str, Moments]
  overlap: Any
  accepted: Moments | None
  residual: Moments | None
  log_p: Any
  scaled_log_p: Any
  raw_log_p: Any
  log_q: Any
  single: Any
  above: Any
  tied: Any
  margin: Any
  excess: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Sequences of one program. B rows of L slots."""

  tokens: Any  # int32[B, L], prompt and generated tokens, 0 behind
  lengths: Any  # int32[B]
  first: Any  # int32[B], length of the prompt
  earlier: Any  # int32[B, L, EARLIER], what earlier generations with the same text so far drew next, or -1
  aligned: Any  # int32[B, L, ALIGNED], what earlier ones of the same batch drew at the same draw, or -1
  warp: Warp  # fields [B]
  stop_ids: Any  # int32[E]


def score(
  target: LanguageModel,
  samples: Samples,
  warp: Warp,
  stop_ids: np.ndarray,
  draft: LanguageModel | None = None,
  *,
  known: int = 0,
  expected: bool = False,
  description: str = "Scoring",
) -> Scores:
  """Feeds every sequence to the target (and the draft model) once, and returns the scores as numpy arrays.

  known: so many generations are not scored, and are but the past of the others. expected: the deviations are
  E_q f - E_p f in place of f(x) - E_p f, with q the law of `draft`.
  """
  starts = np.cumsum([0, *(len(tokens) if i >= known else 0 for i, tokens in enumerate(samples.tokens))])
  out: Scores | None = None
  with tqdm.tqdm(total=int(starts[-1]), desc=description, unit=" tokens", leave=False, disable=None) as bar:
    for members, batch in _batches(target, samples, warp, stop_ids, known):
      scores = jax.device_get(_score_batch(target, draft, batch, expected=expected))
      if out is None:
        out = jax.tree.map(lambda leaf: np.empty(starts[-1], leaf.dtype), scores)
      for row, i in enumerate(members):
        own = slice(starts[i], starts[i + 1])
        first, last = len(samples.prompts[i]), len(samples.prompts[i]) + len(samples.tokens[i])
        for to, leaf in zip(jax.tree.leaves(out), jax.tree.leaves(scores), strict=True):
          to[own] = leaf[row, first:last]
      bar.update(sum(len(samples.tokens[i]) for i in members))
  assert out is not None
  return out


def _batches(
  target: LanguageModel, samples: Samples, warp: Warp, stop_ids: np.ndarray, known: int
) -> Iterator[tuple[np.ndarray, Batch]]:
  """The generations by length, in batches of few shapes: buffers of a power of two, always the same number of rows."""
  lengths = np.array([len(p) + len(t) for p, t in zip(samples.prompts, samples.tokens, strict=True)])
  order = np.argsort(lengths, kind="stable")
  order = order[[i >= known and len(samples.tokens[i]) > 0 for i in order]]
  earlier, aligned = earlier_choices(samples), aligned_choices(samples)
  slots = np.maximum(LEAST_SLOTS, 1 << np.ceil(np.log2(lengths + 1)).astype(int))
  rows = 1 << (max(1, VOCABULARY_FLOATS // (CHUNK * target.vocab_size)).bit_length() - 1)
  rows = min(rows, MOST_ROWS, 8 ** math.ceil(math.log(max(len(order), 1), 8)))
  for size in np.unique(slots[order]):
    bucket = order[slots[order] == size]
    for at in range(0, len(bucket), rows):
      members = bucket[at : at + rows]
      padded = np.resize(members, rows)  # the last batch repeats rows; nobody reads them
      tokens = np.zeros((rows, size), np.int32)
      choices, neighbours = (np.full((rows, size, count), -1, np.int32) for count in (EARLIER, ALIGNED))
      for row, i in enumerate(padded):
        generated = slice(len(samples.prompts[i]), lengths[i])
        tokens[row, : lengths[i]] = np.concatenate([samples.prompts[i], samples.tokens[i]])
        # Where texts end may decide in which order they come; then stop tokens are no independent draws.
        neighbours[row, generated] = np.where(np.isin(aligned[i], stop_ids), -1, aligned[i])
        if i in earlier:
          choices[row, generated] = np.where(np.isin(earlier[i], stop_ids), -1, earlier[i])
      yield (
        members,
        Batch(
          tokens=tokens,
          lengths=lengths[padded].astype(np.int32),
          first=np.array([len(samples.prompts[i]) for i in padded], np.int32),
          earlier=choices,
          aligned=neighbours,
          warp=jax.tree.map(lambda field, padded=padded: np.asarray(field)[padded], warp),
          stop_ids=stop_ids,
        ),
      )


@functools.partial(jax.jit, static_argnames="expected")
def _score_batch(target: LanguageModel, draft: LanguageModel | None, batch: Batch, *, expected: bool) -> Scores:
  """Scores [B, L]; entry [b, t] is of token t given those before it. What is no generated token of a row is garbage."""
  rows, slots = batch.tokens.shape

  def one_chunk(index: Array, tokens: Array, cache: Any, draft_cache: Any):
    start = jnp.full(rows, index * CHUNK, jnp.int32)
    logits, cache = run(target, tokens, cache, start)
    draft_logits = None
    if draft is not None:
      draft_logits, draft_cache = run(draft, tokens, draft_cache, start)
    drawn = take_window(batch.tokens, start + 1, CHUNK)
    positions = start[:, None] + jnp.arange(CHUNK)[None]
    back = positions[:, :, None] - jnp.arange(REPEAT_WINDOW)[None, None]
    recent = jnp.take_along_axis(batch.tokens[:, :, None], jnp.maximum(back, 0).reshape(rows, -1, 1), axis=1)
    recent = jnp.where(back >= 0, recent.reshape(back.shape), -1)
    earlier, aligned = (
      jnp.stack([take_window(ids[:, :, i], start + 1, CHUNK) for i in range(ids.shape[-1])], axis=-1)
      for ids in (batch.earlier, batch.aligned)
    )
    watched = {"repeat": recent, "copy": earlier, "echo": aligned}
    scores = score_positions(logits, draft_logits, drawn, watched, batch.stop_ids, batch.warp, expected=expected)
    return scores, cache, draft_cache

  caches = tuple(() if model is None else model.init_cache(model.params, rows, slots) for model in (target, draft))
  shapes = jax.eval_shape(one_chunk, jnp.int32(0), batch.tokens[:, :CHUNK], *caches)[0]
  # Entry t of a pass is of the token behind position t, so that what is kept for token t + 1 starts one slot further.
  out = jax.tree.map(lambda leaf: jnp.zeros((rows, slots + 1), leaf.dtype), shapes)

  def chunk(index: Array) -> Array:
    return lax.dynamic_slice_in_dim(batch.tokens, index * CHUNK, CHUNK, axis=1)

  def read(carry):
    index, *caches = carry
    start = jnp.full(rows, index * CHUNK, jnp.int32)
    return index + 1, *(
      cache if model is None else run(model, chunk(index), cache, start)[1]
      for model, cache in zip((target, draft), caches, strict=True)
    )

  # Chunks of prompts alone need no law, whose work is as much as that of all layers.
  begin = (batch.first.min() - 1) // CHUNK
  _, *caches = lax.while_loop(lambda carry: carry[0] < begin, read, (jnp.int32(0), *caches))

  def body(carry):
    index, out, cache, draft_cache = carry
    scores, cache, draft_cache = one_chunk(index, chunk(index), cache, draft_cache)
    at = index * CHUNK + 1
    out = jax.tree.map(lambda to, new: lax.dynamic_update_slice_in_dim(to, new, at, axis=1), out, scores)
    return index + 1, out, cache, draft_cache

  _, out, _, _ = lax.while_loop(lambda carry: carry[0] * CHUNK < batch.lengths.max() - 1, body, (begin, out, *caches))
  return out


def score_positions(
  logits: Array,
  draft_logits: Array | None,
  drawn: Array,
  watched: Mapping[str, Array],
  stop_ids: Array,
  warp: Warp,
  *,
  expected: bool = False,
) -> Scores:
  """Scores [B, T] of drawn[B, T] under the law of logits[B, T, V] warped.

  watched: int32[B, T, K], ids of which each is a score's event; -1 stands for none. stop_ids: int32[E].
  """
  log_p, p = _law(logits, warp)
  drafted = None if draft_logits is None else _law(fit_vocabulary(draft_logits, logits.shape[-1]), warp)
  law = drafted[1] if drafted is not None and expected else None

  def bounded(f: Array, weights: Array, low: float, high: float) -> Moments:
    """Moments of low <= f[B, T, V] <= high under weights that sum to 1, which need not be p."""
    mean = (weights * f).sum(-1)
    centred = f - mean[..., None]
    square = weights * centred * centred
    value = _at(f, drawn) if law is None else (law * f).sum(-1)
    deviation, variance = value - mean, square.sum(-1)
    third, fourth = (square * centred).sum(-1), (square * centred * centred).sum(-1) - 3 * variance * variance
    least = ROUNDING * (high - low)
    constant = (variance < least * least) & (jnp.abs(deviation) < least)
    deviation, variance, third, fourth = (jnp.where(constant, 0.0, x) for x in (deviation, variance, third, fourth))
    return Moments(deviation, variance, third, fourth, low - mean, high - mean)

  def membership(ids: Array) -> Moments:
    """Moments of "the token is one of ids[B, T, K]"."""
    index = jnp.arange(ids.shape[-1])
    again = (ids[..., :, None] == ids[..., None, :]) & (index[:, None] > index[None])[None, None]
    real = (ids >= 0) & ~again.any(-1)

    def mass(weights: Array) -> Array:
      return jnp.where(real, jnp.take_along_axis(weights, jnp.maximum(ids, 0), axis=-1), 0.0).sum(-1)

    mean = jnp.minimum(mass(p), 1.0)
    variance = mean * (1.0 - mean)
    hit = (real & (ids == drawn[..., None])).any(-1).astype(jnp.float32) if law is None else mass(law)
    return bernoulli(hit - mean, mean, variance)

  moments = {
    "surprise": bounded(jnp.minimum(-log_p, SURPRISE_CLIP), p, 0.0, SURPRISE_CLIP),
    "argmax": membership(_argmax(logits)[..., None]),
    **{name: membership(ids) for name, ids in watched.items()},
  }
  if stop_ids.shape[0]:
    moments["stop"] = membership(jnp.broadcast_to(stop_ids[None, None], (*drawn.shape, stop_ids.shape[0])))
  overlap = accepted = residual = log_q_drawn = None
  if drafted is not None:
    log_q, q = drafted
    ratio = jnp.where(log_q == -jnp.inf, -jnp.inf, log_q - log_p)  # no token that neither has makes it NaN
    clipped = functools.partial(bounded, jnp.clip(ratio, -DRAFT_CLIP, DRAFT_CLIP), low=-DRAFT_CLIP, high=DRAFT_CLIP)
    shared, left = jnp.minimum(p, q), jnp.maximum(p - q, 0.0)
    overlap = shared.sum(-1)
    moments["draft"] = clipped(p)
    accepted, residual = clipped(shared / overlap[..., None]), clipped(left / left.sum(-1, keepdims=True))
    log_q_drawn = _at(log_q, drawn)

  log_p_drawn, logit = _at(log_p, drawn), _at(logits, drawn)
  unfiltered = dataclasses.replace(
    warp, top_k=jnp.zeros_like(warp.top_k), top_p=jnp.ones_like(warp.top_p), min_p=jnp.zeros_like(warp.min_p)
  )
  return Scores(
    moments=moments,
    overlap=overlap,
    accepted=accepted,
    residual=residual,
    log_p=log_p_drawn,
    scaled_log_p=lax.cond(
      (jnp.asarray(warp.top_k) > 0).any() | (jnp.asarray(warp.top_p) < 1).any() | (jnp.asarray(warp.min_p) > 0).any(),
      lambda logits: _at(log_probs(logits, unfiltered), drawn),
      lambda _: log_p_drawn,
      logits,
    ),
    raw_log_p=logit - jax.nn.logsumexp(logits, -1),
    log_q=log_q_drawn,
    single=(log_p > -jnp.inf).sum(-1) == 1,
    above=jnp.where(log_p > log_p_drawn[..., None], p, 0.0).sum(-1),
    tied=jnp.where(log_p == log_p_drawn[..., None], p, 0.0).sum(-1),
    margin=jnp.maximum(jnp.where(p > 0, logits, jnp.inf).min(-1) - logit, 0.0),
    excess=lax.cond(
      (jnp.asarray(warp.top_p) < 1).any() & (log_p_drawn == -jnp.inf).any(),
      _mass_beyond,
      lambda logits, *_: jnp.full_like(logits[..., 0], jnp.inf),
      *(logits, logit, warp),
    ),
  )


def bernoulli(deviation: Any, mean: Any, variance: Any) -> Moments:
  """Of an event of probability `mean`; variance: mean (1 - mean)."""
  third, fourth = variance * (1.0 - 2.0 * mean), variance * (1.0 - 6.0 * variance)
  return Moments(deviation, variance, third, fourth, -mean, 1.0 - mean)


def _law(logits: Array, warp: Warp) -> tuple[Array, Array]:
  """log p and p, both kept: a CPU spends its time here on computing them again for every sum."""
  log_p = log_probs(logits, warp)
  return lax.optimization_barrier((log_p, jnp.exp(log_p)))


def _at(values: Array, tokens: Array) -> Array:
  return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]


def _argmax(logits: Array) -> Array:
  """The lowest id among equals, several times faster on a CPU than argmax."""
  ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  return jnp.where(logits == logits.max(-1, keepdims=True), ids, logits.shape[-1] - 1).min(-1)


def _mass_beyond(logits: Array, logit: Array, warp: Warp) -> Array:
  """Mass of the tokens more likely than one with this logit, before top_p and min_p, less top_p."""
  top_p = jnp.asarray(warp.top_p)[:, None]
  without = dataclasses.replace(warp, top_p=jnp.ones_like(warp.top_p), min_p=jnp.zeros_like(warp.min_p))
  above = jnp.where(logits > logit[..., None], jnp.exp(log_probs(logits, without)), 0.0).sum(-1)
  return jnp.where(top_p < 1, above - top_p, jnp.inf)
