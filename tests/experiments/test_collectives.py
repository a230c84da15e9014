"""The table and the figure of what a mesh exchanges; tests/sharding has figures of programs."""

import json

import pytest

from configs.collectives import get_config
from experiments import collectives


def test_every_program_is_kept_and_shown(tmp_path, capsys, monkeypatch) -> None:
  calls = []

  def measure(mesh, **settings):
    calls.append(settings)
    size = settings["vocab_size"] // 10
    part = {"count": 0, "bytes": 0}
    parts = dict.fromkeys(("draft", "target", "rest", "filters"), part)
    return {"parts": parts, "count": 14, "bytes": size + 1000, "activations": size, "longest": 4, "host": []}

  monkeypatch.setattr(collectives, "measure", measure)
  config = get_config()
  config.update(data=1, model=1)
  found = collectives.run(config, tmp_path)
  assert len(calls) == len(found) == 9
  assert {call["vocab_size"] for call in calls} == {8_192, 32_768, 131_072}
  assert {call["gamma"] for call in calls} == {1, 3, 7}
  assert {call["rule"] for call in calls} == {"token", "block", "coupled", "match"}
  assert json.loads((tmp_path / "collectives" / "results.json").read_text())["summary"] == found
  assert (tmp_path / "collectives" / "collectives.png").stat().st_size > 10_000
  assert "| gamma 7        |          14 |  4,276 |          3,276 |   1,000 |" in capsys.readouterr().out


def test_too_few_devices(tmp_path) -> None:
  config = get_config()
  config.data = 200
  with pytest.raises(ValueError, match="takes 800 devices, jax has"):
    collectives.run(config, tmp_path)
