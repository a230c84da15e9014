"""Why two texts of one prompt part: numerics, another draw from the same law, or a fault.

Both are fed again, each through the graph that drew it and through a reference. Only the first difference is judged:
behind it the two texts are about something else. One token can't show that a law is wrong which gives it mass; many
can, see `specjax.audit`.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import Array

from specjax import checks, keys, warp
from specjax.language_model import LanguageModel
from specjax.numerics.divergence import first_difference, has_law, shared_noise
from specjax.numerics.graphs import REFERENCE, Graph, check_tokens, feed, prepare, unavailable
from specjax.numerics.measure import difference
from specjax.numerics.runs import Run

SAME, PREFIX, NUMERICS, DRAW, FAULT = "same", "prefix", "numerics", "another draw", "fault"
NEVER = 1e-12  # a token of so small a probability was not drawn from that law: 5e-8 a token, were all of 50,000 so
_SUMS = 1e-6  # what a float32 sum of probabilities may be off by


class Decoder(Protocol):
  """What is asked of a tokenizer."""

  def decode(self, ids: Iterable[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class Evidence:
  """One run at the token where the two part.

  graph: that its logits were computed in again. known: whether it is the run's own.
  token: the run's. log_p: of it under the reference: its warped law, or temperature 1 where the run is greedy.
  error: the largest error of a logit of the graph at this position, against the reference, divided by the temperature
    that is not 0.
  margin: by how much the token falls short of the best under the reference, 0 if it is the best: of the logits where
    the run is greedy, of logits / T + noise where its noise is known; None where nothing decides which token it had
    to be.
  repeated: whether the graph gives this token again: its argmax does, or its law with the same noise; where the noise
    isn't known, whether its law has the token.
  possible: whether any logits within `error` of the reference's give this token.
  edge: whether this token, or the best that it falls short of, is inside one of the two laws (the graph's and the
    reference's) and outside the other: where top-k, top-p or min-p cut, a small error takes a whole token away.
  """

  graph: Graph
  known: bool
  token: int
  log_p: float
  error: float
  margin: float | None
  repeated: bool
  possible: bool
  edge: bool = False


@dataclasses.dataclass(frozen=True)
class Explanation:
  """What `explain` found; `str()` puts it in words.

  kind: "same"; "prefix", one run ends where the other goes on; "numerics", argmax or shared noise decide, and the
    errors of these graphs are large enough to turn the decision around; "another draw", both laws have their token, and
    nothing says that the two had to draw the same one; "fault", a token that no logits within the error give.
  at: index of the first generated token that differs, or that one run lacks; None for "same".
  reason: what decided.
  faulty: which of the runs, 0 and 1.
  evidence: of the two runs; empty where no token differs.
  differs: the probability that the two graphs' laws draw different tokens here, with shared noise or without; None
    where nothing is drawn.
  reference: that the graphs were measured against.
  shown: the two tokens as text, with a tokenizer.
  """

  kind: str
  at: int | None
  reason: str
  faulty: tuple[int, ...] = ()
  evidence: tuple[Evidence, ...] = ()
  differs: float | None = None
  reference: Graph | None = None
  shown: tuple[str, ...] = ()

  def __str__(self) -> str:
    where = "" if self.at is None else f" at token {self.at}"
    lines = [f"{self.kind}{where}: {self.reason}"]
    for i, own in enumerate(self.evidence):
      text = f" {self.shown[i]!r}" if self.shown else ""
      graph = str(own.graph) if own.known else f"assumed to be {own.graph}"
      margin = "" if own.margin is None else f", {own.margin:.2g} short of the best" if own.margin else ", the best"
      again = "" if own.repeated else ", not given again"
      drew = f"token {own.token}{text}, p = {np.exp(own.log_p):.2g}{margin}{again}"
      lines.append(f"  {'ab'[i]}: {drew}; {graph}, error {own.error:.2g}")
    if self.reference is not None:
      lines.append(f"  margins, p and errors by {self.reference}")
    if self.differs is not None:
      lines.append(f"  two such draws differ here with probability {self.differs:.2g}")
    return "\n".join(lines)


def explain(
  run_a: Run,
  run_b: Run,
  model: LanguageModel,
  *,
  reference: Graph | None = None,
  eos_id: int | Sequence[int] | None = None,
  tokenizer: Decoder | None = None,
) -> Explanation:
  """Says of the first difference of two runs what it comes from.

  run_a, run_b: of one prompt. A run whose graph isn't known is fed through plain decoding in the model's own dtype.
  model: that both runs claim to come from, in float32 where it can be.
  reference: default: float64 for the decoders of `specjax.models`, else one pass over everything.
  eos_id: tokens that end a run. tokenizer: shows tokens as text.

  A token is a fault if no logits within the error E (the largest of the run's graph at this position, against the
  reference) give it: an argmax, or a winner of log p + g, that is more than 2 E short of the best; a token outside the
  top-k, top-p or min-p support of every such law, or of a probability below 1e-12; text behind a stop token.

  Raises ValueError for runs of different prompts, with tokens outside the vocabulary, or longer than the model's
  context, and for graphs that can't run here.
  """
  if not (isinstance(run_a, Run) and isinstance(run_b, Run) and isinstance(model, LanguageModel)):
    kinds = ", ".join(type(each).__name__ for each in (run_a, run_b, model))
    raise TypeError(f"explain takes two specjax.numerics.Run and a specjax.LanguageModel, got {kinds}.")
  if reference is not None and not isinstance(reference, Graph):
    raise TypeError(f"reference must be a specjax.numerics.Graph or None, got {type(reference).__name__}.")
  runs, stops = (run_a, run_b), checks.stop_ids(eos_id, model.num_ids)
  _check(runs, model)
  at = first_difference(run_a.tokens, run_b.tokens)
  if at is None:
    return _ends(runs, stops)
  tokens = np.concatenate([run_a.prompt, run_a.tokens[: at + 1]])
  reference = reference or (Graph(width=None) if unavailable(model, REFERENCE, len(tokens)) else REFERENCE)
  laws = []
  for label, graph, start in (
    ("the reference", reference, 1),
    *((f"run {name}'s graph", own.graph or Graph(), len(own.prompt)) for name, own in zip("ab", runs, strict=True)),
  ):
    if reason := unavailable(model, graph, len(tokens), start):
      raise ValueError(f"{label}, {graph}, can't run here: {reason}.")
    laws.append(_last(model, graph, tokens, start))
  return judge(run_a, run_b, *laws, reference=reference, stop_ids=stops, tokenizer=tokenizer)


def judge(
  run_a: Run,
  run_b: Run,
  reference_logits: Any,
  logits_a: Any,
  logits_b: Any,
  *,
  reference: Graph | None = None,
  stop_ids: Sequence[int] | np.ndarray = (),
  tokenizer: Decoder | None = None,
) -> Explanation:
  """`explain` for two runs that differ and whose logits [V] at the first difference are at hand already.

  Raises ValueError for runs of different prompts, for logits that have no law or are not float[V] each, and for a token
  that is impossible, -inf, in one of them alone: the errors of such a graph have no size.
  """
  runs = (run_a, run_b)
  _check_prompts(runs)
  at = first_difference(run_a.tokens, run_b.tokens)
  if at is None:
    raise ValueError("the two runs don't differ in any token; explain says how they end.")
  if (gone_on := _gone_on(run_a.tokens[:at], stop_ids)) is not None:
    return gone_on
  r, *own = (np.asarray(x, np.float64) for x in (reference_logits, logits_a, logits_b))
  for name, z in zip(("the reference", "run a's graph", "run b's graph"), (r, *own), strict=True):
    if z.ndim != 1 or z.shape != r.shape:
      raise ValueError(f"{name} gives logits of shape {z.shape}; all must be float[V], the reference's are {r.shape}.")
    if not has_law(z):
      raise ValueError(f"{name} gives logits that are not finite at token {at}: there is no law to explain by.")
    if (lost := np.flatnonzero(np.isneginf(z) != np.isneginf(r))).size:
      raise ValueError(
        f"at token {at} the logit of {lost[0]} is {z[lost[0]]} in {name}, and {r[lost[0]]} by reference."
      )
  for name, run in zip("ab", runs, strict=True):
    if not 0 <= run.tokens[at] < len(r):
      raise ValueError(f"run {name}'s token {run.tokens[at]} is outside the vocabulary, 0 to {len(r) - 1}.")
  evidence = tuple(_evidence(run, at, r, z) for run, z in zip(runs, own, strict=True))
  faulty = tuple(i for i in (0, 1) if not evidence[i].possible)
  decided = all(run.greedy for run in runs) or (_share_noise(*runs) and run_a.warp == run_b.warp)
  return Explanation(
    kind=FAULT if faulty else NUMERICS if decided else DRAW,
    at=at,
    reason=_fault(runs, evidence, faulty) if faulty else _numerics(runs, evidence) if decided else _draw(runs),
    faulty=faulty,
    evidence=evidence,
    differs=_differs(runs, own),
    reference=reference,
    shown=tuple(tokenizer.decode([e.token]) for e in evidence) if tokenizer else (),
  )


def _check_prompts(runs: Sequence[Run]) -> None:
  a, b = (run.prompt for run in runs)
  if not np.array_equal(a, b):
    at = first_difference(a, b)
    where = (
      f"they have {len(a)} and {len(b)} tokens" if at is None else f"token {at} is {a[at]} in one, {b[at]} in the other"
    )
    raise ValueError(f"the runs have different prompts ({where}); give two outputs for one prompt.")


def _check(runs: Sequence[Run], model: LanguageModel) -> None:
  _check_prompts(runs)
  for name, run in zip("ab", runs, strict=True):
    tokens = np.concatenate([run.prompt, run.tokens])
    try:
      check_tokens(model, tokens if len(tokens) > 1 else np.repeat(tokens, 2))
    except ValueError as error:
      raise ValueError(f"run {name}, its prompt of {len(run.prompt)} tokens included: {error}") from error


def _gone_on(common: np.ndarray, stops: Any) -> Explanation | None:
  """Of tokens that both have, and go on behind: a fault of both if one of them ends a text."""
  found = np.flatnonzero(np.isin(common, stops))
  if not found.size:
    return None
  words = f"token {found[0]} of both, {common[found[0]]}, ends a text, and both go on behind it."
  return Explanation(FAULT, int(found[0]) + 1, words, faulty=(0, 1))


def _ends(runs: Sequence[Run], stops: np.ndarray) -> Explanation:
  """Of runs that differ in no token."""
  short, long = sorted((0, 1), key=lambda i: len(runs[i].tokens))
  count, names = len(runs[short].tokens), "ab"
  if (gone_on := _gone_on(runs[short].tokens[:-1], stops)) is not None:
    return gone_on
  if count == len(runs[long].tokens):
    return Explanation(SAME, None, f"all {count} tokens are the same.")
  words = f"run {names[short]} ends after {count} tokens, {{}}; run {names[long]} has {len(runs[long].tokens)}{{}}."
  if count and np.isin(runs[short].tokens[-1], stops):
    reason = words.format(f"with the stop token {runs[short].tokens[-1]}", " and goes on behind it")
    return Explanation(FAULT, count, reason, faulty=(long,))
  if len(runs[long].tokens) == count + 1 and np.isin(runs[long].tokens[-1], stops):
    return Explanation(
      PREFIX, count, words.format("all the same", f", the last of them the stop token {runs[long].tokens[-1]}")
    )
  return Explanation(PREFIX, count, words.format("all the same and no stop token: a limit, or it was cut", ""))


def _last(model: LanguageModel, graph: Graph, tokens: np.ndarray, prompt_length: int) -> np.ndarray:
  """Logits[V] behind the last token but one."""
  *_, (_, out) = feed(prepare(model, graph), graph, tokens, prompt_length)
  return out[-1]


def _evidence(run: Run, at: int, r: np.ndarray, z: np.ndarray) -> Evidence:
  token = int(run.tokens[at])
  temperature = 1.0 if run.greedy else float(run.warp.temperature)
  scores, error = r / temperature, float(np.abs(difference(z, r)).max()) / temperature
  law, graph_law = _law(run, r), _law(run, z)
  noise = None if run.key is None or run.greedy else _noise(run, at, len(r))
  margin, edge = None, False
  if run.greedy:
    log_p = scores[token] - scipy.special.logsumexp(scores)
    margin = _short(scores, token, scores >= -np.inf)
    repeated = int(z.argmax()) == token
    possible = repeated or margin <= 2 * error
  else:
    log_p, has = law[token], bool(np.isfinite(graph_law[token]))
    in_reference = bool(np.isfinite(log_p))
    repeated, possible = has, has or not _excluded(scores, token, run.warp, error)
    edge = possible and not (has and in_reference)
    if noise is None:
      # An error of e changes log p by 2 e at most.
      possible = possible and (not in_reference or log_p + 2 * error > np.log(NEVER))
    else:
      total, kept = scores + noise, np.isfinite(law)
      short = _short(total, token, kept)
      margin = short if in_reference else None
      repeated = int((graph_law + noise).argmax()) == token
      # A better token that the graph's law lacks has not been passed over. Sums with the noise are float32's.
      passed_over = _short(total, token, kept & np.isfinite(graph_law))
      possible = repeated or (possible and passed_over <= 2 * error + _SUMS * float(np.abs(total[kept]).max()))
      edge = edge or passed_over < short
  return Evidence(
    graph=run.graph or Graph(),
    known=run.graph is not None,
    token=token,
    log_p=float(log_p),
    error=error,
    margin=margin,
    repeated=repeated,
    possible=bool(possible),
    edge=bool(edge),
  )


def _short(scores: np.ndarray, token: int, among: np.ndarray) -> float:
  """By how much the token falls short of the best of `among`; 0 if it is as good."""
  return max(0.0, float(scores[among].max(initial=-np.inf) - scores[token]))


def _law(run: Run, logits: np.ndarray) -> np.ndarray:
  """log p float32[V], as the sampler computes it."""
  return np.asarray(_log_probs(jnp.asarray(logits[None], jnp.float32), run.warp.per_row(1)))[0]


_log_probs = jax.jit(warp.log_probs)


def _noise(run: Run, at: int, vocab_size: int) -> np.ndarray:
  """The Gumbel noise float32[V] of `specjax.warp.gumbel_argmax` at a generated token's position."""
  assert run.key is not None
  return np.asarray(_gumbel(run.key, len(run.prompt) + at, vocab_size))


@functools.partial(jax.jit, static_argnames="vocab_size")
def _gumbel(key: Array, position: Array | int, vocab_size: int) -> Array:
  own = jax.random.fold_in(keys.position_keys(key[None])[0], position)
  return jax.random.gumbel(own, (vocab_size,), jnp.float32, mode="high")


def _excluded(scores: np.ndarray, token: int, settings: warp.Warp, slack: float) -> bool:
  """Whether no scores within `slack` of these give the token mass; scores are logits / temperature, float64[V]."""
  top_k, top_p, min_p = (float(np.asarray(x)) for x in (settings.top_k, settings.top_p, settings.min_p))
  if np.isneginf(scores[token]):
    return True
  above = scores > scores[token] + 2 * slack  # in any such law
  count = int(above.sum())
  if 0 < top_k <= count:
    return True
  if top_p < 1:
    # At best for the token, all above lose and what else top-k keeps gains.
    weight = np.exp(scores - scores.max() + np.where(above, -slack, slack))
    others = np.sort(weight[~above])[::-1][: int(top_k) - count if top_k else None]
    if weight[above].sum() >= (top_p + _SUMS) * (weight[above].sum() + others.sum()):
      return True
  return bool(min_p > 0 and scores.max() - scores[token] + np.log(min_p) > 2 * slack + _SUMS)


def _share_noise(a: Run, b: Run) -> bool:
  """Whether both tokens are winners of log p + g with the same g."""
  if a.key is None or b.key is None or a.greedy or b.greedy:
    return False
  same = jax.random.key_impl(a.key) == jax.random.key_impl(b.key)
  return bool(same and np.array_equal(jax.random.key_data(a.key), jax.random.key_data(b.key)))


def _differs(runs: Sequence[Run], logits: Sequence[np.ndarray]) -> float | None:
  if all(run.greedy for run in runs):
    return None
  a, b = (_law(run, z) for run, z in zip(runs, logits, strict=True))
  if _share_noise(*runs):
    return float(shared_noise(a, b).differs)
  return float(1 - (scipy.special.softmax(a.astype(np.float64)) * scipy.special.softmax(b.astype(np.float64))).sum())


def _numerics(runs: Sequence[Run], evidence: Sequence[Evidence]) -> str:
  worst = max((0, 1), key=lambda i: evidence[i].margin or 0.0)
  short, error = evidence[worst].margin or 0.0, evidence[worst].error
  if any(e.edge for e in evidence):
    reason = "a token at the edge of the support (top-k, top-p, min-p) is inside one law and outside the other."
  elif short == 0:
    reason = "the two tokens tie exactly, and a tie may be broken either way."
  else:
    of = "" if runs[worst].greedy else " under this noise"
    reason = f"run {'ab'[worst]}'s token is {short:.2g} short of the best{of}; "
    reason += f"errors of {error:.2g} can turn up to {2 * error:.2g} around."
  if all(e.known and e.repeated for e in evidence):
    reason += " Fed again, each graph gives its own run's token."
  return reason


def _draw(runs: Sequence[Run]) -> str:
  if all(run.greedy == runs[0].greedy for run in runs) and runs[0].warp != runs[1].warp:
    return "the runs were asked for different laws, and each has its token."
  if any(run.greedy for run in runs):
    return "one run takes the best token, the other draws; its law has the token that it drew."
  if any(run.key is None for run in runs):
    return "both laws have their token, and the runs are not known to share their noise."
  return "both laws have their token, and the runs have different keys."


def _fault(runs: Sequence[Run], evidence: Sequence[Evidence], faulty: Sequence[int]) -> str:
  reasons = []
  for i in faulty:
    own = evidence[i]
    if own.margin is not None and own.margin > 2 * own.error:
      what = "argmax" if runs[i].greedy else "the token that its noise gives"
      reason = (
        f"is {own.margin:.2g} short of {what}, and errors of {own.error:.2g} turn at most {2 * own.error:.2g} around"
      )
    elif np.isfinite(own.log_p) and not own.edge:
      reason = f"has a probability of {np.exp(own.log_p):.2g}, and errors of {own.error:.2g} leave it below {NEVER:.0e}"
    else:
      reason = f"has no mass under any law within errors of {own.error:.2g} (top-k, top-p, min-p, or a forbidden token)"
    reasons.append(f"run {'ab'[i]}'s token {reason}.")
  if any(not evidence[i].known for i in faulty):
    reasons.append(
      "Its graph is not known: if it computes in another dtype, say so with Run(graph=Graph(activations=...))."
    )
  return " ".join(reasons)
