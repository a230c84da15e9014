"""The battery says yes to exact rules and no to planted faults, and its scenarios are what their names say."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify, warp
from specjax.audit import battery
from specjax.audit.battery import STOP, VOCAB, Fit, Scenario
from specjax.models import tabular
from specjax.verify import Verdict, declare

ROWS = 48_000


@declare(lossless=True)
def residual_from_p(log_p, log_q, draft_tokens, num_drafted, key):
  """Draws the next token from p after a rejection, too."""
  verdict = verify.token(log_p, log_q, draft_tokens, num_drafted, key)
  token = warp.categorical(jax.random.fold_in(key, 99), log_p[verdict.num_accepted])
  return Verdict(verdict.num_accepted, token)


def test_check_rule_says_no_to_a_wrong_rule_and_that_its_declaration_is_wrong():
  report = battery.check_rule(residual_from_p, gammas=[2], rows=ROWS)
  assert not report.exact
  assert set(report.fits) == {"gamma 2"}
  assert report.deviations[0][0].startswith("gamma 2: ")
  assert "does not sample the target's law" in str(report)
  assert re.search(r"declares lossless=True: wrong", str(report))


@pytest.mark.parametrize(
  ("settings", "error", "words"),
  [
    ({"rows": -5}, ValueError, "rows=-5 must be at least 1"),
    ({"gammas": [2, 0]}, ValueError, r"gammas\[1\]=0 must be at least 1"),
    ({"gammas": [1.5]}, TypeError, r"gammas\[0\]=1.5 must be a Python int"),
    ({"gammas": ()}, ValueError, "gammas is empty"),
  ],
)
def test_check_rule_refuses_sizes_that_make_no_sense(settings, error, words):
  with pytest.raises(error, match=words):
    battery.check_rule("token", **settings)


@pytest.mark.parametrize(("one_hot", "pairs"), [(False, battery.PAIRS), (True, battery.LOOKED_UP)])
def test_scenarios_cover_pairs_warps_prompts_and_stops(one_hot, pairs):
  cases = [case for case in battery.ALL if case.one_hot == one_hot]
  assert {(case.pair, case.warp) for case in cases} == {(p, w) for p in pairs for w in battery.WARPS}
  for group in ("pair", "warp"):
    for value in {getattr(case, group) for case in cases}:
      own = [case for case in cases if getattr(case, group) == value]
      assert {case.prompt for case in own} == set(battery.PROMPTS)
      assert {case.stops for case in own} == {True, False}


def test_pairs_are_what_their_names_say():
  laws = {
    name: [np.asarray(jax.nn.softmax(language.model().params)) for language in pair]
    for name, pair in battery.PAIRS.items()
  }
  assert np.array_equal(*laws["q = p"])
  p, q = laws["disjoint"]
  assert np.minimum(p, q).max() == 0
  p, q = laws["draft lacks a token"]
  assert ((q == 0) & (p > 0)).any()
  p, q = laws["target lacks a token"]
  assert ((p == 0) & (q > 0)).any()
  p, q = laws["q near zero"]
  assert ((q > 0) & (q < 1e-6) & (p > 0.1)).any()
  p, q = laws["soft"]
  assert min(p.min(), q.min()) > 1e-4


def test_languages_without_a_stop_never_say_it():
  case = Scenario("soft", "hot", battery.PROMPTS[0], stops=False)
  assert all(STOP not in outcome and len(outcome) == battery.LENGTH for outcome in case.law())
  case = dataclasses.replace(case, stops=True)
  assert any(outcome[-1] == STOP and len(outcome) < battery.LENGTH for outcome in case.law())


def test_small_faults_of_all_scenarios_add_up():
  each = Fit(1000, 10, 9 + 4 * 18**0.5)
  fits = {Scenario("soft", name, (1,), False): each for name in battery.WARPS}
  assert each.p_value > 1e-6
  assert battery.total(fits).p_value < 1e-9


def test_interleaved_rows_speak_their_own_language():
  models = [tabular.tabular(jax.random.key(seed), VOCAB) for seed in range(3)]
  both = tabular.interleave(models)
  tokens = jax.random.randint(jax.random.key(9), (7, 5), 0, VOCAB)
  start = jnp.zeros(7, jnp.int32)
  logits, cache = both.apply(both.params, tokens, both.init_cache(both.params, 7, 8), start)
  for row in range(7):
    model = models[row % 3]
    own, own_cache = model.apply(model.params, tokens[row : row + 1], model.init_cache(model.params, 1, 8), start[:1])
    np.testing.assert_array_equal(logits[row], own[0])
    np.testing.assert_array_equal(cache[row], own_cache[0])


def test_interleave_takes_tables_of_one_shape():
  with pytest.raises(ValueError, match="one shape"):
    tabular.interleave([tabular.tabular(jax.random.key(0), 3), tabular.tabular(jax.random.key(0), 4)])
  with pytest.raises(ValueError, match="one tabular model or more"):
    tabular.interleave([])
