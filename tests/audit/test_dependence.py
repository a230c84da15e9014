"""Draws that know of each other although each follows its law, and generations that end where they must not."""

import jax
import numpy as np
import pytest

import specjax
from specjax.audit import Samples, audit, dependence
from specjax.audit.engine import Engine
from specjax.audit.mutants import MUTANTS
from tests.audit.engines import V, draft, target

ROWS, NEW, STOP = 256, 32, 0
ENGINES = {mutant.name: mutant.engine for mutant in MUTANTS}


def test_choices_at_the_same_draw() -> None:
  """Of earlier rows of the batch: at the same offset of the same round, or at the round's end."""
  labels = [
    ["accepted", "residual", "accepted"],
    ["accepted", "accepted", "bonus", "residual"],
    ["residual", "accepted", "residual"],
    ["accepted", "residual"],
  ]
  tokens = [[5, 6, 7], [8, 9, 10, 11], [12, 13, 14], [1, 2]]
  made = Samples([[1]] * 4, tokens, rows=[0, 2, 3, 0], labels=labels)
  seen = [
    [sorted(t for t in row if t >= 0) for row in choices.tolist()] for choices in dependence.aligned_choices(made)
  ]
  assert seen[0] == [[], [], []]
  assert seen[1] == [[5, 6], [6], [6], [7]]  # round 0: offset 0 or the end, then the end; round 1: offset 0
  assert seen[2] == [[5, 6, 8, 10], [7, 11], [11]]
  assert seen[3] == [[5, 6], [6]]  # another batch: of its own row, the first one
  plain = Samples([[1]] * 4, tokens)
  seen = [
    [sorted(t for t in row if t >= 0) for row in choices.tolist()] for choices in dependence.aligned_choices(plain)
  ]
  assert seen[3] == [[5, 8, 12], [6, 9, 13]]


def test_weights() -> None:
  labels = [["accepted", "accepted", "residual", "bonus"], ["residual", "accepted"], ["accepted", "bonus"]]
  made = Samples([[1]] * 3, [[5, 6, 7, 8], [9, 10], [11, 12]], rows=[0, 1, 2], labels=labels)
  leaning = np.array([0.5, 7.0, -1.0, 2.0, 1.0, -2.0, 0.25, 1.0])
  np.testing.assert_array_equal(dependence.serial(made, leaning), [0, 0.5, 3, 0, 0, 0, 0, 0.25])
  # Round 0, offset 0: accepted at .5, then rejected; offset 1: accepted at 3. Bonus tokens test nothing.
  np.testing.assert_array_equal(dependence.across(made, leaning), [0, 0, 0, 0, 0.5, 0, -0.25, 3])
  assert dependence.across(Samples([[1]], [[2]], rows=[0]), leaning[:1]) is None
  unlabelled = Samples([[1]] * 3, [[5, 6, 7, 8], [9, 10], [11, 12]])
  np.testing.assert_array_equal(dependence.serial(unlabelled, leaning), [0, 0.5, 3, 0, 0, 1, 0, 0.25])


def generate(engine: Engine, seed: int) -> Samples:
  """Prompts, and limits of two kinds, with labels where the rounds tell them."""
  prompts = np.random.default_rng(seed).integers(1, V, (ROWS, 3))
  limits = np.resize([NEW, NEW - 7], ROWS)
  run = engine.trace(
    target(), specjax.ModelDrafter(draft()), prompts, key=jax.random.key(seed), max_new_tokens=limits,
    num_draft_tokens=3, max_length=128, eos_id=(STOP,),
  )  # fmt: skip
  return Samples.from_result(run.result, 3, rounds=run.rounds, max_new_tokens=limits)


def judge(*made: Samples):
  return audit(target(), Samples.concatenate(made), draft=draft(), eos_id=STOP, noise="float32")


def test_a_right_engine_shows_no_sign() -> None:
  report = judge(generate(Engine(), 0), generate(Engine(), 1))
  assert report.ok is True
  assert {"echo", "serial", "across"} <= {test.name for test in report.tests}
  assert (report.beyond_limit, report.ended_early) == (0, 0)


@pytest.mark.parametrize(
  ("fault", "score", "words"),
  [
    ("one u for all positions", "serial", "tests of a round share a u"),
    ("u shared by rows", "across", "rows share the u of their tests"),
    ("one key for all rows", "echo", "random bits are shared"),
  ],
)
def test_what_is_in_no_law_of_one_token(fault: str, score: str, words: str) -> None:
  report = judge(generate(ENGINES[fault], 0), generate(ENGINES[fault], 1))
  assert report.ok is False
  assert report.test(score).z > 5
  assert words in report.verdict


def test_requests_with_one_seed() -> None:
  """The commonest: every request samples with the same key. All that is known are the tokens."""
  prompts = np.random.default_rng(0).integers(1, V, (64, 3))
  sample = jax.jit(
    lambda prompt: specjax.sample(
      target(), None, prompt[None], key=jax.random.key(0), max_new_tokens=NEW, num_draft_tokens=0, max_length=128
    ).tokens[0, 3 : 3 + NEW]
  )
  report = audit(target(), Samples(prompts, [np.asarray(sample(prompt)) for prompt in prompts]), noise="float32")
  assert report.ok is False
  assert report.test("echo").z > 5
  assert "echo: generations made together repeat each other's tokens" in report.verdict


def test_one_seed_for_every_batch() -> None:
  """Rows of a batch are independent, and each is what it was in the batch before."""
  table, random = np.asarray(target().params), np.random.default_rng(0)
  prompts = random.integers(1, V, (48, 3))

  def sample(prompt: np.ndarray, seed: int) -> list[int]:
    tokens, noise = prompt.tolist(), np.random.default_rng(seed).gumbel(size=(48, V))
    for one in noise:
      tokens.append(int((table[(len(tokens) - 1) % len(table), tokens[-2], tokens[-1]] + one).argmax()))
    return tokens[3:]

  shared, own = ([sample(p, seed(i)) for i, p in enumerate(prompts)] for seed in (lambda i: i % 4, lambda i: i + 100))
  rows = np.arange(48) % 4
  assert audit(target(), Samples(prompts, own, rows=rows), noise="float32").ok is True
  report = audit(target(), Samples(prompts, shared, rows=rows), noise="float32")
  assert report.ok is False
  assert report.test("echo").z > 5


def test_bits_do_not_look_shared_in_the_order_of_ends() -> None:
  """Where earlier generations are the shorter ones, their stop tokens tell of the later ones; so they don't count."""
  made = generate(Engine(), 3)
  order = np.argsort([len(tokens) for tokens in made.tokens], kind="stable")
  report = audit(target(), Samples([made.prompts[i] for i in order], [made.tokens[i] for i in order]), eos_id=STOP)
  assert report.test("echo").adjusted > 1e-3
  assert report.test("copy").adjusted > 1e-3


def test_generations_that_end_too_late_or_too_early() -> None:
  right = generate(Engine(), 2)
  counts, stopped = (np.array([f(tokens) for tokens in right.tokens]) for f in (len, lambda tokens: tokens[-1] == STOP))
  late, early = (judge(_with_limits(right, right.max_new_tokens + more)) for more in (-2, +1))
  assert late.beyond_limit == (counts > right.max_new_tokens - 2).sum() > 0
  assert f"{late.beyond_limit} generations have more tokens than they were allowed" in late.verdict
  assert early.ended_early == (~stopped).sum() > 0
  assert f"{early.ended_early} generations end before their limit, and with no stop token" in early.verdict
  assert late.ok is early.ok is False


def _with_limits(made: Samples, limits: np.ndarray) -> Samples:
  return Samples(made.prompts, made.tokens, rows=made.rows, max_new_tokens=limits)


def test_an_engine_that_ends_where_the_first_row_does() -> None:
  report = judge(generate(ENGINES["first row ends the batch"], 0))
  assert report.ok is False
  assert report.ended_early > 0


def test_a_limit_that_is_looked_at_between_rounds() -> None:
  limits = np.resize([NEW, NEW - 7], 64)
  result = ENGINES["limit overrun"](
    target(), specjax.ModelDrafter(draft()), np.ones((64, 3), np.int32), key=jax.random.key(0), max_new_tokens=limits,
    num_draft_tokens=3, max_length=128,
  )  # fmt: skip
  report = judge(Samples.from_result(result, 3, max_new_tokens=limits))
  assert report.ok is False
  assert report.beyond_limit > 0
