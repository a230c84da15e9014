"""What an acceptance rule is: a pure function of one row's two laws, its drafts and a key.

A rule knows no model, cache or batch; the sampler maps it over rows. `specjax.verify` looks rules up by name.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from jax import Array


class Verdict(NamedTuple):
  """What one row keeps of a round.

  num_accepted: int32 scalar n, 0 <= n <= num_drafted; the first n drafts are emitted.
  next_token: int32 scalar, emitted behind them: the residual's draw after a rejection, the bonus token otherwise.
  """

  num_accepted: Array
  next_token: Array


class Verifier(Protocol):
  """`(log_p[gamma+1, V], log_q[gamma, V], draft_tokens[gamma], num_drafted, key) -> Verdict`, all for one row.

  log_p: float32, the warped target law at each position of the block; row `num_drafted` is the bonus law.
  log_q: float32, the law each draft was really drawn from.
  num_drafted: int32 scalar; drafts from this index on do not exist.
  key: consumed.
  lossless: whether the emitted tokens follow the target's law.
  """

  lossless: bool

  def __call__(self, log_p: Array, log_q: Array, draft_tokens: Array, num_drafted: Array, key: Array) -> Verdict: ...


def declare(*, lossless: bool) -> Callable[[Callable[..., Verdict]], Verifier]:
  """Decorator: states whether a rule keeps the target's law. Every rule must state it."""

  def mark(rule: Callable[..., Verdict]) -> Verifier:
    marked = cast(Verifier, rule)
    marked.lossless = lossless
    return marked

  return mark
