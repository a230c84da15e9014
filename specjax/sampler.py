"""Speculative sampling: `init` a state, `step` it round by round, or `sample` whole generations in one program.

A round drafts up to gamma tokens, scores them in one target pass, keeps a prefix and adds one token (arXiv 2211.17192).
`num_draft_tokens=0` makes the same loop plain autoregressive sampling. Between rounds, for every row:

  * `tokens[:length]` is final;
  * the target's cache holds positions < length-1; the last token has not been fed yet;
  * what buffers and caches hold behind that is garbage.

Checks of the caller's values live in `specjax.checks`; acceptance rules, drafters and models in their own modules.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from specjax import checks, keys, verify
from specjax.checks import PREFILL_CHUNK, Request
from specjax.draft.base import Context, Drafter, DraftState, Proposal
from specjax.draft.none import NoDrafter
from specjax.fixed_graph import require_row_independence
from specjax.keys import Purpose
from specjax.language_model import Cache, LanguageModel, cache_specs, empty_cache, laws_spec, place_laws, prefill, run
from specjax.placement import ROWS, PartitionSpec
from specjax.result import SampleResult, Stats
from specjax.verify import Verdict, Verifier
from specjax.warp import DEFAULT_WARP, Warp, log_probs, pick


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpecState:
  """A batch of generations between two rounds. B rows, L slots, gamma = num_draft_tokens."""

  # Evolving.
  length: Array  # int32[B], prompt included
  finished: Array  # bool[B]
  round: Array  # int32[B], rounds this row took part in; seeds the next round's draws
  target_cache: Cache
  draft_state: DraftState
  # Settings.
  key: Array  # key[B]
  limit: Array  # int32[B], length at which the row ends
  warp: Warp  # fields of shape [B]
  stop_ids: Array  # int32[E]
  # Statistics; of emitted tokens only.
  prompt_length: Array  # int32[B]
  drafted: Array  # int32[B]
  accepted: Array  # int32[B]
  tested: Array  # int32[B, gamma], how often draft i of a round was put to the test
  accepted_at: Array  # int32[B, gamma], how often it passed
  overlap: Array  # float32[B], sum over tested drafts of sum_v min(p, q)
  # Buffers. The last slot takes the writes of what is not emitted.
  tokens: Array  # int32[B, L]
  logprobs: Array  # float32[B, L], log p of generated tokens

  def result(self) -> SampleResult:
    """What `sample` returns, at any age of the state; buffers in full length. Leading axes of a `vmap` stay."""
    final = lax.broadcasted_iota(jnp.int32, self.tokens.shape, self.tokens.ndim - 1) < self.length[..., None]
    return SampleResult(
      tokens=jnp.where(final, self.tokens, 0),
      lengths=self.length,
      logprobs=jnp.where(final, self.logprobs, 0.0),
      stats=Stats(
        rounds=self.round,
        generated=self.length - self.prompt_length,
        drafted=self.drafted,
        accepted=self.accepted,
        tested=self.tested,
        accepted_at=self.accepted_at,
        overlap=self.overlap,
      ),
    )


class RoundInfo(NamedTuple):
  """What happened in one round.

  tokens: int32[B, gamma+1], accepted drafts and then the next token; the first `num_emitted` were emitted.
  num_emitted: int32[B]; 0 for a row that had finished.
  num_drafted, num_accepted: int32[B], as the verifier saw and said; a verdict that can't be counts as 0.
  log_p: float32[B, gamma+1, V], the target's laws, NaN after such a verdict.
  log_q: float32[B, gamma, V], the drafter's laws.
  draft_tokens: int32[B, gamma].
  """

  tokens: Array
  num_emitted: Array
  num_drafted: Array
  num_accepted: Array
  log_p: Array
  log_q: Array
  draft_tokens: Array


def init(
  target: LanguageModel,
  drafter: Drafter | None,
  prompt_tokens: ArrayLike,
  *,
  key: Array,
  prompt_lengths: ArrayLike | None = None,
  max_new_tokens: ArrayLike = 128,
  num_draft_tokens: int = 4,
  warp: Warp = DEFAULT_WARP,
  eos_id: int | Sequence[int] | None = None,
  max_length: int | None = None,
  prefill_chunk: int = PREFILL_CHUNK,
) -> SpecState:
  """Reads the prompts, in a compiled program, and returns the state before the first round.

  The arguments are those of `sample`, with the same defaults and checks; `num_draft_tokens` holds for every `step` of
  the state. Under an outer `jit` or `vmap`, `max_new_tokens` may be traced where `max_length` is given. Its value can't
  be looked at then: a row ends at `max_length - num_draft_tokens - 1` tokens if its limit lies beyond (`state.limit`).
  """
  request, _ = checks.request(
    target, drafter, prompt_tokens, key, prompt_lengths, max_new_tokens, num_draft_tokens, warp, eos_id, max_length,
    prefill_chunk,
  )  # fmt: skip
  return _start(request)


def step(
  state: SpecState, target: LanguageModel, drafter: Drafter | None, *, verifier: str | Verifier = "token"
) -> tuple[SpecState, RoundInfo]:
  """One round of every unfinished row; finished rows stay as they are. Pure; run it under `jax.jit`.

  state: of `init` with the same target and drafter, or of a `step`. verifier: static, a name or a function.
  Returns the state and what happened: see `RoundInfo`.

  Raises TypeError or ValueError, while it is traced, for a state that is none, and for a model, a drafter or a rule
  that returns other types than it must. Values can't be looked at then, but a wrong one shows as a NaN in `logprobs`:
  where `num_accepted` is outside 0..`num_drafted` no draft is kept and `next_token` is emitted so marked; one outside
  the vocabulary is marked, too.
  """
  if not isinstance(state, SpecState):
    raise TypeError(f"state must be a specjax.SpecState, got {type(state).__name__}: make one with specjax.init(...).")
  proposer, rule = checks.models(target, drafter, state.tested.shape[1]), verify.get(verifier)
  one_round = functools.partial(_step, rule=rule)
  if target.placement is not None:
    specs = lambda: (state_specs(state, target, proposer), _info_specs(state, target))  # noqa: E731
    one_round = target.placement.automatic(one_round, specs)
  return one_round(state, target, proposer)


def _step(state: SpecState, target: LanguageModel, drafter: Any, *, rule: Verifier) -> tuple[SpecState, RoundInfo]:
  proposal = _draft(state, target, drafter, state.tested.shape[1], rule)
  log_p, target_cache = _score(state, target, proposal)
  verdict = _verify(state, log_p, proposal, rule)
  checks.verdict(rule, verdict, log_p.shape[0])
  verdict, log_p = _void_impossible(verdict, proposal, log_p)
  state = dataclasses.replace(state, target_cache=target_cache, draft_state=proposal.state)
  state, info = _commit(state, proposal, log_p, verdict)
  return _place(state, target, drafter), info


def sample(
  target: LanguageModel,
  drafter: Drafter | None,
  prompt_tokens: ArrayLike,
  *,
  key: Array,
  prompt_lengths: ArrayLike | None = None,
  max_new_tokens: ArrayLike = 128,
  num_draft_tokens: int = 4,
  warp: Warp = DEFAULT_WARP,
  verifier: str | Verifier = "token",
  eos_id: int | Sequence[int] | None = None,
  max_length: int | None = None,
  prefill_chunk: int = PREFILL_CHUNK,
  fixed_graph: bool = False,
) -> SampleResult:
  """Samples whole generations in one compiled program.

  target, drafter: pytrees; `drafter` may be None where `num_draft_tokens` is 0.
  prompt_tokens: int32[B, P], right-padded; prompt_lengths: int32[B], default P for every row.
  key: one typed key, of which row b takes `fold_in(key, b)`, or key[B].
  max_new_tokens: an int or int32[B]. Dynamic.
  num_draft_tokens: gamma, static; 0 is plain autoregressive sampling by the same loop.
  warp: the sampling law; dynamic.
  verifier: the name of an acceptance rule, or a function that declares `lossless`.
  eos_id: tokens that end a row (they are emitted), such as `tokenizer.eos_ids`.
  max_length: slots of the buffers; default: what is needed, rounded up to a power of two, so that one program serves
    every prompt length and limit in a bucket.
  prefill_chunk: static; prompt tokens a pass.
  fixed_graph: static; plain sampling, through the passes of speculative sampling: each has num_draft_tokens + 1 rows,
    of which one counts. Nothing is drafted; `drafter` is not used and may be None. The text is then that of a
    speculative run with as many drafts, bit for bit, where both are greedy or both follow the "coupled" rule (under one
    key): see `specjax.fixed_graph`.

  Returns tokens int32[B, P + max(max_new_tokens)], lengths, logprobs and statistics: see `SampleResult`.
  Raises ValueError or TypeError, before anything is compiled, for a value that is out of range. Inside an outer
  `jax.jit` values can't be looked at: shapes and types alone are checked there. Raises RuntimeError for `fixed_graph`
  on a backend that was tried and can't give equal bits.
  """
  rule = verify.get(verifier)
  if not isinstance(fixed_graph, bool):
    raise TypeError(f"fixed_graph={fixed_graph!r} must be True or False: it is static.")
  drafter = NoDrafter() if fixed_graph else drafter
  request, width = checks.request(
    target, drafter, prompt_tokens, key, prompt_lengths, max_new_tokens, num_draft_tokens, warp, eos_id, max_length,
    prefill_chunk,
  )  # fmt: skip
  if width is None:
    raise TypeError(
      "max_new_tokens is traced, but it decides the shape of the result: pass an int or a numpy array (close over it "
      "or make it a static argument); within a program use specjax.init and specjax.step, whose limit is dynamic."
    )
  if fixed_graph:
    batch, max_length = request.tokens.shape
    require_row_independence(target, batch, max_length, request.num_draft_tokens)
  return _sample(request, verifier=rule).cut(width)


@functools.partial(jax.jit, static_argnames="verifier")
def _sample(request: Request, *, verifier: Verifier) -> SampleResult:
  def generate(request: Request) -> SampleResult:
    state = lax.while_loop(
      lambda state: ~state.finished.all(),
      lambda state: step(state, request.target, request.drafter, verifier=verifier)[0],
      _start(request),
    )
    return state.result()

  if (placement := request.target.placement) is not None:
    generate = placement.automatic(generate, lambda: placement.specs(request.prompt_lengths, ROWS))
  return generate(request)


@jax.jit  # the loop over the prompt's passes would compile anew at every call
def _start(request: Request) -> SpecState:
  target, drafter, start = request.target, request.drafter, _read_prompts
  if (placement := target.placement) is not None:
    shapes = lambda: jax.eval_shape(placement.automatic(_read_prompts, PartitionSpec), request)  # noqa: E731
    start = placement.automatic(_read_prompts, lambda: state_specs(shapes(), target, drafter))
  return start(request)


@jax.named_scope("prompt")
def _read_prompts(request: Request) -> SpecState:
  target, drafter, lengths, tokens = request.target, request.drafter, request.prompt_lengths, request.tokens
  gamma, chunk, (batch, max_length) = request.num_draft_tokens, request.prefill_chunk, tokens.shape
  if (placement := target.placement) is not None:
    lengths, tokens = placement.constrain((lengths, tokens), placement.specs((lengths, tokens), ROWS))
  tokens = jnp.where(jnp.arange(max_length)[None] < lengths[:, None], tokens, 0)

  fed = lengths - 1
  target_cache = prefill(target, empty_cache(target, batch, max_length), tokens, fed, chunk)
  draft_state = drafter.prefill(drafter.init(batch, max_length), tokens, fed, chunk) if gamma else ()

  count = jnp.zeros(batch, jnp.int32)
  count_at = jnp.zeros((batch, gamma), jnp.int32)
  state = SpecState(
    length=lengths,
    finished=lengths >= request.limit,
    round=count,
    target_cache=target_cache,
    draft_state=draft_state,
    key=keys.row_keys(request.key, batch),
    limit=request.limit,
    warp=request.warp,
    stop_ids=request.stop_ids,
    prompt_length=lengths,
    drafted=count,
    accepted=count,
    tested=count_at,
    accepted_at=count_at,
    overlap=jnp.zeros(batch, jnp.float32),
    tokens=tokens,
    logprobs=jnp.zeros((batch, max_length), jnp.float32),
  )
  return _place(state, target, drafter)


def _place(state: SpecState, target: LanguageModel, drafter: Drafter | None) -> SpecState:
  """The state with every array where it belongs on the target's mesh, if it has one."""
  if target.placement is None:
    return state
  return target.placement.constrain(state, state_specs(state, target, drafter))


def state_specs(state: SpecState, target: LanguageModel, drafter: Drafter | None) -> Any:
  """Mesh axes of every array of a state: rows are split, caches are as their models say."""
  assert target.placement is not None
  own = getattr(drafter, "specs", None)
  return dataclasses.replace(
    target.placement.specs(state, ROWS),
    target_cache=cache_specs(target, state.target_cache),
    stop_ids=PartitionSpec(),
    **({} if own is None or (specs := own(state.draft_state)) is None else {"draft_state": specs}),
  )


def _info_specs(state: SpecState, target: LanguageModel) -> RoundInfo:
  """Mesh axes of a round's info."""
  assert target.placement is not None
  (batch, gamma), vocab_size = state.tested.shape, target.vocab_size
  rows: Any = target.placement.specs(state.length, ROWS)
  log_p, log_q = laws_spec(target, (batch, gamma + 1, vocab_size)), laws_spec(target, (batch, gamma, vocab_size))
  return RoundInfo(rows, rows, rows, rows, log_p, log_q, rows)


@jax.named_scope("draft")
def _draft(state: SpecState, target: LanguageModel, drafter: Drafter, gamma: int, rule: Verifier) -> Proposal:
  """Up to gamma drafts a row; no more than the row still has room for beside the next token."""
  batch = state.length.shape[0]
  if gamma == 0:
    return Proposal(
      tokens=jnp.zeros((batch, 0), jnp.int32),
      log_q=jnp.zeros((batch, 0, target.vocab_size), jnp.float32),
      num_drafted=jnp.zeros(batch, jnp.int32),
      state=state.draft_state,
    )
  context = Context(
    tokens=state.tokens,
    length=state.length,
    key=_keys(state, rule, Purpose.DRAFT),
    warp=state.warp,
    target_cache=state.target_cache,
    vocab_size=target.vocab_size,
    shares_noise=verify.shares_noise(rule),
  )
  proposal = drafter.propose(state.draft_state, context, gamma)
  checks.proposal(drafter, proposal, state.draft_state, (batch, gamma, target.vocab_size))
  room = jnp.maximum(state.limit - state.length - 1, 0)
  num_drafted = jnp.where(state.finished, 0, jnp.minimum(proposal.num_drafted, room))
  return dataclasses.replace(proposal, log_q=place_laws(target, proposal.log_q), num_drafted=num_drafted)


@jax.named_scope("target")
def _score(state: SpecState, target: LanguageModel, proposal: Proposal) -> tuple[Array, Cache]:
  """The target's warped laws log p[B, gamma+1, V] at every draft and behind the last, in one pass."""
  last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
  block = jnp.concatenate([last, proposal.tokens], axis=1)
  logits, cache = run(target, block, state.target_cache, state.length - 1)
  return log_probs(logits, state.warp), cache


@jax.named_scope("verify")
def _verify(state: SpecState, log_p: Array, proposal: Proposal, rule: Verifier) -> Verdict:
  key = _keys(state, rule, Purpose.VERIFY)
  if verify.shares_noise(rule):
    positions = state.length[:, None] + jnp.arange(log_p.shape[1])[None]
    key = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(key, positions)
  return jax.vmap(rule)(log_p, proposal.log_q, proposal.tokens, proposal.num_drafted, key)


def _keys(state: SpecState, rule: Verifier, purpose: Purpose) -> Array:
  """key[B], the bits of this round and purpose; of all rounds and both purposes where the rule shares its noise."""
  if verify.shares_noise(rule):
    return keys.position_keys(state.key)
  return jax.vmap(keys.fold, (0, None))(keys.round_keys(state.key, state.round), purpose)


def _void_impossible(verdict: Verdict, proposal: Proposal, log_p: Array) -> tuple[Verdict, Array]:
  """Counts that can't be keep no draft, and their row's laws are NaN: the state stays whole, and the fault shows."""
  n, num_drafted, gamma = verdict.num_accepted, proposal.num_drafted, proposal.tokens.shape[1]
  possible = (n >= 0) & (n <= num_drafted) & (num_drafted <= gamma)
  verdict = verdict._replace(num_accepted=jnp.where(possible, n, 0))
  return verdict, jnp.where(possible[:, None, None], log_p, jnp.nan)


@jax.named_scope("commit")
def _commit(state: SpecState, proposal: Proposal, log_p: Array, verdict: Verdict) -> tuple[SpecState, RoundInfo]:
  """Emits the accepted drafts and the next token, up to a stop token or the row's limit, and counts what it emits."""
  gamma = proposal.tokens.shape[1]
  index = jnp.arange(gamma + 1)[None]
  num_accepted = verdict.num_accepted[:, None]
  block = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
  block = jnp.where(index < num_accepted, block, verdict.next_token[:, None])

  is_stop = (block[:, :, None] == state.stop_ids[None, None]).any(-1) & (index <= num_accepted)
  first_stop = jnp.where(is_stop, index, gamma + 1).min(-1)
  num_emitted = jnp.minimum(jnp.minimum(verdict.num_accepted, first_stop) + 1, state.limit - state.length)
  num_emitted = jnp.where(state.finished, 0, num_emitted)
  emitted = index < num_emitted[:, None]

  slot = jnp.where(emitted, state.length[:, None] + index, state.tokens.shape[1] - 1)
  write = jax.vmap(lambda row, slot, new: row.at[slot].set(new))  # rows that devices share stay where they are
  tokens = write(state.tokens, slot, block)
  logprobs = write(state.logprobs, slot, pick(log_p, block))

  draft = index[:, :gamma]
  drafted = emitted[:, :gamma] & (draft < proposal.num_drafted[:, None])
  tested = drafted & (draft <= num_accepted)
  accepted = drafted & (draft < num_accepted)
  overlap = jnp.exp(jnp.minimum(log_p[:, :gamma], proposal.log_q)).sum(-1)
  # Drafts behind a rejection were drafted in vain and count; those behind an accepted stop token never mattered.
  num_drafted = jnp.where(first_stop < verdict.num_accepted, drafted.sum(-1), proposal.num_drafted)

  length = state.length + num_emitted
  info = RoundInfo(
    tokens=block,
    num_emitted=num_emitted,
    num_drafted=proposal.num_drafted,
    num_accepted=verdict.num_accepted,
    log_p=log_p,
    log_q=proposal.log_q,
    draft_tokens=proposal.tokens,
  )
  state = dataclasses.replace(
    state,
    length=length,
    finished=state.finished | (first_stop < num_emitted) | (length >= state.limit),
    round=state.round + (~state.finished).astype(jnp.int32),
    drafted=state.drafted + num_drafted,
    accepted=state.accepted + accepted.sum(-1),
    tested=state.tested + tested.astype(jnp.int32),
    accepted_at=state.accepted_at + accepted.astype(jnp.int32),
    overlap=state.overlap + jnp.where(tested, overlap, 0.0).sum(-1),
    tokens=tokens,
    logprobs=logprobs,
  )
  return state, info
