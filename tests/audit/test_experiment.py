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


def test_no_such_file(config, tmp_path):
  config.samples = str(tmp_path / "none.jsonl")
  with pytest.raises(FileNotFoundError, match="is no file"):
    experiment.run(config, tmp_path)
