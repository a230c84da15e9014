"""The text part of the numerics experiment, on a toy whose passes of four tokens are off by a planted error."""

import json

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

import specjax
from configs.numerics import get_config
from experiments import numerics, numerics_text, report
from specjax.models import tabular
from specjax.numerics.divergence import first_difference

V, GAMMA = 24, 3


def apply(params, tokens, cache, start):
  """A tabular language; in passes as wide as verification, with the error added."""
  table, error = params
  model = tabular.from_table(table)
  logits, cache = model.apply(table, tokens, cache, start)
  if tokens.shape[1] == GAMMA + 1:
    logits += model.apply(error, tokens, cache, start)[0]
  return logits, cache


def init_cache(params, batch: int, max_length: int):
  return tabular.from_table(params[0]).init_cache(params[0], batch, max_length)


def model(name: str, dtype: str) -> specjax.LanguageModel:
  table = tabular.tabular(jax.random.key(0), V).params
  size = {"float32": 0.0, "bfloat16": 0.2}[dtype]
  error = size * jax.random.uniform(jax.random.key(1), table.shape, minval=-1.0)
  return specjax.LanguageModel((table, error), apply, init_cache, V)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ml_collections.ConfigDict:
  def encoded(config, source: str, count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, V, rng.integers(3, 9)).tolist() for _ in range(count)]

  monkeypatch.setattr(numerics_text, "_model", model)
  monkeypatch.setattr(numerics_text, "_encoded", encoded)
  config = get_config()
  config.model, config.parts = numerics_text.TOY, ("text",)
  config.text.update(
    prompts={"float32": (3, 2), "bfloat16": (100, 60), "float16": (0, 0)},
    rows=64, prompt_tokens=7, new_tokens=10, gamma=GAMMA, held_out=5, held_out_tokens=4,
  )  # fmt: skip
  return config


def nats(prompt, tokens) -> float:
  """-log p of the tokens in the language without an error."""
  text = jnp.array([*prompt, *tokens])[None]
  log_p = np.asarray(tabular.laws(tabular.from_table(model("", "float32").params[0]), text, specjax.Warp().per_row(1)))
  places = np.arange(len(prompt) - 1, text.shape[1] - 1)
  return -float(log_p[0, places, tokens].sum(dtype=np.float64))


def test_texts(config, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
  results = numerics.run(config, tmp_path)
  summary = results["summary"]["text"]
  exact, rough = summary["texts"]["float32"], summary["texts"]["bfloat16"]
  for mode, count in (("greedy", 3), ("coupled", 2)):
    assert (exact[mode]["prompts"], exact[mode]["same"], exact[mode]["kinds"]) == (count, count, {})
    assert exact[mode]["nll_change"] == (0, 0, 0)
  rows = [row for i in range(3) for row in results["items"][f"text bfloat16 {i}"]]
  assert [row["mode"] for row in rows] == ["greedy"] * 100 + ["coupled"] * 60
  prompts = [text[-7:] for text in numerics_text._encoded(config, "", 100)]
  for mode, one in rough.items():
    own = [(prompts[i], row) for i, row in enumerate(r for r in rows if r["mode"] == mode)]
    differ = [row for _, row in own if row["different"] is not None]
    assert 0.2 < len(differ) / len(own) < 0.9
    # All of it is numerics, and each of the two kinds of passes gives its text again.
    assert one["kinds"] == {"numerics": len(differ)}
    assert one["given_again"] == len(differ)
    assert 0 < one["largest_margin_in_errors"] <= 2
    assert one["same_share"][0] == pytest.approx(1 - len(differ) / len(own))
    low, high = one["measured"][1:]
    assert low <= one["predicted"][0] <= high
    for prompt, row in own[:5]:
      assert row["different"] == first_difference(row["plain"], row["speculative"])
      for name in ("plain", "speculative"):
        assert row["nll"][name] == pytest.approx(nats(prompt, row[name]), rel=1e-5)
    total = sum(row["nll"]["plain"] for _, row in own)
    assert one["perplexity"]["plain"] == pytest.approx(np.exp(total / one["tokens"]))
  assert summary["held_out"]["float32"]["nll_change"] == (0, 0, 0)
  assert summary["held_out"]["bfloat16"]["nll_change"] == (0, 0, 0)  # fed in passes of three tokens
  assert (tmp_path / "numerics" / "text-toy.png").is_file()
  shown = capsys.readouterr().out
  assert "numerics at token" in shown

  # Interrupted, it goes on where it was, and says the same.
  def again(*_):
    raise AssertionError("measured twice")

  kept = report.Run("numerics", config, tmp_path)
  kept.items.update(results["items"])
  monkeypatch.setattr(numerics_text._Batch, "measure", again)
  monkeypatch.setattr(numerics_text, "_held_out", again)
  assert numerics_text.run(config, kept) == summary
  assert json.loads((tmp_path / "numerics" / "results.json").read_text())["summary"]["text"]["texts"].keys() == {
    "float32",
    "bfloat16",
  }


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"prompts": {"float64": (2, 2)}}, r"has \['float64'\]; allowed: float32, bfloat16, float16"),
    ({"prompts": {"float32": (1, 2)}}, r"float32=\(1, 2\) must be"),
    ({"gamma": 0}, "gamma=0 must be at least 1"),
    ({"held_out_tokens": 1}, "held_out_tokens=1"),
  ],
)
def test_bad_settings(config, tmp_path, change, message: str) -> None:
  with config.text.unlocked():
    config.text.update(change)
  with pytest.raises(ValueError, match=message):
    numerics.run(config, tmp_path)


def test_unknown_part(config, tmp_path) -> None:
  config.parts = ("txet",)
  with pytest.raises(ValueError, match=r"\['txet'\]; allowed: matrix, text"):
    numerics.run(config, tmp_path)
