"""Coupled verification (Daliri et al., arXiv 2408.07978): draft and target draw each position from the same noise."""

import jax
from jax import Array

from specjax import warp
from specjax.verify.base import Verdict, declare
from specjax.verify.match import keep_matches


@declare(lossless=True, noise="position")
def coupled(log_p: Array, log_q: Array, draft_tokens: Array, num_drafted: Array, key: Array) -> Verdict:
  """Accepts draft x_i while x_i = y_i = argmax(log p_i + g_i), and emits y_n behind the n accepted drafts.

  g_i is Gumbel noise keyed by the row's key and the absolute position; the drafter has drawn x_i as
  argmax(log q_i + g_i). The probability that a tested draft is accepted is

    sum_i 1 / sum_j max(p(j) / p(i), q(j) / q(i))  >=  (1 - TV) / (1 + TV),  TV = 1 - sum_v min(p(v), q(v)).

  The token at every position is the target's own draw from that position's noise. So the output equals that of plain
  sampling (num_draft_tokens=0 under this rule) with the same key, whatever drafts and however many: a difference is
  numerics, and nothing else. Two generations under one key share their noise, too: give each a key of its own where
  they are to be independent.

  Noise keyed by position is exact here, since no draft decides on what is emitted: reached again in a later round, a
  position gives the same token. Rules that decide by their noise whether to keep a draft (`block`, even for drafts
  further on) would judge a position again by bits that have already decided.

  log_p: float32[gamma+1, V]; log_q: float32[gamma, V], not read; draft_tokens: int32[gamma]; num_drafted: int32 scalar;
  key: key[gamma+1], consumed.
  """
  del log_q
  return keep_matches(jax.vmap(warp.gumbel_argmax)(key, log_p), draft_tokens, num_drafted)
