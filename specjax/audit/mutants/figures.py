"""Planted faults in what is reported: the text is right, the figures beside it are not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import keys, warp
from specjax.audit.engine import Engine
from specjax.audit.mutants.base import Mutant
from specjax.audit.mutants.rules import own_uniforms, strictly
from specjax.keys import Purpose
from specjax.result import SampleResult, Stats
from specjax.sampler import RoundInfo, SpecState


def _what_was_cut_off(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
  accepted = jnp.where(info.num_emitted > 0, info.num_accepted, 0)
  return dataclasses.replace(state, accepted=before.accepted + accepted)


def _every_pass(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
  """Adds up what would have been accepted one by one: the mask (1, 0, 1, 1) counts 3."""
  gamma = info.draft_tokens.shape[1]
  key = jax.vmap(keys.fold, (0, None))(keys.round_keys(before.key, before.round), Purpose.VERIFY)
  u = jax.vmap(own_uniforms, (0, None))(key, gamma)
  p, q = (jnp.exp(warp.pick(laws[:, :gamma], info.draft_tokens)) for laws in (info.log_p, info.log_q))
  passed = strictly(u, p, q) & (jnp.arange(gamma)[None] < info.num_drafted[:, None])
  return dataclasses.replace(state, accepted=before.accepted + passed.sum(-1))


def _finished_rows_too(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
  return dataclasses.replace(state, round=before.round + 1)


def _gamma_every_round(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
  gamma = info.draft_tokens.shape[1]
  return dataclasses.replace(state, drafted=before.drafted + jnp.where(info.num_emitted > 0, gamma, 0))


def _overlap_of_all(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
  gamma = info.draft_tokens.shape[1]
  overlap = jnp.minimum(jnp.exp(info.log_p[:, :gamma]), jnp.exp(info.log_q)).sum((-1, -2))
  return dataclasses.replace(state, overlap=before.overlap + jnp.where(info.num_emitted > 0, overlap, 0.0))


class MeansOfRatios(Stats):
  """Averages the ratios of rows, long and short ones alike."""

  @property
  def acceptance_rate(self) -> Array:
    return np.nanmean(self.accepted / self.drafted)  # type: ignore[bad-return]

  @property
  def block_efficiency(self) -> Array:
    return np.nanmean(self.generated / self.rounds)  # type: ignore[bad-return]


def _means_of_ratios(result: SampleResult) -> SampleResult:
  stats = {field.name: getattr(result.stats, field.name) for field in dataclasses.fields(Stats)}
  return dataclasses.replace(result, stats=MeansOfRatios(**stats))


def _no_logprobs(result: SampleResult) -> SampleResult:
  return dataclasses.replace(result, logprobs=result.logprobs * 0)


def _logprobs_of_q(before: SpecState, state: SpecState, info: RoundInfo) -> SpecState:
  """Reports accepted drafts with the draft's log-probability."""
  gamma = info.draft_tokens.shape[1]
  index = jnp.arange(gamma)[None]
  kept = index < jnp.minimum(info.num_accepted, info.num_emitted)[:, None]
  slot = jnp.where(kept, before.length[:, None] + index, state.tokens.shape[1] - 1)
  row = jnp.arange(len(slot))[:, None]
  drafted = warp.pick(info.log_q, info.draft_tokens)
  return dataclasses.replace(state, logprobs=state.logprobs.at[row, slot].set(drafted))


COUNTS, LOGPROBS = "counts", "logprobs"

MUTANTS = tuple(
  Mutant(name, description, False, check, engine)
  for name, description, check, engine in (
    ("counts what was cut off", "accepted drafts behind a stop or the limit count", COUNTS,
     Engine(after=_what_was_cut_off)),
    ("counts passes behind a rejection", "drafts count that were never emitted", COUNTS, Engine(after=_every_pass)),
    ("finished rows go on counting", "rounds of the batch, not of the row", COUNTS, Engine(after=_finished_rows_too)),
    ("gamma drafts every round", "counts drafts that were not made", COUNTS, Engine(after=_gamma_every_round)),
    ("alpha of untested drafts", "averages behind a rejection, too", COUNTS, Engine(after=_overlap_of_all)),
    ("means of ratios", "a row of 10 tokens weighs as much as one of 4000", COUNTS, Engine(report=_means_of_ratios)),
    ("log-probabilities 0", "reports 0 for every token", LOGPROBS, Engine(report=_no_logprobs)),
    ("log-probabilities of q", "reports drafts with the draft's", LOGPROBS, Engine(after=_logprobs_of_q)),
  )
)  # fmt: skip
