"""Engines on toy languages, right and wrong in known ways: one compiled program makes the samples of all of them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import verify, warp
from specjax.audit import Samples
from specjax.models import tabular
from specjax.verify import Verdict

V, GAMMA, PROMPT, NEW = 16, 3, (1, 4, 2), 40
ROWS = 512


@functools.cache
def target():
  return tabular.tabular(jax.random.key(1), V)


@functools.cache
def draft():
  """Like the target, but for noise: about half of its drafts are accepted."""
  return tabular.from_table(target().params + 1.2 * jax.random.normal(jax.random.key(2), target().params.shape))


class Rule(NamedTuple):
  """Token verification, with something about it changed. Fields may be traced."""

  p_power: Any = 1.0  # the target's law is raised to it
  q_power: Any = 1.0  # and the declared draft law to this one; drafts are drawn from the true one
  q_top_p: Any = 1.0  # the declared draft law is truncated
  lenience: Any = 1.0  # accepts with min(1, p / (lenience q))
  residual_scale: Any = 1.0  # the residual is max(p - residual_scale q, 0)
  bonus_from_q: Any = 0.0

  def __call__(self, log_p, log_q, x, n, key):
    log_p = jax.nn.log_softmax(self.p_power * log_p)
    declared = warp.log_probs(self.q_power * log_q, specjax.Warp(top_p=self.q_top_p))
    accepted = verify.token(log_p, declared + jnp.log(self.lenience), x, n, key).num_accepted
    q = jnp.where(accepted < n, jnp.exp(declared[jnp.minimum(accepted, GAMMA - 1)]), 0.0)
    left = jnp.maximum(jnp.exp(log_p[accepted]) - self.residual_scale * q, 0.0)
    law = jnp.where(left.sum() > 0, jnp.log(left), log_p[accepted])
    law = jnp.where((accepted == n) & (self.bonus_from_q > 0), log_q[-1], law)
    return Verdict(accepted, warp.categorical(jax.random.fold_in(key, 9), law))


right = Rule()
residual_from_p = Rule(residual_scale=0.0)
bonus_from_q = Rule(bonus_from_q=1.0)
lenient = Rule(lenience=0.8, residual_scale=0.8)
u_scaled = Rule(lenience=0.9)
q_declared_colder = Rule(q_power=1.4)  # the temperature does not reach the draw of the drafts
q_declared_truncated = Rule(q_top_p=0.8)
target_colder = Rule(p_power=1.15)
WRONG = (residual_from_p, bonus_from_q, lenient, u_scaled, q_declared_colder, q_declared_truncated, target_colder)


@jax.jit
def _generate(target, draft, rule, key):
  drafter = specjax.ModelDrafter(draft)

  def verifier(*arguments):
    return rule(*arguments)

  verifier.lossless = False
  prompts = jnp.tile(jnp.array([PROMPT], jnp.int32), (ROWS, 1))
  state = specjax.init(target, drafter, prompts, key=key, max_new_tokens=NEW, num_draft_tokens=GAMMA, max_length=128)

  def one(state, _):
    state, info = specjax.step(state, target, drafter, verifier=verifier)
    return state, info._replace(log_p=(), log_q=())

  state, rounds = jax.lax.scan(one, state, length=NEW)
  return state.result(), rounds


@functools.cache
def samples(rule: Rule = right, seed: int = 0) -> Samples:
  """ROWS generations of NEW tokens, labelled."""
  return generate(target(), rule, seed)


def generate(model: specjax.LanguageModel, rule: Rule, seed: int) -> Samples:
  result, rounds = jax.device_get(_generate(model, draft(), jax.tree.map(jnp.float32, rule), jax.random.key(seed)))
  rounds = [rounds._replace(**{f: getattr(rounds, f)[i] for f in ("num_emitted", "num_accepted", "num_drafted")})
            for i in range(NEW)]  # fmt: skip
  made = Samples.from_result(result, len(PROMPT), rounds=rounds)
  assert made.num_tokens == ROWS * NEW
  return made


def part(of: Samples, keep) -> Samples:
  """The generations with those indices."""
  index = np.arange(len(of.tokens))[keep]
  fields = {
    name: [getattr(of, name)[i] for i in index] if getattr(of, name) is not None else None
    for name in ("prompts", "tokens", "rows", "max_new_tokens", "labels", "logprobs", "draft_logprobs")
  }
  return Samples(**fields)
