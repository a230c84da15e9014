"""What every experiment shares: where it ran, results that survive an interruption, timing, tables, figures.

It knows no experiment, and decides nothing about how one is set up.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import rich.box
import rich.console
import rich.table
import rich.text
import tqdm

from experiments import processes
from specjax import files
from specjax.files import plain, replacing

RESULTS = pathlib.Path(os.environ.get("SPECJAX_RESULTS") or pathlib.Path(__file__).parent / "results")


def environment() -> dict[str, Any]:
  """Versions, device and machine, for JSON. It starts jax's backend: call it after `jax.distributed.initialize`."""
  device = jax.devices()[0]
  affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS
  return {
    "python": platform.python_version(),
    **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
    "commit": _commit(),
    "platform": platform.platform(),
    "device": device.device_kind,
    "backend": device.platform,
    "device_count": jax.device_count(),
    "cpu": _cpu_model(),
    "cores": len(affinity(0)) if affinity else os.cpu_count(),
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def _commit() -> str | None:
  """The commit, "+" and a digest of what was changed since; None outside a git work tree."""

  def git(*arguments: str) -> bytes:
    folder = pathlib.Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True).stdout

  try:
    commit, changes = git("rev-parse", "HEAD").decode().strip(), git("diff", "HEAD")
  except (OSError, subprocess.CalledProcessError):
    return None
  return f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def _cpu_model() -> str:
  with contextlib.suppress(OSError):
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  return platform.processor() or platform.machine()


class Run:
  """One run of an experiment, kept item by item in `folder`, so that a run which was interrupted goes on.

  What was kept is used again under the same config, in the same environment and at the same state of the code alone:
  timings of two machines do not mix. In several processes each computes every item, process 0 keeps what it found, and
  all go on with that.

    run = Run("quickstart", config)
    for prompt in prompts:
      figures = run.item(prompt.name, lambda: measure(prompt))
    run.finish({"speedup": ...})
  """

  def __init__(self, name: str, config: Any, results: pathlib.Path = RESULTS):
    self.folder = results / name
    self.environment = environment()
    self.config = plain(config)
    key = json.dumps([self.config, self.environment], sort_keys=True).encode()
    self._path = self.folder / f"unfinished-{hashlib.sha256(key).hexdigest()[:12]}.jsonl"
    others = sorted({*self.folder.glob("unfinished-*.jsonl")} - {self._path})
    if others and not self._path.exists() and processes.first():
      print(
        f"{name} starts afresh: what {', '.join(map(str, others))} kept is of other settings, code or another machine.",
        file=sys.stderr,
      )
    # Those of process 0: the others may have none, and all must leave out the same items.
    self.items: dict[str, Any] = processes.share(dict(_read_lines(self._path)) if processes.first() else None)

  def item(self, key: str, compute: Callable[[], Any]) -> Any:
    """What `compute` returned for `key`, in this run or before its interruption, as it reads back from JSON."""
    if key not in self.items:
      line = json.dumps([key, plain(compute())])
      if processes.first():
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
          file.write(line + "\n")
      self.items[key] = processes.share(json.loads(line)[1])
    return self.items[key]

  def finish(self, summary: Any) -> pathlib.Path:
    """Writes results.json: environment, config, summary, and every item. The next run starts afresh."""
    path = self.folder / "results.json"
    write_json(path, {"environment": self.environment, "config": self.config, "summary": summary, "items": self.items})
    if processes.first():
      self._path.unlink(missing_ok=True)
    return path


def _read_lines(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """The (key, value) lines of a file whose writer may have been killed; cuts it where the first broken line starts."""
  if not path.exists():
    return
  whole = 0
  for line in path.read_bytes().splitlines(keepends=True):
    try:
      key, value = json.loads(line)
    except ValueError:
      break
    if not line.endswith(b"\n"):
      break
    whole += len(line)
    yield key, value
  os.truncate(path, whole)


@dataclasses.dataclass(frozen=True)
class Timing:
  """median: of `seconds`, the time of every repeat in the order they ran."""

  median: float
  seconds: tuple[float, ...]


def median_interleaved(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Timing]:
  """Times functions against each other: each once untimed (it compiles), then all of them in turn, `repeats` times.

  Taking turns spreads what the machine does meanwhile over all of them, and every second turn runs backwards, so that
  none always runs behind the same other. A call ends when the jax arrays that it returned are ready.

  Raises:
    ValueError: repeats is less than 1.
  """
  if repeats < 1:
    raise ValueError(f"repeats={repeats} must be at least 1.")
  for function in functions.values():
    jax.block_until_ready(function())
  seconds: dict[str, list[float]] = {name: [] for name in functions}
  for turn in tqdm.trange(repeats, desc="Timing", leave=False, disable=None):
    for name in list(functions)[:: -1 if turn % 2 else 1]:
      start = time.perf_counter()
      jax.block_until_ready(functions[name]())
      seconds[name].append(time.perf_counter() - start)
  return {name: Timing(statistics.median(times), tuple(times)) for name, times in seconds.items()}


def launch(run: Callable[[Any], Any], config: str) -> None:
  """Runs an experiment as a program: `run` of configs/`config`.py with the settings of the command line.

  Where a launch script has started several processes, they join first and agree on the settings; process 0 prints.
  """
  from absl import app, logging
  from ml_collections import config_flags

  default = pathlib.Path(__file__).parents[1] / "configs" / f"{config}.py"
  settings = config_flags.DEFINE_config_file("config", str(default), "The experiment's settings.")

  def main(_: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # jax reports every backend that is not there
    processes.join()
    try:
      processes.require_same("settings and code", {"config": plain(settings.value), "commit": _commit()})
      with contextlib.nullcontext() if processes.first() else contextlib.redirect_stdout(io.StringIO()):
        run(settings.value)
    except BaseException:
      if not processes.several():
        raise
      # An orderly exit would wait for the others, and they wait for this process in the midst of a computation.
      traceback.print_exc()
      print(
        f"Process {jax.process_index()} of {jax.process_count()} ends here. If it lost a connection, another one ended "
        "before it, and says why.",
        file=sys.stderr,
      )
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(1)

  app.run(main)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
  """Prints a table, the first column to the left, numbers to the right; as Markdown where stdout is not a terminal."""
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=1000, no_color=True)  # else wrapped at 80 columns
  table = rich.table.Table(box=rich.box.ROUNDED if console.is_terminal else rich.box.MARKDOWN)
  for index, column in enumerate(columns):
    # On a narrow terminal headers are broken into lines, names are not.
    table.add_column(rich.text.Text(column), justify="right" if index else "left", no_wrap=not index)
  for row in rows:
    table.add_row(*map(rich.text.Text, row))
  console.print(rich.text.Text(title, style="bold"))
  console.print(table)


def plot_style() -> None:
  """Sets up matplotlib for files: no display, a font that can be read in a README, no box around the axes."""
  import matplotlib

  matplotlib.use("Agg")
  matplotlib.rcParams.update(
    {
      "figure.dpi": 150,
      "figure.constrained_layout.use": True,
      "font.size": 12,
      "axes.spines.top": False,
      "axes.spines.right": False,
      "axes.titleweight": "bold",
      "axes.titlelocation": "left",
      "legend.frameon": False,
    }
  )


def save_figure(figure: Any, path: pathlib.Path) -> None:
  """Writes a matplotlib figure in the format of the path's suffix, in process 0, and closes it."""
  import matplotlib.pyplot as plt

  if processes.first():
    with replacing(path) as temporary:
      figure.savefig(temporary)
  plt.close(figure)


def write_json(path: pathlib.Path, value: Any) -> None:
  """`specjax.files.write_json`, in process 0."""
  if processes.first():
    files.write_json(path, value)
