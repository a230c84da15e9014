"""Planted faults in drafters: laws that are not the ones drawn from, other warps, keys, caches and lengths."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax import warp
from specjax.audit.engine import Engine, Models
from specjax.audit.mutants.base import Mutant
from specjax.draft import Context, Drafter, ModelDrafter, Proposal
from specjax.draft.base import DraftState
from specjax.language_model import LanguageModel
from specjax.warp import Warp

Rig = Callable[[Drafter, DraftState, Context, int, Warp], Proposal]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rigged:
  """A drafter whose `propose` is replaced by `rig(inner, state, context, num_draft_tokens, warp)`; warp: as asked."""

  inner: Any
  warp: Warp
  rig: Rig = dataclasses.field(metadata={"static": True})

  def init(self, batch: int, max_length: int) -> DraftState:
    return self.inner.init(batch, max_length)

  def prefill(self, state: DraftState, tokens: Array, lengths: Array, chunk: int) -> DraftState:
    return self.inner.prefill(state, tokens, lengths, chunk)

  def propose(self, state: DraftState, context: Context, num_draft_tokens: int) -> Proposal:
    return self.rig(self.inner, state, context, num_draft_tokens, self.warp)


def rigged(rig: Rig) -> Engine:
  def models(target: LanguageModel, drafter: Drafter, warp: Warp) -> Models:
    return target, Rigged(drafter, warp, rig), warp

  return Engine(models=models)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RiggedContext(Context):
  """Draws by `rigged_draw(context, index, log_q)` in place of `Context.draw`."""

  rigged_draw: Callable[[Context, Any, Array], Array] = dataclasses.field(
    default=Context.draw, metadata={"static": True}
  )

  def draw(self, index: Array | int, log_q: Array) -> Array:
    return self.rigged_draw(Context(**_fields(self)), index, log_q)


def _fields(context: Context) -> dict[str, Any]:
  return {field.name: getattr(context, field.name) for field in dataclasses.fields(Context)}


def draws(rigged_draw: Callable[[Context, Any, Array], Array]) -> Rig:
  """The law that is declared stays; the drafts come from elsewhere."""

  def rig(inner: Drafter, state: DraftState, context: Context, gamma: int, asked: Warp) -> Proposal:
    del asked
    return inner.propose(state, RiggedContext(**_fields(context), rigged_draw=rigged_draw), gamma)

  return rig


def _argmax(context, index, log_q):
  return log_q.argmax(-1).astype(jnp.int32)


def _top_2(context, index, log_q):
  return context.draw(index, warp.log_probs(log_q, Warp(top_k=2).per_row(len(log_q))))


def _rounded(context, index, log_q):
  # No conversion there and back, which XLA may leave out.
  return context.draw(index, lax.reduce_precision(log_q, exponent_bits=5, mantissa_bits=1))


def _same_key(context, index, log_q):
  return context.draw(0 * index, log_q)


def _declared_before_the_warp(inner, state, context, gamma, asked):
  """The law is declared as the model has it; the drafts are drawn under the warp."""
  without = dataclasses.replace(context, warp=Warp().per_row(len(context.length)))
  rig = draws(lambda plain, index, log_q: plain.draw(index, warp.log_probs(log_q, asked)))
  return rig(inner, state, without, gamma, asked)


def _without_temperature(inner, state, context, gamma, asked):
  one = jnp.where(asked.temperature > 0, 1.0, asked.temperature)
  return inner.propose(state, dataclasses.replace(context, warp=dataclasses.replace(asked, temperature=one)), gamma)


def _as_asked(inner, state, context, gamma, asked):
  return inner.propose(state, dataclasses.replace(context, warp=asked), gamma)


def _top_p_for_drafts_alone(target: LanguageModel, drafter: Drafter, asked: Warp) -> Models:
  return target, Rigged(drafter, asked, _as_asked), dataclasses.replace(asked, top_p=jnp.ones_like(asked.top_p))


def _stops_at_an_unlikely_draft(inner, state, context, gamma, asked):
  """Drops the first draft of q <= .5 and what follows."""
  proposal = inner.propose(state, context, gamma)
  likely = jnp.exp(warp.pick(proposal.log_q, proposal.tokens)) > 0.5
  count = jnp.cumprod(likely.astype(jnp.int32), axis=1).sum(-1)
  return dataclasses.replace(proposal, num_drafted=jnp.minimum(count, proposal.num_drafted))


def _cuts_its_vocabulary(inner, state, context, gamma, asked):
  """Draws from all tokens of the draft model, and makes those that the target lacks its last one."""
  size = inner.model.vocab_size
  proposal = inner.propose(state, dataclasses.replace(context, vocab_size=size), gamma)
  size = context.vocab_size
  return dataclasses.replace(proposal, tokens=jnp.minimum(proposal.tokens, size - 1), log_q=proposal.log_q[..., :size])


def _same_keys_every_round(inner, state, context, gamma, asked):
  row = jnp.arange(len(context.length))
  return inner.propose(state, dataclasses.replace(context, key=row_keys(jax.random.key(0), row)), gamma)


def row_keys(key: Array, row: Array) -> Array:
  return jax.vmap(jax.random.fold_in, (None, 0))(key, row)


def _forgets_the_last_draft(inner, state, context, gamma, asked):
  """Feeds the last token alone, where the one before it may be a draft that the model has not seen."""
  model, last = inner.model, context.length - 1

  def apply(params, tokens, cache, start):
    if tokens.shape[1] != 2:  # drafts after the first are fed one by one
      return model.apply(params, tokens, cache, start)
    token = jnp.take_along_axis(tokens, (last - start)[:, None], axis=1)
    logits, cache = model.apply(params, token, cache, last)
    return jnp.concatenate([logits, logits], axis=1), cache

  return ModelDrafter(dataclasses.replace(model, apply=apply)).propose(state, context, gamma)


def _reads_one_position_late(inner, state, context, gamma, asked):
  model = inner.model

  def apply(params, tokens, cache, start):
    return model.apply(params, tokens, cache, start + 1)

  return ModelDrafter(dataclasses.replace(model, apply=apply)).propose(state, context, gamma)


JOINT, LAWS, DECLARED = "joint law", "fresh laws", "declared law"

MUTANTS = (
  Mutant("argmax drafts, soft q", "drafts the likeliest token and declares the law it was taken from", True, DECLARED,
         rigged(draws(_argmax))),
  Mutant("q before top-k", "draws from the two likeliest tokens and declares all", True, DECLARED,
         rigged(draws(_top_2))),
  Mutant("q before the warp", "draws under the warp and declares the law without it", True, LAWS,
         rigged(_declared_before_the_warp)),
  Mutant("drafts in low precision", "draws from rounded logits and declares those before", True, DECLARED,
         rigged(draws(_rounded))),
  Mutant("temperature for p alone", "drafts at temperature 1, and says so", False, LAWS,
         rigged(_without_temperature)),
  Mutant("top-p for q alone", "the target's law keeps its tail", True, LAWS, Engine(models=_top_p_for_drafts_alone)),
  Mutant("anticipating draft length", "drops a draft because of its own value", True, JOINT,
         rigged(_stops_at_an_unlikely_draft)),
  Mutant("padded vocabulary cut late", "drafts tokens the target lacks, and calls them its last one", True,
         "padded vocabulary", rigged(_cuts_its_vocabulary)),
  Mutant("one key for all drafts", "all drafts of a round are drawn from the same bits", True, DECLARED,
         rigged(draws(_same_key))),
  Mutant("draft keys without the round", "every round drafts from the same bits", True, JOINT,
         rigged(_same_keys_every_round)),
  Mutant("draft cache lacks the last draft", "after full acceptance the draft model has not seen its last token", False,
         "own draft", rigged(_forgets_the_last_draft)),
  Mutant("draft positions one late", "what is drafted is fed one slot too far", False, LAWS,
         rigged(_reads_one_position_late)),
)  # fmt: skip
