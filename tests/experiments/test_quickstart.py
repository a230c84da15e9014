"""The whole experiment on a tiny random decoder, where counts are known beforehand, and its arithmetic by hand."""

import copy
import json
import pathlib
import string
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import specjax
from configs.quickstart import get_config
from experiments import quickstart, quickstart_show, report
from experiments.quickstart import Bench
from specjax.models.tabular import tabular
from tests import checkpoints

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
  """A random llama with a token a character."""
  folder = tmp_path_factory.mktemp("tiny")
  checkpoints.write("llama_linear", folder)
  characters = sorted(set(string.printable))[: checkpoints.VOCAB_SIZE - 1]
  vocabulary = {token: i for i, token in enumerate(["?unknown?", *characters])}
  backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?unknown?"))
  backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
  backend.decoder = decoders.Fuse()
  backend.save(str(folder / "tokenizer.json"))
  return str(folder)


def tiny_config(model: str) -> ml_collections.ConfigDict:
  config = get_config()
  config.update(model=model, prompts_per_source=2, max_prompt_tokens=32, max_new_tokens=16, gamma=3)
  return config


@pytest.fixture
def config(tiny: str) -> ml_collections.ConfigDict:
  return tiny_config(tiny)


@pytest.fixture(scope="module")
def toy(tiny: str) -> Bench:
  """A tabular language and itself as the draft model, which compile in no time."""
  config = tiny_config(tiny)
  target = tabular(jax.random.key(1), checkpoints.VOCAB_SIZE)
  return Bench(config, target, specjax.ModelDrafter(target), specjax.load_tokenizer(tiny))


@pytest.fixture(scope="module")
def perfect(toy: Bench, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], pathlib.Path]:
  """Results, and their folder, of a drafter that is always right."""
  folder = tmp_path_factory.mktemp("results")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Bench, "load", lambda config: toy)
    return quickstart.run(toy.config, folder), folder / "quickstart"


def test_a_perfect_drafter(perfect: tuple[dict[str, Any], pathlib.Path]) -> None:
  summary = perfect[0]["summary"]
  costs = summary["costs"]
  names = [(setting["source"], setting["temperature"]) for setting in summary["settings"]]
  assert names == [("humaneval", 0.0), ("humaneval", 1.0), ("wikipedia", 0.0), ("wikipedia", 1.0)]
  for setting in summary["settings"]:
    plain, speculative = setting["plain"], setting["speculative"]
    assert (plain["tokens"], plain["target_passes"], plain["block_efficiency"]) == (32, 32, 1.0)
    assert (speculative["tokens"], speculative["target_passes"], speculative["block_efficiency"]) == (32, 8, 4.0)
    assert speculative["acceptance_rate"] == 1.0
    assert speculative["alpha"] == pytest.approx(1.0, abs=1e-4)
    assert speculative["share_of_rounds_with_drafts"] == 1.0
    assert speculative["share_of_rounds_accepting"] == [1.0, 1.0, 1.0]
    predicted = 4 / (3 * costs["c"] + costs["v"])
    assert speculative["predicted_from_block_efficiency"] == pytest.approx(predicted)
    assert speculative["predicted_from_alpha"] == pytest.approx(predicted, rel=1e-3)
    assert setting["same_greedy_text"] == (2 if setting["temperature"] == 0 else None)


def test_every_figure_is_kept(perfect: tuple[dict[str, Any], pathlib.Path]) -> None:
  results, folder = perfect
  assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(results))
  assert (folder / "quickstart.png").read_bytes().startswith(b"\x89PNG")
  assert {path.name for path in folder.iterdir()} == {"results.json", "quickstart.png"}
  assert results["environment"]["jax"] == jax.__version__
  assert results["config"]["gamma"] == 3
  assert [name.split("/")[0] for name in results["items"]] == ["humaneval"] * 2 + ["wikipedia"] * 2
  for item in results["items"].values():
    assert item["prompt_tokens"] == 32
    assert item["prompt_tokens_cut"] > 0
    assert item["greedy_difference"] is None
    assert set(item["pass_seconds"]) == {"decode", "verify", "draft"}
    assert set(item["prompt_seconds"]) == {"plain", "speculative"}
    assert all(0 < seconds < 10 for seconds in item["prompt_seconds"].values())
    assert set(item["runs"]) == {"0.0", "1.0"}
    for runs in item["runs"].values():
      assert (runs["plain"]["rounds"], runs["speculative"]["rounds"]) == (16, 4)
      assert (runs["plain"]["drafted"], runs["speculative"]["drafted"]) == (0, 12)
      assert runs["speculative"]["tested"] == runs["speculative"]["accepted_at"] == [4, 4, 4]
      for figures in runs.values():
        assert 0 < figures["seconds"] < 10
        assert len(figures["text"].replace("?unknown?", "?")) == 16


def test_texts_are_what_sample_draws(perfect: tuple[dict[str, Any], pathlib.Path], toy: Bench) -> None:
  """From the last tokens of the prompt, with the model's own tokenizer, at the temperature that is named."""
  texts = {f"wikipedia/{prompt.name}": prompt.text for prompt in quickstart.prompts("wikipedia", 2)}
  for index, (name, text) in enumerate(texts.items(), start=2):
    runs = perfect[0]["items"][name]["runs"]
    prompt = np.asarray([toy.tokenizer.encode(text)[-32:]])
    for temperature in (0.0, 1.0):
      key = jax.random.fold_in(jax.random.key(0), index)
      warp = specjax.Warp(temperature=temperature)
      result = specjax.sample(toy.target, None, prompt, key=key, max_new_tokens=16, num_draft_tokens=0, warp=warp)
      drawn = toy.tokenizer.decode(result.tokens[0, 32:])
      assert runs[str(temperature)]["plain"]["text"] == drawn
    assert runs["0.0"]["speculative"]["text"] == runs["0.0"]["plain"]["text"] != runs["1.0"]["plain"]["text"]


def test_a_real_decoder_with_ngram_drafts_and_an_interruption(
  config: ml_collections.ConfigDict, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(report, "_commit", lambda: None)  # whoever edits the code during the test doesn't end the run
  calls: list[int] = []
  measure = Bench.measure

  def until_the_third(self: Bench, ids: list[int], index: int) -> dict[str, Any]:
    if len(calls) == 3:
      raise KeyboardInterrupt
    calls.append(index)
    return measure(self, ids, index)

  with monkeypatch.context() as patch:
    patch.setattr(Bench, "measure", until_the_third)
    with pytest.raises(KeyboardInterrupt):
      quickstart.run(config, tmp_path)
  assert calls == [0, 0, 1]  # the first compiles and is not kept
  (unfinished,) = (tmp_path / "quickstart").iterdir()
  kept = dict(map(json.loads, unfinished.read_text().splitlines()))
  assert len(kept) == 2

  def spy(self: Bench, ids: list[int], index: int) -> dict[str, Any]:
    calls.append(index)
    return measure(self, ids, index)

  monkeypatch.setattr(Bench, "measure", spy)
  results = quickstart.run(config, tmp_path)
  assert calls == [0, 0, 1, 0, 2, 3]
  assert {name: results["items"][name] for name in kept} == kept
  for setting in results["summary"]["settings"]:
    assert (setting["plain"]["tokens"], setting["speculative"]["tokens"]) == (32, 32)
    assert setting["same_greedy_text"] in (2, None)


def test_where_greedy_texts_part(toy: Bench) -> None:
  prompt, plain = [5, 6, 7, 8], [9, 10, 11]
  assert toy._difference(prompt, plain, plain) is None
  tokens = jnp.asarray([prompt + plain])
  cache = toy.target.init_cache(toy.target.params, 1, 8)
  logits, _ = toy.target.apply(toy.target.params, tokens, cache, jnp.zeros(1, jnp.int32))
  for position, other in ((0, [12, 10, 11]), (1, [9, 12, 11]), (2, [9, 10, 12]), (2, [9, 10])):
    difference = toy._difference(prompt, plain, other)
    assert difference is not None
    assert difference["position"] == position
    top = np.sort(np.asarray(logits[0, len(prompt) + position - 1]))[::-1]
    assert difference["top2_margin"] == pytest.approx(top[0] - top[1], abs=1e-5)
    decode = toy.tokenizer.decode
    assert difference["plain"] == decode(plain[position : position + 1])
    assert difference["speculative"] == decode(other[position : position + 1])


def figures(**changes: Any) -> dict[str, Any]:
  return {"seconds": 2.0, "generated": 10, "rounds": 10, "drafted": 0, "accepted": 0} | changes


def by_hand() -> tuple[dict[str, Any], ml_collections.ConfigDict]:
  """Two prompts whose ratios differ, so that a mean of ratios is not the ratio of the sums."""
  seconds = {
    "prompt_seconds": {"plain": 0.5, "speculative": 0.6},
    "pass_seconds": {"decode": 0.02, "verify": 0.03, "draft": 0.004},
  }
  nothing: dict[str, Any] = {"tested": [], "accepted_at": [], "overlap": 0.0, "text": ""}
  first = figures(seconds=1.5, rounds=5, drafted=8, accepted=5, tested=[4, 3], accepted_at=[3, 2], overlap=3.0, text="")
  second = figures(
    seconds=6.5, generated=30, rounds=15, drafted=18, accepted=15, tested=[10, 8], accepted_at=[8, 7], overlap=17.0
  )
  items = {
    "mixed/a": seconds
    | {"greedy_difference": None}
    | {"runs": {"0.0": {"plain": figures(**nothing), "speculative": first}}},
    "mixed/b": {
      "prompt_seconds": {"plain": 0.7, "speculative": 0.4},
      "pass_seconds": {"decode": 0.04, "verify": 0.06, "draft": 0.008},
      "greedy_difference": {"position": 3, "top2_margin": 1e-6, "plain": "x", "speculative": "y"},
    }
    | {"runs": {"0.0": {"plain": figures(seconds=8.5, generated=30, rounds=30, **nothing), "speculative": second}}},
  }
  config = get_config()
  config.update(sources=("mixed",), temperatures=(0.0,), prompts_per_source=2, gamma=2)
  return items, config


def test_summary_by_hand() -> None:
  items, config = by_hand()
  summary = quickstart.summarise(items, config)
  assert summary["costs"] == pytest.approx({"decode_ms": 30.0, "v": 1.5, "c": 0.1})
  (setting,) = summary["settings"]
  # Plain: 10.5 s less 1.2 s for 40 tokens. Speculative: 8 s less 1 s.
  assert setting["plain"]["ms_per_token"] == pytest.approx(232.5)
  assert setting["plain"]["ms_per_token_with_prompt"] == pytest.approx(262.5)
  assert setting["plain"]["prompt_ms"] == pytest.approx(600.0)
  assert setting["speedup"] == pytest.approx(9.3 / 7)
  assert setting["speedup_with_prompt"] == pytest.approx(10.5 / 8)
  assert setting["same_greedy_text"] == 1
  drafts = setting["speculative"]
  assert drafts["block_efficiency"] == 2.0
  assert drafts["acceptance_rate"] == pytest.approx(20 / 26)
  assert drafts["alpha"] == pytest.approx(20 / 25)
  assert drafts["share_of_rounds_with_drafts"] == pytest.approx(14 / 20)
  assert drafts["share_of_rounds_accepting"] == pytest.approx([11 / 20, 9 / 20])
  # A round costs 2 * 0.1 + 1.5 = 1.7; seven in ten yield 1 + 0.8 + 0.64 tokens, the others one.
  assert drafts["predicted_from_block_efficiency"] == pytest.approx(2 / 1.7)
  assert drafts["predicted_from_alpha"] == pytest.approx((0.7 * 2.44 + 0.3) / 1.7)


def test_nothing_drafted() -> None:
  items, config = by_hand()
  for item in items.values():
    run = item["runs"]["0.0"]["speculative"]
    run.update(rounds=run["generated"], drafted=0, accepted=0, tested=[0, 0], accepted_at=[0, 0], overlap=0.0)
  drafts = quickstart.summarise(items, config)["settings"][0]["speculative"]
  assert (drafts["acceptance_rate"], drafts["alpha"]) == (None, None)
  assert drafts["predicted_from_alpha"] == drafts["predicted_from_block_efficiency"] == pytest.approx(1 / 1.7)


def test_what_is_printed(perfect: tuple[dict[str, Any], pathlib.Path], capsys: pytest.CaptureFixture[str]) -> None:
  results = copy.deepcopy(perfect[0])
  setting = results["summary"]["settings"][0]
  setting["speedup"], setting["speculative"]["alpha"] = 1.234, None
  item = next(iter(results["items"].values()))
  item["greedy_difference"] = {"position": 7, "top2_margin": 2.5e-6, "plain": " [red]", "speculative": "\n"}
  item["runs"]["0.0"]["speculative"]["text"] = "\n\na [bold] text"
  quickstart_show.print_results(results)
  printed = capsys.readouterr().out
  rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()]
  named = {row[0]: row[1:] for row in rows if len(row) > 5}
  assert named["humaneval T=0 plain"][:2] == ["32", "32"]
  assert named["humaneval T=0 speculative"][:2] == ["32", "8"]
  assert named["humaneval T=0 speculative"][3] == "1.23x"
  assert named["humaneval T=0"][:4] == ["1.00", "-", "100%", "4.00"]
  assert [named[f"{source} T={t}"][-1] for source in ("humaneval", "wikipedia") for t in (0, 1)] == ["2/2", ""] * 2
  assert r"from generated token 7 on, ' [red]' and '\n'; the two highest logits there are 2.5e-06 apart" in printed
  assert "a [bold] text" in printed


def test_the_tables_fit_a_terminal(
  perfect: tuple[dict[str, Any], pathlib.Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("FORCE_COLOR", "1")
  monkeypatch.setenv("COLUMNS", "80")
  quickstart_show.print_results(perfect[0])
  printed = capsys.readouterr().out
  assert "\u256d" in printed  # a drawn frame, so this was taken for a terminal
  assert "\u2026" not in printed  # an ellipsis, where a word was cut


@pytest.mark.parametrize(
  ("name", "value", "words"),
  [
    ("gamma", 0, "a whole number, 1 or more"),
    ("max_new_tokens", 0, "a whole number, 1 or more"),
    ("max_prompt_tokens", -1, "a whole number, 1 or more"),
    ("prompts_per_source", 0, "a whole number, 1 or more"),
    ("parts", 0, "a whole number, 1 or more"),
    ("parts", 10**6, "one of .*1.*, for [0-9]+ devices"),
    ("seed", -1, "a whole number from 0"),
    ("sources", (), "a tuple of one value or more"),
    ("sources", ("mixed", "mixed"), "without repetitions"),
    ("sources", ("xsum",), r"a tuple of some of \('humaneval', 'wikipedia', 'mixed'\)"),
    ("temperatures", (), "a tuple of one value or more"),
    ("temperatures", (1.0, 1.0), "without repetitions"),
    ("temperatures", (0.0, -0.5), "a tuple of numbers, 0"),
    ("temperatures", (float("nan"),), "a tuple of numbers, 0"),
    ("temperatures", (float("inf"),), "a tuple of numbers, 0"),
    ("drafter", "smollm2-135m", "'ngram', or 'model:'"),
    ("drafter", "model:", "'ngram', or 'model:'"),
  ],
)
def test_bad_config(name: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(quickstart, "prompts", None)  # nothing may be loaded before the config was looked at
  monkeypatch.setattr(Bench, "load", None)
  config = get_config()
  config[name] = value
  with pytest.raises(ValueError, match=rf"^config\.{name}=.*: it must be .*{words}"):
    quickstart.run(config)


def test_both_drafters_are_loaded(config: ml_collections.ConfigDict) -> None:
  bench = Bench.load(config)
  assert bench.drafter == specjax.NGramDrafter()
  assert (bench.target.vocab_size, bench.target.context_length) == (97, 128)
  config.drafter = f"model:{config.model}"
  drafter = Bench.load(config).drafter
  assert isinstance(drafter, specjax.ModelDrafter)
  assert drafter.model.apply == bench.target.apply


@pytest.mark.parametrize("name", ["model", "drafter"])
def test_a_wrong_name_is_said_before_a_model_is_loaded(
  name: str, config: ml_collections.ConfigDict, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
  monkeypatch.setattr(specjax, "load_model", None)
  config[name] = "model:nowhere" if name == "drafter" else "nowhere"
  with pytest.raises(FileNotFoundError, match="'nowhere' is neither"):
    quickstart.run(config, tmp_path)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_measured(
  config: ml_collections.ConfigDict, tmp_path: pathlib.Path
) -> None:
  config.max_new_tokens = 97  # the longest prompt takes 32 of the 128 positions
  with pytest.raises(ValueError, match="129 tokens, the target's context holds 128"):
    quickstart.run(config, tmp_path)
  assert not list(tmp_path.glob("quickstart/*"))


def test_the_command_line(tmp_path: pathlib.Path) -> None:
  """From another folder, with the default config; a flag reaches the config's check."""
  command = [sys.executable, "-m", "experiments.quickstart", "--config.sources=('prose',)"]
  environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": ""}
  process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
  assert process.returncode == 1
  assert "config.sources=('prose',): it must be a tuple of some of" in process.stderr
