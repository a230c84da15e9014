"""Experiments that sample with specjax and audit what came out, on a toy in place of a model that must be fetched."""

import dataclasses
import json
import types

import numpy as np
import pytest

import specjax
from configs import own_rules as own_rules_config
from configs import who_was_right as who_was_right_config
from experiments import own_rules, who_was_right
from specjax.audit import audit
from tests.audit.engines import V, target


class Tokenizer:
  eos_ids = (V - 1,)

  def encode(self, text):
    return [ord(letter) % V for letter in text]

  def decode(self, ids):
    return " ".join(map(str, ids))


@pytest.fixture(autouse=True)
def toys(monkeypatch):
  monkeypatch.setattr(specjax, "load_model", lambda name, dtype=None: target())
  monkeypatch.setattr(specjax, "load_tokenizer", lambda name: Tokenizer())

  def prompts(source, count, seed):
    rng = np.random.default_rng(seed)
    return [types.SimpleNamespace(text="".join(map(chr, rng.integers(97, 123, 2 + i % 9)))) for i in range(count)]

  for module in (who_was_right, own_rules):
    monkeypatch.setattr(module, "prompts", prompts)


def test_who_was_right(tmp_path, capsys):
  config = who_was_right_config.get_config()
  config.update(prompts=128, max_prompt_tokens=8, max_new_tokens=24)
  results = who_was_right.run(config, tmp_path)
  faults = {name: own["fault"] for name, own in results["summary"].items()}
  assert faults == {"correct": False, "batching fault": True, "bfloat16": False, "lenient rule": True}
  items = results["items"]
  for name, own in results["summary"].items():
    generations = [tuple(row) for row in items[name]["tokens"]]
    assert len(generations) == 256
    assert own["tokens"] == sum(map(len, generations))
    assert own["tokens_a_pass"] == own["tokens"] / items[name]["rounds"]
    same = np.mean([a == tuple(b) for a, b in zip(generations, items["plain"]["tokens"], strict=True)])
    assert own["same_text_as_plain"] == same
    assert same < 0.7
  assert results["summary"]["lenient rule"]["tokens_a_pass"] > results["summary"]["correct"]["tokens_a_pass"]
  written = json.loads((tmp_path / "who_was_right" / "results.json").read_text())
  assert written["summary"] == results["summary"]
  assert (tmp_path / "who_was_right" / "who_was_right.png").is_file()
  assert capsys.readouterr().out.count("no sign of a fault") == 2


def test_repeated_counts_later_occurrences():
  assert who_was_right._repeated([[1, 2, 3, 1, 2, 3], [1, 2, 3, 4]]) == 1 / 6
  assert who_was_right._repeated([[1], []]) == 0


def test_own_rules(tmp_path, monkeypatch):
  config = own_rules_config.get_config()
  config.update(tokens=6000, rows=128, max_prompt_tokens=8, new_tokens=24, rules=("token", "coupled"))
  summary = own_rules.run(config, tmp_path)
  assert list(summary) == ["token", "coupled"]
  for own in summary.values():
    assert own["ok"] is True
    assert own["generated"] >= 6000
    assert 0 < own["accepted"] < own["drafted"]
  first = json.loads((tmp_path / "own_rules" / "results.json").read_text())["items"]
  assert first["token/0"]["tokens"] != first["token/1"]["tokens"]
  assert first["token/0"]["tokens"] != first["coupled/0"]["tokens"]

  # Held against another law than the one it sampled, it fails.
  monkeypatch.setattr(own_rules, "audit", lambda _, *rest, **named: audit(other, *rest, **named))
  other = dataclasses.replace(target(), params=1.1 * target().params)
  config.rules = ("token",)
  assert own_rules.run(config, tmp_path)["token"]["ok"] is False


def test_own_rules_on_a_mesh(tmp_path):
  """Of one device here; tests/sharding and tests/launch have tokens of several devices and processes."""
  config = own_rules_config.get_config()
  config.update(tokens=3000, rows=128, max_prompt_tokens=8, new_tokens=24, rules=("token",))
  plain = own_rules.run(config, tmp_path / "one")
  config.mesh = (1, 1)
  assert own_rules.run(config, tmp_path / "mesh")["token"]["tests"] == plain["token"]["tests"]


@pytest.mark.parametrize(
  ("mesh", "words"),
  [
    ((1, 3), r"config\.mesh=\(1, 3\) takes 3 devices, and jax has 1: it must take all of them"),
    ((1,), r"config\.mesh=\(1,\) must be two whole numbers, 1 or more: devices for rows, and for parameters"),
    ((1, 0), r"config\.mesh=\(1, 0\) must be two whole numbers"),
    (("1", 1), r"config\.mesh=\('1', 1\) must be two whole numbers"),
    ((3, 1), r"config\.rows=64 can't be shared evenly by the 3 devices for rows of config\.mesh=\(3, 1\)"),
  ],
)
def test_own_rules_on_a_mesh_that_cannot_be(tmp_path, monkeypatch, mesh, words):
  monkeypatch.setattr(own_rules, "_load", None)
  monkeypatch.setattr(own_rules.jax, "device_count", lambda: 3 if mesh == (3, 1) else 1)
  config = own_rules_config.get_config()
  config.mesh = mesh
  with pytest.raises(ValueError, match=words):
    own_rules.run(config, tmp_path)


def test_a_lossy_rule_is_refused(tmp_path):
  config = own_rules_config.get_config()
  config.rules = ("lenient",)
  with pytest.raises(ValueError, match=r"\['lenient'\]; lossless rules: token"):
    own_rules.run(config, tmp_path)
