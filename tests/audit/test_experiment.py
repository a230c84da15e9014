"""The command: a file in, a report, a figure and JSON out."""

import json
import types

import pytest

import specjax
from configs.audit import get_config
from experiments import audit as experiment
from tests.audit.engines import draft, residual_from_p, right, samples, target


@pytest.fixture
def config(monkeypatch):
  models = {"target": target, "drafter": draft}
  monkeypatch.setattr(specjax, "load_model", lambda name: models[name]())
  monkeypatch.setattr(specjax, "load_tokenizer", lambda name: types.SimpleNamespace(eos_ids=None))
  config = get_config()
  config.update(model="target", draft="drafter", rule="token", noise="float32")
  return config


@pytest.mark.parametrize(("rule", "ok"), [(right, True), (residual_from_p, False)])
def test_a_file(rule, ok, config, tmp_path, capsys):
  samples(rule).write(tmp_path / "engine.jsonl")
  config.samples = str(tmp_path / "engine.jsonl")
  assert experiment.run(config, tmp_path).ok is ok
  written = json.loads((tmp_path / "audit" / "results.json").read_text())
  assert written["report"]["ok"] is ok
  assert written["config"]["rule"] == "token"
  assert (tmp_path / "audit" / "audit.png").is_file()
  assert ("NO SIGN OF A FAULT" if ok else "FAULT: these") in capsys.readouterr().out


@pytest.mark.parametrize(("eos", "ok"), [(None, False), ((), True), ((3,), False), ((15,), False)])
def test_stop_tokens(eos, ok, config, monkeypatch, tmp_path):
  """An engine that ignores the tokenizer's."""
  monkeypatch.setattr(specjax, "load_tokenizer", lambda name: types.SimpleNamespace(eos_ids=(5,)))
  samples().write(tmp_path / "engine.jsonl")
  config.update(samples=str(tmp_path / "engine.jsonl"), eos=eos, power=0.9)
  found = experiment.run(config, tmp_path)
  assert found.ok is ok
  assert (found.behind_stop == 0) is ok
  assert found.power == 0.9


BAD = {
  "seed": ({"seed": -1}, "seed=-1 must be 0 or more"),
  "alpha": ({"alpha": 0.0}, "alpha=0.0 must be"),
  "power": ({"power": 1.5}, "power=1.5 must be"),
  "noise": ({"noise": "float8"}, "noise='float8' is unknown"),
  "rule": ({"rule": "block"}, "rule='block' is unknown"),
  "rule without draft": ({"draft": ""}, "config.rule='token' needs config.draft"),
  "rule without labels": ({"samples": ""}, "config.rule='token' needs config.samples with labels"),
  "eos": ({"eos": (5, -1)}, r"config.eos=\(5, -1\) must hold token ids"),
  "eos as text": ({"eos": ("</s>",)}, r"config.eos=\('</s>',\) must hold token ids"),
  "temperature": ({"temperature": -1.0}, r"warp.temperature=-1.0"),
  "demonstration": ({"samples": "", "demo_prompts": 0}, "config.demo_prompts=0 must be at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_nonsense_is_refused_before_a_model_is_loaded(name, config, monkeypatch, tmp_path):
  monkeypatch.setattr(specjax, "load_model", pytest.fail)
  samples().write(tmp_path / "engine.jsonl")
  settings, message = BAD[name]
  config.update({"samples": str(tmp_path / "engine.jsonl"), **settings})
  with pytest.raises(ValueError, match=message):
    experiment.run(config, tmp_path)


def test_no_such_file(config, tmp_path):
  config.samples = str(tmp_path / "none.jsonl")
  with pytest.raises(FileNotFoundError, match="is no file"):
    experiment.run(config, tmp_path)
