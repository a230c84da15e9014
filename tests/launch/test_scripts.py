"""The launch scripts for several processes on this machine, GKE and Slurm: what they start, and what they refuse."""

import functools
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from tests.launch import clone

# Says who it is; as the process of the second argument it ends with the status of the third.
TOY = """
import os, sys

process = os.environ["SPECJAX_PROCESS"]
seen = ["out", process, os.environ["SPECJAX_PROCESSES"], os.environ["JAX_NUM_CPU_DEVICES"], sys.argv[1:]]
os.write(1, (" ".join(map(str, seen)) + "\\n").encode())  # at once: they share a pipe
print("words of process", process, file=sys.stderr)
if sys.argv[2:] and sys.argv[2] == process:
  os.kill(os.getpid(), int(sys.argv[3]))
"""


GKE = ("--cluster=c", "--zone=z", "--type=v6e-8", "--results=/results")


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
  return clone.make(tmp_path, TOY)


def recorded(root: pathlib.Path, script: str, commands: str, *arguments: str):
  """A call with commands that record their words, and these, a list a command."""
  for name in commands.split():
    clone.command(root.parent / "bin", name, clone.RECORDER)
  path = root.parent / "recorded"
  folders = os.pathsep.join([str(root.parent / "bin"), os.environ["PATH"]])
  done = clone.call(root, script, *arguments, PATH=folders, RECORDED=str(path))
  return done, [block.splitlines() for block in path.read_text().split("\n\n")[:-1]] if path.exists() else []


def test_a_detached_run_is_followed_stopped_and_forgotten(root: pathlib.Path) -> None:
  (root / "experiments" / "toy.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
  call = functools.partial(clone.call, root, "detached.sh")
  assert call("--ended").stdout == "none\n"
  command = [str(root / "launch" / "detached.sh"), "toy", "a b"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
    assert follower.stdout is not None
    assert follower.stdout.readline() == "begun\n"
    assert call("--ended").stdout == "running\n"
    refused = call("toy", "a", "b")
    assert (refused.returncode, refused.stdout) == (75, "")
    assert refused.stderr.endswith(f"--stop ends it: {clone.commit(root)} toy 'a b'\n")
    assert call("--stop").returncode == 0
    assert follower.wait(60) == 137
  assert call("--ended").stdout == "ended 137\n"
  assert call("--ended").stdout == "none\n"
  assert call("--stop").stderr == "detached: nothing runs here.\n"


def test_multiprocess_starts_each_and_marks_their_words(root: pathlib.Path) -> None:
  done = clone.call(root, "multiprocess.sh", "--processes=3", "--devices=2", "toy", "a b")
  assert done.returncode == 0, done.stderr
  seen = "3 2 ['--config=configs/toy.py', 'a b']"
  assert sorted(done.stdout.splitlines()) == [f"out {i} {seen}" for i in range(3)]
  assert sorted(done.stderr.splitlines()) == [f"[{i}] words of process {i}" for i in range(3)]


def test_multiprocess_says_which_process_ended(root: pathlib.Path) -> None:
  done = clone.call(root, "multiprocess.sh", "toy", "1", "9")
  assert done.returncode == 137
  assert "multiprocess: process 1 of 2 ended with status 137, signal 9." in done.stderr
  assert "process 0 of 2" not in done.stderr


def test_multiprocess_dry_run_reads_back(root: pathlib.Path) -> None:
  done = clone.call(root, "multiprocess.sh", "--dry-run", "--processes=2", "toy", "a b", "it's")
  first, second = map(shlex.split, done.stdout.splitlines())
  assert first[-4:] == [f"{root}/launch/worker.sh", "toy", "a b", "it's"]
  assert {"JAX_PLATFORMS=cpu", "JAX_NUM_CPU_DEVICES=4", "SPECJAX_PROCESSES=2", "SPECJAX_PROCESS=0"} < set(first)
  assert set(first) ^ set(second) == {"SPECJAX_PROCESS=0", "SPECJAX_PROCESS=1"}


def test_gke_ships_a_clean_clone_and_submits(root: pathlib.Path) -> None:
  (root / "launch" / "local.sh").write_text("changed here, and not committed")
  flags = ("--name=pair", *GKE, "--xpk-flag=--priority=high")
  done, calls = recorded(root, "gke_xpk.sh", "xpk", *flags, "toy", "a b")
  assert done.returncode == 0, done.stderr
  assert f"uncommitted changes stay here: {clone.commit(root)} is shipped" in done.stderr
  (call,) = calls
  (shipped,) = [word for word in call if word.startswith("--script-dir=")]
  assert [word for word in call if word != shipped] == [
    *shlex.split("xpk workload create --workload=pair --cluster=c --zone=z --tpu-type=v6e-8 --num-slices=1"),
    *shlex.split("--max-restarts=10 --base-docker-image=python:3.12 --env=SPECJAX_RESULTS=/results"),
    *shlex.split("--env=SPECJAX_PROCESSES=auto --env=SPECJAX_JAX=jax[tpu] --priority=high"),
    "--command=./launch/worker.sh toy 'a b'",
  ]
  assert not pathlib.Path(shipped.removeprefix("--script-dir=")).exists()
  _, calls = recorded(root, "gke_xpk.sh", "xpk", "--name=pair", *GKE, "--restarts=0", "toy")
  assert "--max-restarts=0" in calls[-1]
  done, calls = recorded(root, "gke_xpk.sh", "xpk kubectl", "--logs", "--name=pair")
  assert calls[-1][:3] == ["kubectl", "logs", "--selector=jobset.sigs.k8s.io/jobset-name=pair"]


def test_slurm_sets_up_and_submits(root: pathlib.Path) -> None:
  flags = ("--nodes=2", "--gpus=8", "--time=1:00:00", "--sbatch-flag=--account=a b")
  done, calls = recorded(root, "slurm.sh", "sbatch", *flags, "toy", "it's")
  assert done.returncode == 0, done.stderr
  assert (root / ".venv" / "setup.log").read_text() == "setup with jax[cuda13]\n"
  (call,) = calls
  assert call[:-1] == [
    *shlex.split("sbatch --job-name=specjax-toy --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --requeue"),
    "--open-mode=append", f"--output={root}/experiments/results/slurm/specjax-toy.log", "--time=1:00:00",
    "--account=a b", "--export=ALL,SPECJAX_PROCESSES=auto",
  ]  # fmt: skip
  assert shlex.split(call[-1].removeprefix("--wrap=")) == ["srun", f"{root}/launch/worker.sh", "toy", "it's"]


@pytest.mark.parametrize(
  ("script", "arguments", "words"),
  [
    ("multiprocess.sh", ["--processes=0", "toy"], "--processes=0 must be a whole number, 1 or more"),
    ("multiprocess.sh", ["--devices", "toy"], "--devices needs a value: --devices=VALUE"),
    ("multiprocess.sh", ["--hosts=2", "toy"], "unknown flag --hosts=2"),
    ("multiprocess.sh", [], "name an experiment: one of toy"),
    ("worker.sh", ["../toy"], "no experiment '../toy'"),
    ("multiprocess.sh", ["toy", "--dry-run"], "--dry-run is a flag of this script: it must stand before"),
    ("gke_xpk.sh", ["--name=n", "--cluster=c", "--zone=z", "--type=v6e-8", "toy"], "--results is missing"),
    ("gke_xpk.sh", ["--name=n", "--zone=z", "toy"], "--cluster is missing"),
    ("gke_xpk.sh", ["--name=My_run", *GKE, "toy"], "--name=My_run must be lower-case letters, digits"),
    ("gke_xpk.sh", [f"--name={'n' * 41}", *GKE, "toy"], "must be lower-case letters, digits and dashes, 40 at most"),
    ("gke_xpk.sh", ["--logs", "--name=a,b"], "--name=a,b must be lower-case letters"),
    ("gke_xpk.sh", ["--name=n", *GKE, "--cluster=-c", "toy"], "--cluster=-c must be lower-case letters"),
    ("gke_xpk.sh", ["--name=n", *GKE, "--restarts=-1", "toy"], "--restarts=-1 must be a whole number, 0 or more"),
    ("gke_xpk.sh", ["--name=n", *GKE, "--slices=0", "toy"], "--slices=0 must be a whole number, 1 or more"),
    ("gke_xpk.sh", ["--name=n", *GKE, "toy", "a", "--restarts=1"], "--restarts=1 is a flag of this script"),
    ("slurm.sh", ["--gpus=many", "toy"], "--gpus=many must be a whole number"),
    ("slurm.sh", ["--delete"], "--name=NAME is missing"),
    ("slurm.sh", ["--delete", "--name=a,b"], "--name=a,b must be letters, digits, dots, dashes and underscores"),
    ("slurm.sh", ["--name=a\n#SBATCH --gpus=9", "toy"], "#SBATCH --gpus=9 must be letters, digits"),
    ("slurm.sh", ["--name=../../a%j", "toy"], "--name=../../a%j must be letters, digits"),
    ("slurm.sh", ["toy", "--config.gamma=4", "--list"], "--list is a flag of this script: it must stand before"),
  ],
)
def test_what_is_wrong_is_said_before_anything_starts(
  root: pathlib.Path, script: str, arguments: list[str], words: str
) -> None:
  done, calls = recorded(root, script, "xpk kubectl sbatch scancel", *arguments)
  assert done.returncode == 2
  assert words in done.stderr
  assert calls == []
  assert not (root / ".venv").exists()


@pytest.mark.parametrize(
  "script", ["worker.sh", "detached.sh", "multiprocess.sh", "tpu_vm.sh", "gke_xpk.sh", "slurm.sh"]
)
def test_the_head_of_a_script_is_its_help(root: pathlib.Path, script: str) -> None:
  done = clone.call(root, script, "--help")
  assert (done.returncode, done.stderr) == (0, "")
  assert f"./launch/{script}" in done.stdout
  assert not [line for line in done.stdout.splitlines() if line.startswith(("#", "set -"))]


def test_shellcheck() -> None:
  scripts = sorted([*(clone.ROOT / "launch").glob("*.sh"), clone.ROOT / "tests" / "launch" / "gcloud.sh"])
  tool = pathlib.Path(sys.executable).parent / "shellcheck"
  done = subprocess.run([tool, "-x", *scripts], cwd=clone.ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
