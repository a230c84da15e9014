"""Every planted fault is caught by the check that is named for it, and exact rules pass all checks.

Programs are shared where that can be done, as compiling is what takes the time: rules are tested in one program of bare
rounds, engines on one ragged batch. `experiments/mutants.py` runs every check on every mutant.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import verify
from specjax.audit import battery, ragged, rounds, suite
from specjax.audit.engine import Engine
from specjax.audit.exact import compare
from specjax.audit.mutants import MUTANTS, keys, rules
from specjax.audit.suite import CHECKS, LEVEL
from specjax.models import tabular
from tests.audit.mixture import mixture, share, spread
from tests.statistics import assert_probable

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
RULES = {name: rule for name, rule in verify.RULES.items() if rule.lossless}
PARTS = {
  "token in parts": rules.assemble(),
  "block in parts": rules.assemble_block(),
  "token by position": keys.token_by_position,
  "block by position": keys.block_by_position,  # wrong, but not in one round
}


def caught_by(check: str) -> list[str]:
  return [mutant.name for mutant in MUTANTS if mutant.check == check]


def test_there_are_enough_and_each_names_a_check():
  assert len(BY_NAME) == len(MUTANTS) >= 28
  assert {mutant.check for mutant in MUTANTS} <= set(CHECKS)


@pytest.mark.parametrize(
  ("check", "of_rules"), [("one round", rounds.laws), ("empty residual", rounds.empty_residuals)]
)
def test_bare_rules(check, of_rules):
  wrong = {name: BY_NAME[name].engine.rule for name in caught_by(check)}
  right = RULES | PARTS
  p_values = dict(zip([*right, *wrong], of_rules([*right.values(), *wrong.values()], draws=100_000), strict=True))
  for name in right:
    assert_probable(p_values[name], lambda name=name: name)
  assert all(p_values[name] < LEVEL for name in wrong), p_values


@pytest.mark.parametrize("rule", [verify.token, *(BY_NAME[name].engine.rule for name in caught_by("rare drafts"))])
def test_rare_drafts(rule):
  """Among these keys is one, number 180,232, of which `jax.random.uniform` makes 0."""
  p_value = rounds.rare(rule, first=2 * 2**16, count=2**16)
  assert (p_value > LEVEL) == rule.lossless


def test_parts_are_the_rule():
  """Put together from right parts, a rule is draw for draw the one of `specjax.verify`."""
  tables = [
    [jnp.asarray(table, jnp.float32)[(slice(None), *[2] * i)] for i, table in enumerate(t)] for t in rounds.tables()
  ]
  log_p, log_q = (jnp.log(jnp.stack(table, axis=1)) for table in tables)
  pairs = ((verify.token, PARTS["token in parts"]), (verify.block, PARTS["block in parts"]))

  @jax.jit
  @jax.vmap
  def verdicts(case, key):
    drafts = jnp.full(rounds.GAMMA, 2, jnp.int32)
    arguments = log_p[case], log_q[case], drafts, jnp.int32(rounds.GAMMA)
    return [[rule(*arguments, jax.random.clone(key)) for rule in pair] for pair in pairs]

  for whole, parts in verdicts(jnp.arange(2000) % len(log_p), jax.random.split(jax.random.key(0), 2000)):
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    assert len(np.unique(whole.num_accepted)) > 2


WATCHED = {
  "fresh laws": lambda trace: ragged.fresh_laws_of(trace, *ragged.languages()),
  "counts": ragged.counts_of,
  "ends": lambda trace: ragged.ends_of(trace.result),
  "logprobs": lambda trace: ragged.logprobs_of(trace.result),
}


def test_what_one_watched_batch_shows():
  """Mutants of the token rule and the sound engine, row by row in one program; reports are made of the sound rows."""
  names = [name for check in WATCHED for name in caught_by(check)]
  told = [name for name in names if BY_NAME[name].engine.report is not Engine().report]
  alone = "stop token overrun"  # it changes what rows share
  mixed = ["", *(name for name in names if name not in (*told, alone))]
  engines = [BY_NAME[name].engine if name else Engine() for name in mixed]
  count = len(engines)
  request = ragged.batch()
  trace = mixture(engines).trace(**spread(request, ragged.ROW_FIELDS, count))
  sound = share(trace, 0, count)
  for check, holds in WATCHED.items():
    assert holds(sound) == 1, check
  for i, name in enumerate(mixed[1:], start=1):
    assert WATCHED[BY_NAME[name].check](share(trace, i, count)) == 0, name
  for name in told:
    reported = dataclasses.replace(sound, result=BY_NAME[name].engine.report(sound.result))
    assert WATCHED[BY_NAME[name].check](reported) == 0, name
  assert ragged.ends(BY_NAME[alone].engine) == 0


def test_the_ragged_batch_shows_what_it_must():
  trace = ragged.watched(Engine())
  width = len(ragged.PROMPTS[2])
  assert trace.result.lengths[2] == width + ragged.NEW_TOKENS[2] == width + max(ragged.NEW_TOKENS)
  kept = [(int(n), int(m)) for info in trace.rounds for n, m in zip(info.num_accepted, info.num_emitted, strict=True)]
  emitted = [int(info.num_emitted[2]) for info in trace.rounds if info.num_emitted[2]]
  assert emitted[-1] <= 2  # its last block reaches over the end
  assert {n for n, m in kept if m} == set(range(ragged.GAMMA + 1))
  assert any(0 < m < n for n, m in kept)  # an accepted draft behind an accepted stop
  assert len(set(trace.result.stats.rounds.tolist())) > 3


SEVERAL_RUNS = ("greedy", "batch of one", "permuted rows", "own draft")


@pytest.mark.parametrize("check", SEVERAL_RUNS)
def test_what_several_runs_show(check):
  assert CHECKS[check](Engine()) == 1
  for name in caught_by(check):
    assert CHECKS[check](BY_NAME[name].engine) == 0, name


def test_what_a_state_that_is_rewound_shows():
  """Faults of caches wrap the target's, and the state that is rewound lies in it."""
  names = [*caught_by("recurrent target"), "cache one slot early", "stale rows after a rejection"]
  engines = [Engine(), *(BY_NAME[name].engine for name in names)]
  target, draft = ragged.languages()
  request = ragged.batch(target=tabular.recurrent(target))
  trace = mixture(engines).trace(**spread(request, ragged.ROW_FIELDS, len(engines)))
  fresh = [ragged.fresh_laws_of(share(trace, i, len(engines)), target, draft) for i in range(len(engines))]
  assert fresh == [1, *[0 for _ in names]]


@pytest.mark.parametrize("name", [name for name in RULES if name != "token"])
def test_other_rules_pass(name):
  engine = Engine(rule=RULES[name])
  for check in ("fresh laws", "counts", "ends", "logprobs", "greedy", "own draft", "permuted rows"):
    assert CHECKS[check](engine) == 1, check


def test_wrong_drafters():
  """Whole generations of several drafters, in one program and one scenario."""
  wrong = {"declared law": caught_by("declared law"), "joint law": caught_by("joint law")}
  names = [name for names in wrong.values() for name in names if BY_NAME[name].engine.rule is verify.token]
  engines = [Engine(), *(BY_NAME[name].engine for name in names)]
  case = battery.Scenario("soft", "as it is", battery.PROMPTS[1], stops=True)
  request = battery.arguments([case], num_draft_tokens=ragged.GAMMA, rows=10_000 * len(engines))
  trace = mixture(engines).trace(**request)
  p_values = {}
  for i, name in enumerate(["sound", *names]):
    own = share(trace, i, len(engines))
    joint, declared = compare(own.result, case.law()).p_value, suite.declared_fit(own.rounds[0]).p_value
    p_values[name] = {"joint law": joint, "declared law": declared}
  for check in wrong:
    assert_probable(p_values["sound"][check], lambda check=check: f"the sound drafter, {check}")
  assert all(p_values[name][BY_NAME[name].check] < LEVEL for name in names), p_values


def test_noise_by_position_is_wrong_for_blocks_alone():
  """Only several rounds show it, and only to the joint law."""
  assert_probable(suite.focused_law(Engine(rule=keys.token_by_position), rows=48_000), lambda: "token by position")
  assert suite.focused_law(Engine(rule=keys.block_by_position), rows=48_000) < LEVEL


def test_padded_vocabulary():
  """The sampler itself: tests/test_law.py."""
  for name in caught_by("padded vocabulary"):
    assert suite.padded_vocabulary(BY_NAME[name].engine, rows=20_000) < LEVEL, name


def test_every_mutant_is_tested():
  tested = {
    "one round",
    "empty residual",
    "rare drafts",
    *WATCHED,
    *SEVERAL_RUNS,
    "recurrent target",
    "joint law",
    "declared law",
    "padded vocabulary",
  }
  assert {mutant.check for mutant in MUTANTS} <= tested


def test_the_engine_is_the_sampler():
  """Spelled out, the loop returns what `specjax.sample` returns."""
  request = ragged.batch()
  ours, theirs = Engine()(**request), specjax.sample(**request)
  jax.tree.map(np.testing.assert_array_equal, ours, jax.device_get(theirs))
