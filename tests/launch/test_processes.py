"""Experiments in several processes over loopback, started by launch/multiprocess.sh: one text, one result, no hang."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import pytest

from experiments import processes
from tests import checkpoints
from tests.launch import clone

# Compiled for speed of compiling: two processes on the machine of the tests.
FLAGS = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
PARTS = ("__init__.py", "report.py", "processes.py")

# 8 devices, 4 a process. The first mesh is two of each; parameters are split over processes in both. On the first they
# are placed by `shard`; on the second each process reads its own parts from the files.
GENERATIONS = """
import functools
import os

import jax
import numpy as np

import specjax
from experiments import processes, report
from tests.launch.generations import begin, flatter, generate, rounds


def run(config):
  kept = report.Run("toy", config)
  process = int(os.environ["SPECJAX_PROCESS"])
  given = kept.item("given", lambda: process + 40)
  load = functools.partial(specjax.load_model, os.environ["MODEL"], dtype=np.float32, scan_layers=True)
  target = load()
  assert processes.whole(jax.numpy.arange(3)).tolist() == [0, 1, 2]  # its own, and not that of each process in turn
  texts = {"one device": np.asarray(generate(target, None).tokens).tolist() if process == 0 else []}
  by_process = np.array(jax.devices()).reshape(2, 4)
  meshes = [specjax.sharding.mesh(model=4, devices=each.ravel()) for each in (by_process[:, :2], by_process.T)]
  models = {
    "2 x 2": (specjax.sharding.shard(target, meshes[0]), specjax.ModelDrafter(flatter(target))),
    "2 x 4": (load(mesh=meshes[1]), specjax.NGramDrafter()),
  }
  for mesh, (name, (split, drafter)) in zip(meshes, models.items(), strict=True):
    assert len({device.process_index for device in mesh.devices[0]}) == 2
    result = generate(split, specjax.sharding.shard(drafter, mesh))
    assert result.stats.accepted.sum() > 0
    texts[name] = processes.whole(result.tokens).tolist()
  # Each process writes its own parts of a state, twice over the same path, and reads those of another mesh.
  split, drafter = models["2 x 4"]
  state, saved = begin(split, drafter), os.environ["STATE"]
  specjax.save_state(state, saved)
  specjax.save_state(rounds(state, split, drafter, 3), saved, overwrite=True)
  split = models["2 x 2"][0]
  state = rounds(specjax.load_state(saved, split, drafter), split, drafter, 13)
  texts["resumed"] = processes.whole(state.result().tokens[:, : result.tokens.shape[1]]).tolist()
  kept.finish({"given": given, "texts": texts})
  print("said once")


if __name__ == "__main__":
  report.launch(run, "toy")
"""
CONFIG = """
import ml_collections, os

def get_config():
  return ml_collections.ConfigDict({"model": {"name": "tiny", "gamma": %s}})
"""

# A loop of collectives, in the midst of which one process is killed, hangs, or raises.
LOOP = """
import os, signal
from experiments import processes, report

def run(config):
  victim, way = int(os.environ["VICTIM"]), os.environ["WAY"]
  for i in range(10**9):
    processes.gather(i)
    if i == 3 and victim == int(os.environ["SPECJAX_PROCESS"]):
      if way == "raise":
        raise RuntimeError("it is broken here")
      os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGSTOP)

if __name__ == "__main__":
  report.launch(run, "toy")
"""


# Which of the two engines notices first, the one that computes or the one that watches, is a matter of moments.
LOST = ("by peer", "another task died")


def start(root: pathlib.Path, *flags: str, **environment: str):
  paths = {"PYTHONPATH": str(clone.ROOT), "SPECJAX_RESULTS": str(root.parent / "results")}
  return clone.call(root, "multiprocess.sh", *flags, "toy", **paths, **FLAGS, **environment)


def with_config(root: pathlib.Path, gamma: str) -> pathlib.Path:
  (root / "configs" / "toy.py").write_text(CONFIG % gamma)
  return root


def test_two_processes_write_what_one_device_does(tmp_path: pathlib.Path) -> None:
  root = with_config(clone.make(tmp_path, GENERATIONS, *PARTS), "4")
  checkpoints.write("qwen2", tmp_path / "model", shards=3)
  done = start(root, MODEL=str(tmp_path / "model"), STATE=str(tmp_path / "state"))
  assert done.returncode == 0, done.stderr
  assert done.stdout == "said once\n"
  folder = tmp_path / "results" / "toy"
  assert [path.name for path in folder.iterdir()] == ["results.json"]
  results = json.loads((folder / "results.json").read_text())
  assert results["environment"]["device_count"] == 8
  assert results["summary"]["given"] == results["items"]["given"] == 40
  texts = results["summary"]["texts"]
  assert len(texts) == 4
  assert texts["2 x 2"] == texts["2 x 4"] == texts["resumed"] == texts["one device"]
  assert len({token for row in texts["one device"] for token in row}) > 10


def test_other_settings_in_one_process_are_refused(tmp_path: pathlib.Path) -> None:
  root = with_config(clone.make(tmp_path, LOOP, *PARTS), '4 + int(os.environ["SPECJAX_PROCESS"])')
  done = start(root, VICTIM="9", WAY="none")
  assert done.returncode == 1
  words = (
    "settings and code must be the same in every process, but processes 0 and 1 differ in config.model.gamma: 4 and 5"
  )
  assert all(f"[{process}] ValueError: {words}" in done.stderr for process in range(2))


@pytest.mark.parametrize(("victim", "way"), [(0, "kill"), (1, "stop"), (1, "raise")])
def test_a_process_that_dies_ends_the_others(tmp_path: pathlib.Path, victim: int, way: str) -> None:
  root = with_config(clone.make(tmp_path, LOOP, *PARTS), "4")
  done = start(root, "--heartbeat=5", VICTIM=str(victim), WAY=way)
  assert done.returncode != 0
  ended = [line for line in done.stderr.splitlines() if line.startswith("multiprocess:")]
  assert [line.split(" ended")[0] for line in ended] == [f"multiprocess: process {i} of 2" for i in range(2)]
  ending = {"kill": f"signal {signal.SIGKILL:d}", "stop": f"signal {signal.SIGSTOP:d}", "raise": "status 1"}
  assert ended[victim].endswith(f"{ending[way]}.")
  assert ("RuntimeError: it is broken here" in done.stderr) == (way == "raise")
  other = [line for line in done.stderr.splitlines() if line.startswith(f"[{1 - victim}]")]
  assert any(word in line for line in other for word in LOST), done.stderr


def test_a_joined_process_can_be_terminated() -> None:
  program = "import os, signal, time; from experiments import processes; processes.join();"
  program += "os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)"
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
  environment = {
    "SPECJAX_PROCESSES": "1",
    "SPECJAX_PROCESS": "0",
    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
    "PYTHONPATH": str(clone.ROOT),
  }
  done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **environment}, timeout=120)
  assert done.returncode == -signal.SIGTERM


def test_alone_nothing_is_joined_and_everything_is_first() -> None:
  processes.join({})
  assert not jax.distributed.is_initialized()
  assert processes.first()
  assert not processes.several()
  assert processes.gather({"a": 1}) == [{"a": 1}]
  assert processes.share(3) == 3


@pytest.mark.parametrize(
  ("environment", "words"),
  [
    ({"SPECJAX_PROCESSES": "two"}, "SPECJAX_PROCESSES='two' must be a whole number, 1 or more"),
    ({"SPECJAX_PROCESSES": "2"}, "SPECJAX_PROCESS=None must be a whole number, 0 or more"),
    ({"SPECJAX_PROCESSES": "2", "SPECJAX_PROCESS": "2"}, "SPECJAX_PROCESS=2 must be 0 to 1"),
    (
      {"SPECJAX_PROCESSES": "2", "SPECJAX_PROCESS": "1"},
      "JAX_COORDINATOR_ADDRESS='' must be the host:port of process 0",
    ),
    (
      {"SPECJAX_PROCESSES": "auto", "SPECJAX_HEARTBEAT": "0"},
      "SPECJAX_HEARTBEAT='0' must be a whole number, 1 or more",
    ),
  ],
)
def test_an_environment_that_cannot_be(environment: dict[str, str], words: str) -> None:
  with pytest.raises(ValueError, match=words):
    processes.join(environment)
