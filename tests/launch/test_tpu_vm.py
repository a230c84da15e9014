"""launch/tpu_vm.sh against a cloud in a folder: every command that it sends is really run."""

import os
import pathlib
import shlex
import signal
import subprocess
import time

import pytest

from tests.launch import clone

# Two items; worker 0 writes. On its first machine it is pre-empted after the first, once that was fetched. With --slow
# there is time after the first item, to lose connections or to go away.
TOY = """
import os, pathlib, shutil, sys, time

seen = ["worker", os.environ["WORKER"], os.environ["SPECJAX_PROCESSES"], sys.argv[1:]]
os.write(1, (" ".join(map(str, seen)) + "\\n").encode())  # at once: what workers say ends in one pipe
if os.environ["WORKER"] == "0":
  cloud, items = pathlib.Path(os.environ["CLOUD"]), pathlib.Path("experiments/results/toy/items")
  items.parent.mkdir(parents=True, exist_ok=True)
  if "--fail" in sys.argv:
    sys.exit("it failed")
  if "--slow" in sys.argv:
    with items.open("a") as file:
      file.write(f"one on {os.getpid()}\\n")
    (cloud / "reached").touch()
    for _ in range(300):
      if not (cloud / "hold").exists() and not (cloud / "drop").read_text():
        break
      time.sleep(0.1)
  if "--preempt" in sys.argv and not items.exists():
    items.write_text(f"one on {os.getpid()}\\n")
    fetched = pathlib.Path(os.environ["FETCHED"]) / "toy" / "items"
    for _ in range(300):
      if fetched.exists():
        break
      time.sleep(0.1)
    (cloud / "machines" / "pair" / "state").write_text("PREEMPTED")
    os._exit(1)
  with items.open("a") as file:
    file.write(f"two on {os.getpid()}\\n")
"""

FLAGS = ("--name=pair", "--zone=us-central2-b", "--type=v4-16")


class Cloud:
  """A clone and a cloud."""

  def __init__(self, folder: pathlib.Path):
    self.root, self.folder = clone.make(folder, TOY), folder / "cloud"
    self.results = self.root / "experiments" / "results" / "pair"
    self.folder.mkdir()
    clone.command(folder / "bin", "gcloud", (pathlib.Path(__file__).parent / "gcloud.sh").read_text())

  def call(self, *arguments: str):
    return clone.call(self.root, "tpu_vm.sh", *arguments, **self.environment)

  @property
  def environment(self) -> dict[str, str]:
    path = os.pathsep.join([str(self.folder.parent / "bin"), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "CLOUD": str(self.folder), "FETCHED": str(self.results)}

  @property
  def calls(self) -> list[str]:
    path = self.folder / "calls"
    return path.read_text().splitlines() if path.exists() else []

  def sent(self, words: str) -> list[str]:
    return [call for call in self.calls if words in call]

  def machines(self) -> list[str]:
    return sorted(os.listdir(self.folder / "machines"))


@pytest.fixture
def cloud(tmp_path: pathlib.Path) -> Cloud:
  return Cloud(tmp_path)


def test_dry_run_prints_the_commands_and_sends_none(cloud: Cloud) -> None:
  flags = ("--spot", "--queued", "--project=mine", "--create-flag=--network=a net")
  done = cloud.call("--dry-run", *FLAGS, *flags, "toy", "--config.model=a b", "it's")
  assert (done.returncode, done.stderr, cloud.calls) == (0, "", [])
  commands = [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]
  where = ["--zone=us-central2-b", "--project=mine"]
  assert commands[0] == [
    *shlex.split("gcloud compute tpus queued-resources create pair --node-id=pair"), *where, "--accelerator-type=v4-16",
    "--spot", "--network=a net", "--runtime-version=tpu-ubuntu2204-base",
  ]  # fmt: skip
  (shipped,) = [c for c in commands if "scp" in c and "--worker=all" in c]
  assert shipped[5].endswith(".bundle")
  assert shipped[6:] == ["pair:specjax.bundle", *where, "--worker=all"]
  remote = [c[-1].removeprefix("--command=") for c in commands if "ssh" in c and "--worker=all" in c]
  assert remote[0].endswith(f"git checkout --quiet --force --detach {clone.commit(cloud.root)}")
  assert remote[1] == "cd specjax && SPECJAX_FETCH_PYTHON=1 SPECJAX_JAX='jax[tpu]' ./launch/setup.sh"
  # Quoted twice, for this shell and for the worker's: what the experiment sees is what was given.
  assert shlex.split(remote[2])[3:] == [
    "SPECJAX_PROCESSES=auto",
    "./launch/detached.sh",
    "toy",
    "--config.model=a b",
    "it's",
  ]
  assert remote[3] == "cd specjax && ./launch/detached.sh --ended"
  fetched = commands[-2]
  assert fetched[4:6] == ["scp", "pair:fetched.tar.gz"]
  assert fetched[-1] == "--worker=0"
  assert commands[-1] == [
    *shlex.split("gcloud compute tpus queued-resources delete pair"),
    *where,
    "--force",
    "--quiet",
  ]


def test_runs_on_all_workers_fetches_and_deletes(cloud: Cloud) -> None:
  done = cloud.call(*FLAGS, "--poll=1", "toy", "a b", "it's")
  assert done.returncode == 0, done.stderr
  seen = "auto ['--config=configs/toy.py', 'a b', \"it's\"]"
  said = [line for line in done.stdout.splitlines() if line.startswith("worker")]
  assert sorted(said) == [f"worker {w} {seen}" for w in "01"]
  assert (cloud.results / "run.log").read_text() == f"worker 0 {seen}\n"
  assert (cloud.results / "toy" / "items").read_text().startswith("two on ")
  assert (len(cloud.sent("[create]")), cloud.machines()) == (1, [])
  assert (
    "[tpu-vm][create][pair][--zone=us-central2-b][--accelerator-type=v4-16][--version=tpu-ubuntu2204-base]"
    in (cloud.sent("[create]")[0])
  )


@pytest.mark.parametrize("queued", [(), ("--queued",)])
def test_a_preempted_run_goes_on_with_what_was_fetched(cloud: Cloud, queued: tuple[str, ...]) -> None:
  done = cloud.call(*FLAGS, "--spot", *queued, "--poll=1", "--fetch-every=1", "toy", "--preempt")
  assert done.returncode == 0, done.stderr
  assert "pair was pre-empted: it is PREEMPTED." in done.stderr
  kind = "queued-resources" if queued else "tpu-vm"
  created = cloud.sent("[create]")
  assert len(created) == 2
  assert all(f"[{kind}][create]" in call and "[--spot]" in call for call in created)
  one, two = (cloud.results / "toy" / "items").read_text().splitlines()
  assert one.startswith("one on ")
  assert two.startswith("two on ")
  assert one.split()[-1] != two.split()[-1]
  assert cloud.machines() == os.listdir(cloud.folder / "queue") == []


def test_a_failed_experiment_is_the_status_and_costs_no_more(cloud: Cloud) -> None:
  done = cloud.call(*FLAGS, "--poll=1", "toy", "--fail")
  assert done.returncode == 1
  assert "it failed" in done.stdout
  assert (len(cloud.sent("[create]")), cloud.machines()) == (1, [])


def test_a_tpu_is_not_deleted_with_results_that_were_not_fetched(cloud: Cloud) -> None:
  (cloud.folder / "unreachable").touch()
  done = cloud.call(*FLAGS, "--poll=1", "toy")
  assert done.returncode == 0
  assert "the results could not be fetched" in done.stderr
  assert f"--delete --name=pair --zone={FLAGS[1].removeprefix('--zone=')}" in done.stderr
  assert cloud.machines() == ["pair"]


def test_a_tpu_that_was_there_is_kept_with_its_results(cloud: Cloud) -> None:
  assert cloud.call(*FLAGS, "--poll=1", "--keep", "toy").returncode == 0
  assert cloud.machines() == ["pair"]
  (cloud.results / "toy" / "items").write_text("older, and must not be sent back\n")
  done = cloud.call(*FLAGS, "--poll=1", "toy")
  assert done.returncode == 0, done.stderr
  assert "there already, READY: it is used, and kept" in done.stderr
  assert len((cloud.results / "toy" / "items").read_text().splitlines()) == 2
  assert (len(cloud.sent("[create]")), cloud.machines()) == (1, ["pair"])
  assert cloud.call("--delete", "--name=pair", "--zone=z").returncode == 0
  assert cloud.machines() == []


def test_a_run_outlives_lost_connections(cloud: Cloud) -> None:
  (cloud.folder / "drop").write_text("first\nthe retry of gcloud\nsecond\n")
  done = cloud.call(*FLAGS, "--poll=1", "toy", "--slow")
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("lost the connection to pair: trying again.") == 1
  assert len(cloud.sent("detached.sh toy")) == 2
  one, two = (cloud.results / "toy" / "items").read_text().splitlines()
  assert one.replace("one", "two") == two
  assert (len(cloud.sent("[create]")), cloud.machines()) == (1, [])


def test_a_run_whose_script_was_interrupted_is_followed(cloud: Cloud) -> None:
  hold, reached = cloud.folder / "hold", cloud.folder / "reached"
  hold.touch()
  (cloud.folder / "drop").touch()
  command = [str(cloud.root / "launch" / "tpu_vm.sh"), *FLAGS, "--poll=1", "toy", "--slow"]
  said = cloud.folder / "said"  # a pipe would be held open by what outlives the script
  with said.open("w") as file:
    # Whatever runs the tests may ignore SIGINT, as a job in the background does, and a shell can't trap it then.
    script = subprocess.Popen(
      command, env=cloud.environment, start_new_session=True, stdout=file, stderr=file,
      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
  for _ in range(300):
    if reached.exists():
      break
    time.sleep(0.1)
  os.killpg(script.pid, signal.SIGINT)
  assert script.wait(60) == 130
  assert "pair is still there, and costs. The same command goes on with it" in said.read_text()
  refused = cloud.call(*FLAGS, "--poll=1", "toy", "--other")
  assert refused.returncode == 75
  assert f"another run is going on here, and --stop ends it: {clone.commit(cloud.root)} toy --slow" in refused.stderr
  hold.unlink()
  done = cloud.call(*FLAGS, "--poll=1", "toy", "--slow")
  assert done.returncode == 0, done.stderr
  one, two = (cloud.results / "toy" / "items").read_text().splitlines()
  assert one.replace("one", "two") == two
  assert (len(cloud.sent("[create]")), cloud.machines()) == (1, ["pair"])


def test_gives_up_after_the_attempts(cloud: Cloud) -> None:
  (cloud.folder / "refuse").touch()
  done = cloud.call(*FLAGS, "--poll=1", "--attempts=2", "toy")
  assert done.returncode == 1
  assert "no run came to its end in 2 attempts" in done.stderr
  assert len(cloud.sent("[create]")) == 2


def test_list_and_logs(cloud: Cloud) -> None:
  assert cloud.call("--list", "--zone=z").returncode == 0
  assert cloud.calls == ["[compute][tpus][tpu-vm][list][--zone=z]", "[compute][tpus][queued-resources][list][--zone=z]"]
  done = cloud.call("--logs", "--dry-run", "--name=pair", "--zone=z")
  assert {"--worker=all", "--command=tail -n 100 specjax/.run/log"} < set(shlex.split(done.stdout))


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--name=pair", "--type=v4-8", "toy"], "--zone=ZONE is missing"),
    (["--zone=z", "--type=v4-8", "toy"], "--name=NAME is missing"),
    (["--zone=z", "--name=pair", "toy"], "--type=TYPE is missing"),
    ([*FLAGS], "name an experiment: one of toy"),
    ([*FLAGS, "tox"], "no experiment 'tox': one of toy"),
    ([*FLAGS, "--zone", "z", "toy"], "--zone needs a value: --zone=VALUE"),
    ([*FLAGS, "--name=Pair", "toy"], "must be lower-case letters"),
    ([*FLAGS, "--type=v9-8", "toy"], "give --runtime=VERSION"),
    ([*FLAGS, "--attempts=none", "toy"], "--attempts=none must be a whole number"),
    ([*FLAGS, "--config.gamma=4", "toy"], "Flags of the experiment come behind its name"),
    ([*FLAGS, "toy", "--dry-run"], "--dry-run is a flag of this script: it must stand before the experiment's name"),
    ([*FLAGS, "toy", "a b", "--create-flag=--network=x"], "--create-flag=--network=x is a flag of this script"),
    ([*FLAGS, "toy", "--delete"], "--delete is a flag of this script"),
    ([*FLAGS, "toy", "--help"], "--help is a flag of this script"),
    (["--delete", "--logs", "--zone=z", "--name=pair"], "one at a time"),
    (["--delete", "--zone=z", "--name=pair", "toy"], "--delete takes no experiment, got: toy"),
  ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(cloud: Cloud, arguments: list[str], words: str) -> None:
  done = cloud.call(*arguments)
  assert done.returncode == 2
  assert words in done.stderr
  assert cloud.calls == []
