"""The graph matrix as an experiment: resumed graph by graph, several devices in their own process, JSON, a figure."""

import json

import pytest

from configs.numerics import get_config
from experiments import numerics_matrix, report
from specjax.numerics import Graph
from specjax.numerics.comparison import Reference

FORM = {"scan_layers": True, "cpu_kernels": False}  # compiles fast
HERE = [Graph(**FORM), Graph(width=4, **FORM), Graph(precision="BF16_BF16_BF16")]
SPLIT, ROWS, TOO_MANY = Graph(mesh=(1, 2), **FORM), Graph(batch=2, mesh=(2, 1), **FORM), Graph(mesh=(1, 8))


def test_the_matrix(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
  monkeypatch.setattr(numerics_matrix, "graphs", lambda _: HERE)
  monkeypatch.setattr(numerics_matrix, "mesh_graphs", lambda _: [SPLIT, ROWS, TOO_MANY])
  config = get_config()
  config.model = numerics_matrix.TOY
  config.matrix.update(toy_contexts=2, toy_tokens=6, devices=2)
  kept = report.Run("numerics", config, tmp_path)
  summary = numerics_matrix.run(config, kept)["toy"]

  assert set(summary["graphs"]) == {str(graph) for graph in (*HERE[:2], SPLIT, ROWS)}
  # Split tensors add their sums up in another order; split rows compute what one row does.
  assert 0 < summary["graphs"][str(SPLIT)].rms_error.estimate < 1e-5
  assert (str(HERE[0]), str(ROWS)) in [group["graphs"] for group in summary["identical"]]
  assert summary["not_run"][str(TOO_MANY)] == "it takes 8 devices, and this process has 2 (cpu)"
  assert "not supported" in summary["not_run"][str(HERE[2])]
  assert (kept.folder / "matrix-toy.png").is_file()
  assert "Not run: decode, mesh 1x8: it takes 8 devices" in capsys.readouterr().out

  # Interrupted before the end: what was measured is not measured again, here or elsewhere.
  def again(*_):
    raise AssertionError("measured twice")

  monkeypatch.setattr(Reference, "measure", again)
  monkeypatch.setattr(numerics_matrix, "_elsewhere", again)
  resumed = report.Run("numerics", config, tmp_path)
  assert str(numerics_matrix.run(config, resumed)["toy"]) == str(summary)
  written = json.loads(resumed.finish({"matrix": summary}).read_text())
  assert written["summary"]["matrix"]["graphs"][str(SPLIT)]["bits"] == 0


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
  config = get_config()
  monkeypatch.setattr(numerics_matrix.sys, "executable", "/bin/false")
  with pytest.raises((RuntimeError, BrokenPipeError)):
    list(numerics_matrix._elsewhere("toy", [], [SPLIT], config.matrix))
