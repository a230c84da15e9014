"""One round of a bare acceptance rule, by the hundred thousand: a check that compiles in a second or two.

What only several rounds, caches or batches can show is for `specjax.audit.suite`. The closed forms of how often a rule
keeps a drafted path are here, too.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jax import Array, lax

from specjax import verify, warp
from specjax.audit import exact
from specjax.verify import Verifier

VOCAB, GAMMA = 3, 3
Tables = tuple[list[np.ndarray], list[np.ndarray]]  # p[i], q[i]: float[cases, V, ..., V], i + 1 axes of V


@functools.cache
def tables() -> Tables:
  """Laws that depend on the path so far: soft, sharp, with tokens that one of the two lacks, with one-hot drafts."""
  rng = np.random.default_rng(0)

  def law(depth: int, spread: float, never: int | None = None) -> np.ndarray:
    weights = np.exp(spread * rng.normal(size=(VOCAB,) * (depth + 1)))
    if never is not None:
      weights[..., never] = 0
    return weights / weights.sum(-1, keepdims=True)

  def one_hot(depth: int) -> np.ndarray:
    return np.eye(VOCAB)[rng.integers(VOCAB, size=(VOCAB,) * depth)]

  p = [np.stack([law(i, 1.5), law(i, 4.0), law(i, 1.5, never=0), law(i, 1.5), law(i, 1.5)]) for i in range(GAMMA + 1)]
  q = [np.stack([law(i, 1.5), law(i, 4.0), law(i, 1.5), law(i, 1.5, never=1), one_hot(i)]) for i in range(GAMMA)]
  return p, q


def laws(rules: Sequence[Verifier], *, draws: int = 500_000, seed: int = 0) -> list[float]:
  """For each rule, a p-value of what a round emits, completed by plain sampling to GAMMA + 1 tokens, against p's law.

  The rules share one program.
  """
  p, q = tables()
  cases = len(p[0])
  keys = jax.random.split(jax.random.key(seed), draws - draws % cases)
  codes = np.asarray(_codes(tuple(rules), *jax.tree.map(jnp.asarray, _float32((p, q))), keys))
  size = VOCAB ** (GAMMA + 1)
  counts = [[np.bincount(row[i::cases], minlength=size) for i in range(cases)] for row in codes]
  plain = [_plain_law([table[i] for table in p]) for i in range(cases)]
  return [combine([exact.fit(n, law).p_value for n, law in zip(row, plain, strict=True)]) for row in counts]


def law(rule: Verifier) -> float:
  """What one round of the bare rule emits, completed by plain sampling, follows p."""
  return laws([rule])[0]


def _float32(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def _plain_law(p: Sequence[np.ndarray]) -> np.ndarray:
  paths = itertools.product(range(VOCAB), repeat=GAMMA + 1)
  return np.array([np.prod([p[i][path[: i + 1]] for i in range(GAMMA + 1)]) for path in paths])


def combine(p_values: Sequence[float]) -> float:
  """One p-value of several: Bonferroni's."""
  return min(1.0, len(p_values) * min(p_values)) if p_values else 1.0


# Compiling takes longer than running.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _codes(rules: tuple[Verifier, ...], p, q, keys: Array) -> Array:
  """int32[rules, draws]: the tokens of each round as one number, digits base V, the first one highest."""

  def once(case: Array, key: Array) -> list[Array]:
    draft_key, rest_key, rule_key = jax.random.split(key, 3)
    draft_u, rest_u = jax.random.uniform(draft_key, (GAMMA,)), jax.random.uniform(rest_key, (GAMMA + 1,))
    own = path_of(q, case, lambda i, law: _inverse(draft_u[i], law))
    position_keys = jax.random.split(rule_key, GAMMA + 1)
    # Clones, as several rules consume the same bits, each for itself.
    shared = path_of(q, case, lambda i, law: warp.gumbel_argmax(jax.random.clone(position_keys[i]), jnp.log(law)))
    return [
      finish(rule, case, shared, jax.random.clone(position_keys), rest_u)
      if verify.shares_noise(rule)
      else finish(rule, case, own, jax.random.clone(rule_key), rest_u)
      for rule in rules
    ]

  def path_of(laws, case, draw) -> tuple[Array, ...]:
    path: tuple[Array, ...] = ()
    for i, table in enumerate(laws):
      path = (*path, draw(i, table[(case, *path)]))
    return path

  def finish(rule, case, drafts, key, rest_u) -> Array:
    along_p = jnp.stack([table[(case, *drafts[:i])] for i, table in enumerate(p)])
    along_q = jnp.stack([table[(case, *drafts[:i])] for i, table in enumerate(q)])
    block = jnp.stack(drafts).astype(jnp.int32)
    verdict = rule(jnp.log(along_p), jnp.log(along_q), block, jnp.int32(GAMMA), key)

    def token(i, law):
      emitted = jnp.where(i < verdict.num_accepted, block[min(i, GAMMA - 1)], verdict.next_token)
      return jnp.where(i <= verdict.num_accepted, emitted, _inverse(rest_u[i], law))

    tokens = path_of(p, case, token)
    return jnp.stack([token * VOCAB ** (GAMMA - i) for i, token in enumerate(tokens)]).sum()

  return jnp.stack(jax.vmap(once)(jnp.arange(len(keys)) % len(p[0]), keys))


def _inverse(u: Array, law: Array) -> Array:
  """The first token at which the cumulative law passes u; never one without mass."""
  total = law.cumsum()
  return (total > u * total[-1]).argmax().astype(jnp.int32)


RATIOS = (0.0, 2.0**-48, 2.0**-10)  # the least ratio that `keys.uniform` resolves
_CHUNK = 2**16


def rare(rule: Verifier, *, first: int = 0, count: int = 2**26) -> float:
  """Drafts of p = 0 are never accepted, those of p / q = 2^-48 and 2^-10 as often as they should.

  first, count: the numbers of the keys that are tried, in multiples of 2^16.
  """
  chunks = max(count // _CHUNK, 1)
  never, *seen = np.asarray(_rare(rule, jnp.uint32(first // _CHUNK), chunks)).tolist()
  p_values = [
    float(scipy.stats.binomtest(accepted, chunks * _CHUNK, ratio).pvalue)
    for accepted, ratio in zip(seen, RATIOS[1:], strict=True)
  ]
  return 0.0 if never else combine(p_values)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _rare(rule: Verifier, first: Array, chunks: int) -> Array:
  """int32[RATIOS]: drafts accepted."""
  log_p = jnp.log(jnp.array([[[r, 1 - r]] * 2 for r in RATIOS], jnp.float32))
  log_q = jnp.log(jnp.array([[1.0, 0.0]], jnp.float32))

  def once(number: Array) -> Array:
    def accepted(log_p: Array) -> Array:
      key = jax.random.wrap_key_data(jnp.stack([jnp.uint32(0), number]))
      key = jax.random.split(key) if verify.shares_noise(rule) else key
      return rule(log_p, log_q, jnp.zeros(1, jnp.int32), jnp.int32(1), key).num_accepted

    return jax.vmap(accepted)(log_p)

  def chunk(total: Array, at: Array) -> tuple[Array, None]:
    numbers = at * jnp.uint32(_CHUNK) + jnp.arange(_CHUNK, dtype=jnp.uint32)
    return total + jax.vmap(once)(numbers).sum(0), None

  at = first + jnp.arange(chunks, dtype=jnp.uint32)
  return lax.scan(chunk, jnp.zeros(len(RATIOS), jnp.int32), at)[0]


def empty_residuals(rules: Sequence[Verifier], *, draws: int = 100_000, seed: int = 0) -> list[float]:
  """For each rule, a p-value of the token emitted where rounding has made q a tenth larger than p everywhere.

  Rejections then leave no mass to draw from, and the law is p still. Some lanes hold no token.
  """
  p = np.array([0.3, 0.0, 0.2, 0.0, 0.0, 0.1, 0.4, 0.0, 0.0])
  keys = jax.random.split(jax.random.key(seed), draws)
  tokens = np.asarray(_emitted(tuple(rules), jnp.asarray(p, jnp.float32), keys))
  return [exact.fit(np.bincount(row, minlength=len(p)), p).p_value for row in tokens]


def empty_residual(rule: Verifier) -> float:
  """A rejection that only rounding can bring draws from p, and no token that does not exist."""
  return empty_residuals([rule])[0]


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _emitted(rules: tuple[Verifier, ...], p: Array, keys: Array) -> Array:
  log_p = jnp.log(jnp.stack([p, p]))
  log_q = log_p[:1] + jnp.log(jnp.float32(1.1))

  def once(key: Array) -> list[Array]:
    draft_key, rule_key = jax.random.split(key)
    position_keys = jax.random.split(rule_key)
    own = _inverse(jax.random.uniform(draft_key), p)[None]
    shared = warp.gumbel_argmax(jax.random.clone(position_keys[0]), log_p[0])[None]
    out = []
    for rule in rules:
      draft, bits = (shared, position_keys) if verify.shares_noise(rule) else (own, rule_key)
      verdict = rule(log_p, log_q, draft, jnp.int32(1), jax.random.clone(bits))
      out.append(jnp.where(verdict.num_accepted > 0, draft[0], verdict.next_token))
    return out

  return jnp.stack(jax.vmap(once)(keys))


# How often a path of drafts is drawn and all of it kept, given the laws p[n, V], q[n, V] along it.
Kept = Callable[[np.ndarray, np.ndarray, Sequence[int]], float]


def _along(law: np.ndarray, path: Sequence[int]) -> np.ndarray:
  return law[np.arange(len(path)), list(path)]


def kept_by_token(p: np.ndarray, q: np.ndarray, path: Sequence[int], lenience: float = 1.0) -> float:
  return float(np.minimum(_along(p, path) / lenience, _along(q, path)).prod())


def kept_by_block(p: np.ndarray, q: np.ndarray, path: Sequence[int]) -> float:
  mass = 1.0  # of the path under q, times w
  drawn = 1.0
  for ours, theirs in zip(_along(p, path), _along(q, path), strict=True):
    drawn *= float(theirs)
    mass = min(mass * float(ours), drawn)
  return mass


def kept_by_match(p: np.ndarray, q: np.ndarray, path: Sequence[int]) -> float:
  return float((_along(p, path) * _along(q, path)).prod())


def kept_by_coupled(p: np.ndarray, q: np.ndarray, path: Sequence[int]) -> float:
  kept = 1.0
  for ours, theirs, token in zip(p, q, path, strict=True):
    if not ours[token] or not theirs[token]:
      return 0.0
    kept /= float(np.maximum(ours / ours[token], theirs / theirs[token]).sum())
  return kept


KEPT: dict[Verifier, Kept] = {
  verify.token: kept_by_token,
  verify.block: kept_by_block,
  verify.match: kept_by_match,
  verify.coupled: kept_by_coupled,
}
