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
  said = " ".join(capsys.readouterr().out.split())
  assert "32,768 tokens, gamma 3, token rule, unless the first column says otherwise" in said
  assert "| gamma 7 | 14 | 4,276 | 3,276 | 1,000 |" in said


@pytest.mark.parametrize(
  ("settings", "words"),
  [
    ({"rules": ("token", "lenient")}, r"config\.rules has \['lenient'\]; rules: token, block, coupled, match"),
    ({"gammas": (1, 0)}, r"config\.gammas=\(1, 0\) must be one whole number or several, each 1 or more"),
    ({"gammas": ("3",)}, r"config\.gammas=\('3',\) must be one whole number"),
    ({"gammas": (48,)}, r"config\.gamma and config\.gammas may be 47 at most, given was 48"),
    ({"vocab_sizes": ()}, r"config\.vocab_sizes=\(\) must be one whole number or several"),
    ({"layers": 0}, r"config\.layers=0 must be 1 or more"),
    ({"rows": 7}, r"config\.rows=7 can't be shared evenly by config\.data=2 devices"),
  ],
)
def test_settings_are_refused_before_anything_compiles(tmp_path, settings, words) -> None:
  config = get_config()
  config.update(settings)
  with pytest.raises(ValueError, match=words):
    collectives.run(config, tmp_path)


def test_too_few_devices(tmp_path) -> None:
  config = get_config()
  config.update(data=200, rows=200)
  with pytest.raises(ValueError, match="takes 800 devices, jax has"):
    collectives.run(config, tmp_path)
