"""One round of a bare acceptance rule: simulated by the hundred thousand, and enumerated.

The laws depend on the drafted path. The oracles are the papers' definitions in float64; none shares code with a rule.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from specjax import verify, warp
from specjax.verify import Verifier

DRAWS = 100_000

Outcome = tuple[int, ...]  # the accepted drafts, then the next token
Oracle = Callable[[np.ndarray, np.ndarray, Outcome], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Laws:
  """p[i] and q[i], float64[V, ..., V] with i + 1 axes: the law at position i given the i tokens before it.

  `p` has one position more than `q`.
  """

  p: tuple[np.ndarray, ...]
  q: tuple[np.ndarray, ...]

  @property
  def gamma(self) -> int:
    return len(self.q)

  @property
  def vocab_size(self) -> int:
    return self.p[0].shape[-1]

  def along(self, path: Outcome) -> tuple[np.ndarray, np.ndarray]:
    """p[n+1, V] and q[n, V] along a path of n drafts."""
    n = len(path)
    return (
      np.stack([self.p[i][path[:i]] for i in range(n + 1)]),
      np.stack([self.q[i][path[:i]] for i in range(n)]) if n else np.zeros((0, self.vocab_size)),
    )


def random_laws(seed: int, vocab_size: int = 3, gamma: int = 3, spread: float = 1.5) -> Laws:
  rng = np.random.default_rng(seed)

  def law(depth: int) -> np.ndarray:
    weights = np.exp(spread * rng.normal(size=(vocab_size,) * (depth + 1)))
    return weights / weights.sum(-1, keepdims=True)

  return Laws(tuple(law(i) for i in range(gamma + 1)), tuple(law(i) for i in range(gamma)))


def context_free(p, q, gamma: int = 3) -> Laws:
  """The same p[V] and q[V] at every position."""

  def repeat(law, depth: int) -> np.ndarray:
    law = np.asarray(law, float)
    return np.broadcast_to(law, (len(law),) * depth + law.shape)

  return Laws(tuple(repeat(p, i) for i in range(gamma + 1)), tuple(repeat(q, i) for i in range(gamma)))


def by_position(p, q) -> Laws:
  """The laws p[gamma+1, V] and q[gamma, V], whatever was drafted before."""
  return Laws(
    tuple(context_free(row, row, i).p[i] for i, row in enumerate(p)),
    tuple(context_free(row, row, i).p[i] for i, row in enumerate(q)),
  )


def one_hot(tables: tuple[np.ndarray, ...], seed: int = 0) -> tuple[np.ndarray, ...]:
  """Laws of the same shapes that are certain: of another token in every context."""
  rng = np.random.default_rng(seed)
  return tuple(np.eye(table.shape[-1])[rng.integers(table.shape[-1], size=table.shape[:-1])] for table in tables)


# All of one shape, and so one program a rule.
CASES = {
  "soft": random_laws(0),
  "sharp": random_laws(1, spread=5.0),
  "one-hot draft": Laws(random_laws(2).p, one_hot(random_laws(2).q)),
  "one-hot target": Laws(one_hot(random_laws(3).p), random_laws(3).q),
  "equal": Laws(random_laws(4).p, random_laws(4).p[:3]),
  "disjoint": context_free([0.0, 0.4, 0.6], [1.0, 0.0, 0.0]),
  "each lacks a token": context_free([0.0, 0.5, 0.5], [0.6, 0.0, 0.4]),
}


def simulate(rule: Verifier | Partial, laws: Laws, num_drafted: int | None = None, *, seed: int = 0):
  """Counter of the outcomes of DRAWS rounds. The arguments of a `Partial` are dynamic: one program for all of them."""
  drafts, verdict = run(rule, laws, num_drafted, seed=seed)
  accepted = np.asarray(verdict.num_accepted)
  # What was not accepted is not part of the outcome.
  drafts = np.where(np.arange(laws.gamma) < accepted[:, None], drafts, -1)
  rows, counts = np.unique(np.c_[drafts, accepted, verdict.next_token], axis=0, return_counts=True)
  return Counter({(*row[: row[-2]], row[-1]): count for row, count in zip(rows.tolist(), counts.tolist(), strict=True)})


def run(rule: Verifier | Partial, laws: Laws, num_drafted: int | None = None, *, seed: int = 0):
  """drafts[DRAWS, gamma] and Verdict[DRAWS]; rules see the same drafts, and the same key a round, under one seed."""
  tables = jax.tree.map(lambda table: jnp.log(jnp.asarray(table, jnp.float32)), (laws.p, laws.q))
  count = jnp.int32(laws.gamma if num_drafted is None else num_drafted)
  keys = jax.random.split(jax.random.key(seed), DRAWS)
  return _rounds(rule if isinstance(rule, Partial) else Partial(rule), *tables, count, keys)


# Compiling takes longer than running, and random bits most of that: hence little optimisation, and one call for drafts.
@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def _rounds(rule: Partial, log_p, log_q, num_drafted, keys):
  gamma = len(log_q)

  def once(key):
    draft_key, rule_key = jax.random.split(key)
    if verify.shares_noise(rule.func):
      rule_key = jax.random.split(rule_key, gamma + 1)
      # A clone, as drafter and rule consume the same bits on purpose.
      draft, draws = warp.gumbel_argmax, jax.random.clone(rule_key)
    else:
      draft, draws = _inverse, jax.random.uniform(draft_key, (gamma,))
    path, log_q_path = (), []
    for i in range(gamma):
      log_q_path.append(log_q[i][path])
      path = (*path, draft(draws[i], log_q_path[i]))
    log_p_path = [log_p[i][path[:i]] for i in range(gamma + 1)]
    drafts = jnp.stack(path).astype(jnp.int32)
    return drafts, rule(jnp.stack(log_p_path), jnp.stack(log_q_path), drafts, num_drafted, rule_key)

  return jax.vmap(once)(keys)


def _inverse(u, log_q):
  """The first token at which the cumulative law passes u; never one without mass."""
  total = jnp.exp(log_q).cumsum()
  return (total > u * total[-1]).argmax()


def enumerate_outcomes(oracle: Oracle, laws: Laws, num_drafted: int | None = None) -> dict[Outcome, float]:
  """The law of outcomes: over all drafted paths, what the oracle makes of them.

  oracle: (p[n+1, V], q[n, V], drafts) -> the probabilities [n+1] that it accepts 0 to n of them, and the law [n+1, V]
  of the next token behind each number.
  """
  n = laws.gamma if num_drafted is None else num_drafted
  law: dict[Outcome, float] = {}
  for path in itertools.product(range(laws.vocab_size), repeat=n):
    p, q = laws.along(path)
    drawn = np.prod([q[i, token] for i, token in enumerate(path)])
    if drawn == 0:
      continue
    accepted, following = oracle(p, q, path)
    for count in range(n + 1):
      for token in range(laws.vocab_size):
        mass = drawn * accepted[count] * following[count, token]
        if mass > 0:
          outcome = (*path[:count], token)
          law[outcome] = law.get(outcome, 0.0) + mass
  return law


def complete(law: dict[Outcome, float], laws: Laws, length: int) -> dict[Outcome, float]:
  """The law of the first `length` tokens, where plain sampling goes on behind an outcome."""
  while any(len(outcome) < length for outcome in law):
    longer: dict[Outcome, float] = {}
    for outcome, mass in law.items():
      following = laws.p[len(outcome)][outcome] if len(outcome) < length else [None]
      for token, probability in enumerate(following):
        key = outcome if probability is None else (*outcome, token)
        longer[key] = longer.get(key, 0.0) + mass * (1.0 if probability is None else probability)
    law = longer
  return law


def plain_law(laws: Laws, length: int) -> dict[Outcome, float]:
  return complete({(): 1.0}, laws, length)


def expected_accepted(law: dict[Outcome, float]) -> float:
  return sum(mass * (len(outcome) - 1) for outcome, mass in law.items())


def _norm(weights: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
  return weights / weights.sum() if weights.sum() > 0 else otherwise


def token_oracle(p: np.ndarray, q: np.ndarray, path: Outcome, lenience: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
  n = len(path)
  keep = [min(1.0, p[i, token] / (lenience * q[i, token])) for i, token in enumerate(path)]
  reached = np.cumprod([1.0, *keep])
  following = [_norm(np.maximum(p[i] - q[i], 0), p[i]) for i in range(n)]
  return reached * (1 - np.array([*keep, 0.0])), np.stack([*following, p[n]])


def block_oracle(p: np.ndarray, q: np.ndarray, path: Outcome) -> tuple[np.ndarray, np.ndarray]:
  n = len(path)
  w = [1.0]
  for i, token in enumerate(path):
    w.append(min(1.0, w[-1] * p[i, token] / q[i, token]))
  rest = [np.maximum(w[i] * p[i] - q[i], 0) for i in range(n)]
  h = [1.0] + [1.0 if w[i] == 1 else rest[i].sum() / (rest[i].sum() + 1 - w[i]) for i in range(1, n)]
  h = np.array([*h[:n], w[n]])
  no_longer = np.append(np.cumprod((1 - h)[::-1])[::-1][1:], 1.0)
  return h * no_longer, np.stack([*(_norm(rest[i], p[i]) for i in range(n)), p[n]])


def match_oracle(p: np.ndarray, q: np.ndarray, path: Outcome) -> tuple[np.ndarray, np.ndarray]:
  n = len(path)
  same = [p[i, token] for i, token in enumerate(path)]
  reached = np.cumprod([1.0, *same])
  other = np.arange(p.shape[1])
  following = [_norm(np.where(other == token, 0.0, p[i]), p[i]) for i, token in enumerate(path)]
  return reached * (1 - np.array([*same, 0.0])), np.stack([*following, p[n]])


def match_probabilities(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  """[V]: P(argmax(log p + g) = argmax(log q + g) = v) = 1 / sum_j max(p_j / p_v, q_j / q_v), g Gumbel noise."""
  both = np.zeros(len(p))
  for v in np.flatnonzero((p > 0) & (q > 0)):
    both[v] = 1 / np.maximum(p / p[v], q / q[v]).sum()
  return both


def coupled_law(laws: Laws, num_drafted: int | None = None) -> dict[Outcome, float]:
  """Outcomes of the coupled rule: the target's draw follows p, and it is the draft's, too, as often as above."""
  n = laws.gamma if num_drafted is None else num_drafted
  law: dict[Outcome, float] = {}
  for count in range(n + 1):
    for path in itertools.product(range(laws.vocab_size), repeat=count):
      p, q = laws.along(path)
      reached = np.prod([match_probabilities(p[i], q[i])[token] for i, token in enumerate(path)])
      same = match_probabilities(p[count], laws.q[count][path]) if count < n else 0.0
      law |= {(*path, v): reached * mass for v, mass in enumerate(p[count] - same) if reached * mass > 1e-15}
  return law
