"""Results survive what interrupts them, and are read back as they were written."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from experiments import report


def test_environment_is_json_and_names_the_device() -> None:
  environment = report.environment()
  assert json.loads(json.dumps(environment)) == environment
  assert environment["jax"] == jax.__version__
  assert (environment["backend"], environment["device_count"]) == ("cpu", jax.device_count())
  assert environment["cores"] >= 1
  assert environment["cpu"]


def test_commit_tells_a_changed_work_tree(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  def git(*arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

  monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))
  monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
  assert report._commit() is None
  git("init")
  (tmp_path / "code.py").write_text("1")
  git("add", "code.py")
  git("commit", "-m", "code")
  clean = report._commit()
  assert clean is not None
  assert len(clean) == 40
  seen = set()
  for text in ("2", "3"):
    (tmp_path / "code.py").write_text(text)
    seen.add(report._commit())
  assert len(seen) == 2
  assert all(commit and commit.startswith(f"{clean}+") for commit in seen)


@dataclasses.dataclass(frozen=True)
class Figures:
  rate: jax.Array
  count: int


def test_write_json_takes_what_experiments_hold(tmp_path: pathlib.Path) -> None:
  value = {
    "figures": Figures(jnp.array([0.5, jnp.nan]), 3),
    "config": ml_collections.ConfigDict({"steps": 4, "folder": {"name": pathlib.Path("a/b")}}),
    "numbers": (np.float32(1.5), np.int64(2), math.inf, jnp.bfloat16(0.25), jnp.ones(2, jnp.bfloat16), True, None),
    7: "key",
  }
  path = tmp_path / "new" / "value.json"
  report.write_json(path, value)
  text = path.read_text()
  assert "NaN" not in text
  assert json.loads(text) == {
    "figures": {"rate": [0.5, None], "count": 3},
    "config": {"steps": 4, "folder": {"name": "a/b"}},
    "numbers": [1.5, 2, None, 0.25, [1.0, 1.0], True, None],
    "7": "key",
  }


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "value.json"
  report.write_json(path, 1)
  with pytest.raises(TypeError):
    report.write_json(path, {"bad": object()})

  def half_a_write() -> None:
    with report.replacing(path) as temporary:
      temporary.write_text("half")
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    half_a_write()
  assert path.read_text() == "1\n"
  assert list(tmp_path.iterdir()) == [path]


def unfinished(folder: pathlib.Path) -> pathlib.Path:
  (path,) = folder.glob("unfinished-*")
  return path


def must_not_run() -> None:
  raise AssertionError("computed again")


def test_a_run_goes_on_after_an_interruption(tmp_path: pathlib.Path) -> None:
  config = {"prompts": 2}
  fresh = report.Run("demo", config, tmp_path).item("a", lambda: {"ms": (1.0, math.nan)})
  run = report.Run("demo", config, tmp_path)
  assert run.item("a", must_not_run) == fresh == {"ms": [1.0, None]}
  assert run.item("b", lambda: 2) == 2
  path = run.finish({"speedup": 2.0})
  results = json.loads(path.read_text())
  assert path == tmp_path / "demo" / "results.json"
  assert (results["config"], results["summary"]) == (config, {"speedup": 2.0})
  assert results["items"] == {"a": {"ms": [1.0, None]}, "b": 2}
  assert results["environment"] == report.environment()
  assert report.Run("demo", config, tmp_path).item("a", lambda: "afresh") == "afresh"


def test_nothing_is_kept_of_an_item_that_failed(tmp_path: pathlib.Path) -> None:
  with pytest.raises(AssertionError, match="computed again"):
    report.Run("demo", {}, tmp_path).item("a", must_not_run)
  assert report.Run("demo", {}, tmp_path).item("a", lambda: 1) == 1


def test_another_config_or_environment_starts_afresh_and_says_so(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  report.Run("demo", {"gamma": 4}, tmp_path).item("a", lambda: 4)
  assert capsys.readouterr().err == ""
  assert report.Run("demo", {"gamma": 5}, tmp_path).items == {}
  assert f"demo starts afresh: what {unfinished(tmp_path / 'demo')} kept" in capsys.readouterr().err
  monkeypatch.setenv("XLA_FLAGS", "--another")
  assert report.Run("demo", {"gamma": 4}, tmp_path).items == {}
  monkeypatch.undo()
  capsys.readouterr()
  assert report.Run("demo", {"gamma": 4}, tmp_path).items == {"a": 4}
  assert capsys.readouterr().err == ""


@pytest.mark.parametrize("torn", ['["c", {"ms', '["c", 3]', "\0\0\0\n", '["c", \n["d", 4]\n'])
def test_a_torn_line_is_dropped(tmp_path: pathlib.Path, torn: str) -> None:
  run = report.Run("demo", {}, tmp_path)
  for key, value in {"a": 1, "b": 2}.items():
    run.item(key, lambda value=value: value)
  path = unfinished(run.folder)
  with path.open("a") as file:
    file.write(torn)
  run = report.Run("demo", {}, tmp_path)
  assert run.items == {"a": 1, "b": 2}
  run.item("c", lambda: 5)
  assert report.Run("demo", {}, tmp_path).items == {"a": 1, "b": 2, "c": 5}


def test_median_interleaved_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
  calls: list[str] = []
  clock = iter(np.cumsum([0, 1, 0, 10, 0, 20, 0, 3, 0, 2, 0, 30]).tolist())
  monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
  timings = report.median_interleaved({"x": lambda: calls.append("x"), "y": lambda: calls.append("y")}, repeats=3)
  assert calls == ["x", "y", *"xy", *"yx", *"xy"]
  assert timings["x"] == report.Timing(2.0, (1.0, 3.0, 2.0))
  assert timings["y"] == report.Timing(20.0, (10.0, 20.0, 30.0))
  with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
    report.median_interleaved({}, repeats=0)


def test_median_interleaved_waits_for_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
  waited = []
  monkeypatch.setattr(jax, "block_until_ready", waited.append)
  report.median_interleaved({"x": lambda: "array"}, repeats=2)
  assert waited == ["array"] * 3


def test_a_table_that_is_not_on_a_terminal_is_markdown() -> None:
  """In a process of its own, with an 80-column terminal in its environment that must not break the lines."""
  rows = [["a" * 90, "[red]"], ["b", "10"]]
  code = f"from experiments import report; report.print_table('T [1]', ['name', 'ms'], {rows})"
  root = pathlib.Path(__file__).parents[2]
  output = subprocess.run(
    [sys.executable, "-c", code],
    cwd=root,
    env={"COLUMNS": "80", "JAX_PLATFORMS": "cpu", "PATH": ""},
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  lines = [line for line in output.splitlines() if line.strip()]
  assert lines[0] == "T [1]"
  cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[1:]]
  assert [cells[0], *cells[2:]] == [["name", "ms"], *rows]
  assert set(lines[2]) <= set("|-: ")
  assert lines[-1].endswith(" 10 |")


def test_save_figure(tmp_path: pathlib.Path) -> None:
  report.plot_style()
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots()
  axes.plot([1, 2])
  report.save_figure(figure, tmp_path / "plot.png")
  assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
  assert not plt.get_fignums()
