"""The table of planted faults, and the labs of its last columns; tests/audit/test_mutants.py tests the faults."""

import dataclasses
import json

import numpy as np
import pytest

from configs.mutants import get_config
from experiments import labs, mutants
from experiments.labs import Lab, scaled
from specjax import verify
from specjax.audit.engine import Engine
from tests.audit.engines import V, target

NAMES = ("residual from q", "recurrent state not rolled back", "log-probabilities of q")


def small():
  config = get_config()
  config.update(mutants=NAMES, model="toy", tokens=2048, toy_tokens=2**13, toy_rows=64)
  return config


@pytest.fixture
def config():
  return small()


@pytest.fixture(scope="module")
def ordinary() -> Lab:
  """Of tiny languages."""
  return Lab.of_toys(small(), None)


@pytest.fixture(scope="module")
def lab() -> Lab:
  """In place of a real model's; it keeps the sound engine's text."""
  config = small()
  texts = [np.random.default_rng(i).integers(0, V - 1, 1 + i % 4).tolist() for i in range(config.rows)]
  return Lab(config, target(), scaled(target(), 0.6), texts, (V - 1,), config.tokens)


def test_the_table(config, lab, tmp_path, capsys, monkeypatch) -> None:
  found = {"rule": lambda engine: 1e-12 if engine.rule.lossless is False else 0.5, "none": lambda engine: None}
  monkeypatch.setattr(mutants, "CHECKS", found)
  monkeypatch.setattr(mutants, "CONTROLS", {"token rule": Engine()})
  asked = []
  for where in ("of_toys", "load"):
    monkeypatch.setattr(Lab, where, lambda config, needs, where=where: asked.append((where, needs)) or lab)
  summary = mutants.run(config, tmp_path, tmp_path / "mutants.md")
  by_name = {each["name"]: each for each in summary["mutants"]}
  assert list(by_name) == list(NAMES)
  assert by_name["residual from q"]["caught_by"] == ["rule"]
  assert summary["survivors"] == ["recurrent state not rolled back", "log-probabilities of q"]
  assert summary["false_alarms"] == {}
  # A fault that is there is found; one that this target, which has no state, can't show is told apart from it.
  for where in ("toy", "model"):
    seen = by_name["residual from q"]["tokens"][where]
    assert 0 < seen["needed"] <= seen["tokens"]
    assert by_name["recurrent state not rolled back"]["tokens"][where]["unchanged"]
  assert asked == [(where, needs) for where in ("of_toys", "load") for needs in (None, labs.STATE)]
  assert by_name["log-probabilities of q"]["tokens"] is None
  kept = json.loads((tmp_path / "mutants" / "results.json").read_text())
  assert kept["summary"] == summary
  assert "same text" in capsys.readouterr().out
  assert not (tmp_path / "mutants.md").exists()  # of some mutants alone it would be no table


def test_the_audit_finds_nothing_in_the_sound_engine(lab) -> None:
  """Else what it finds in mutants would say nothing."""
  sound = mutants.Mutant("none", "nothing", True, "counts", Engine())
  assert lab.tokens_needed(sound)["unchanged"]
  other = dataclasses.replace(lab)
  other.__dict__["sound"] = [np.array([-1])]  # as if the text were another
  found = other.tokens_needed(sound)
  assert found["needed"] is None
  # The number of batches is doubled, and stop tokens end some rows.
  assert lab.config.tokens / 4 < found["tokens"] <= lab.config.tokens


UNCHANGED = labs.PADDED, labs.STATE, labs.FULL, labs.STOPS  # elsewhere their faults change no text
SHY = {name: needs for name, needs in labs.NEEDS.items() if needs in UNCHANGED}


@pytest.mark.parametrize("name", SHY)
def test_what_shows_in_a_situation_of_its_own(name, config, ordinary) -> None:
  fault = next(mutant for mutant in mutants.MUTANTS if mutant.name == name)
  unchanged = ordinary.tokens_needed(fault)["unchanged"]
  assert unchanged == (SHY[name] != labs.STOPS)  # a toy's texts often stop
  lab = Lab.of_toys(config, SHY[name])
  assert lab.tokens_needed(fault)["needed"] > 0
  assert lab.tokens_needed(mutants.Mutant("none", "nothing", True, "counts", Engine()))["unchanged"]


def test_a_draft_model_that_is_too_sure(config) -> None:
  """It shows what is wrong with two block rules, and nothing of the right one."""
  config.toy_tokens = 2**17
  lab = Lab.of_toys(config, labs.SURE)
  for fault in (mutant for mutant in mutants.MUTANTS if labs.NEEDS.get(mutant.name) == labs.SURE):
    assert lab.tokens_needed(fault)["needed"] > 0
  sound = lab.tokens_needed(mutants.Mutant("none", "nothing", True, "joint law", Engine(rule=verify.block)))
  assert not sound["unchanged"]  # it is the token rule's text that is compared
  assert sound["needed"] is None
  assert sound["tokens"] > 2**13  # as many as showed the faults


def test_hot_texts(config) -> None:
  """They show their fault sooner, but in 34,000 tokens of a toy: here it is seen that they are hot."""
  hot, usual = (Lab.of_toys(config, needs).generate(Engine(), 0) for needs in (labs.HOT, None))
  assert set(hot[1].temperature.tolist()) == {1.5}
  assert set(hot[1].top_p.tolist()) == {1.0}
  np.testing.assert_array_equal(usual[1].temperature[:5], np.float32([1.0, 0.7, 1.5, 1.0, 0.0]))
  np.testing.assert_array_equal(usual[1].top_p[:5], np.float32([1.0, 1.0, 0.8, 1.0, 1.0]))


@pytest.mark.parametrize("needs", [labs.STATE, labs.PADDED])
def test_a_model_in_another_situation(needs, lab) -> None:
  """What `Lab.load` makes of a real model: with a state, the text is the same."""
  if needs == labs.STATE:
    other = dataclasses.replace(lab, target=labs.with_a_state(lab.target))
  else:
    cut, draft = labs.padded(lab.target, lab.draft)
    other = dataclasses.replace(lab, target=cut, draft=draft, eos_ids=())
  same = all(map(np.array_equal, lab.sound, other.sound))
  assert same == (needs == labs.STATE)
  fault = next(mutant for mutant in mutants.MUTANTS if labs.NEEDS.get(mutant.name) == needs)
  assert lab.tokens_needed(fault)["unchanged"]
  assert other.tokens_needed(fault)["needed"] > 0


def test_an_unknown_mutant(config, tmp_path) -> None:
  config.mutants = ("residual of x",)
  with pytest.raises(ValueError, match=r"config.mutants has \['residual of x'\]; known: residual from p"):
    mutants.run(config, tmp_path)
