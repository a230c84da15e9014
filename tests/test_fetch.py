"""Downloads that succeed, fail, are spoilt, and are killed half-way; through the real pip, from a folder of wheels."""

import base64
import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import signal
import subprocess
import sys
import zipfile
from typing import Any

import pytest

from specjax import fetch as fetch_module
from specjax.fetch import Artefact, FetchError, cache_folder, fetch

CONTENT = b"The quick brown fox. " * 5000
MEMBER = "toy_data/data/fox.txt"


@pytest.fixture(autouse=True)
def folders(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """An empty cache, and a pip that knows no index but tmp_path/wheels."""
  (tmp_path / "wheels").mkdir()
  monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


@pytest.fixture
def artefact(tmp_path: pathlib.Path) -> Artefact:
  """A wheel that pip can find, and what is pinned for it."""
  path = tmp_path / "wheels" / "toy_data-1.0-py3-none-any.whl"
  files = {
    MEMBER: CONTENT,
    "toy_data-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: toy-data\nVersion: 1.0\n",
    "toy_data-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
  }
  record = "".join(f"{name},sha256={_urlsafe(content)},{len(content)}\n" for name, content in files.items())
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
    for name, content in files.items():
      wheel.writestr(name, content)
    wheel.writestr("toy_data-1.0.dist-info/RECORD", record + "toy_data-1.0.dist-info/RECORD,,\n")
  return Artefact(
    name="Toy data",
    package="toy-data",
    version="1.0",
    archive_bytes=path.stat().st_size,
    archive_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    member=MEMBER,
    member_sha256=hashlib.sha256(CONTENT).hexdigest(),
  )


def _urlsafe(content: bytes) -> str:
  return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def left_behind(tmp_path: pathlib.Path) -> list[str]:
  """All files in the cache, locks aside."""
  cache = tmp_path / "cache"
  return [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]


def forbid_download(monkeypatch: pytest.MonkeyPatch) -> None:
  def download(*args: Any) -> None:
    raise AssertionError("downloaded again")

  monkeypatch.setattr(fetch_module, "_download", download)


def test_downloads_once(artefact: Artefact, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  path = fetch(artefact)
  assert path == tmp_path / "cache" / "toy-data-1.0" / "fox.txt"
  assert path.read_bytes() == CONTENT
  assert left_behind(tmp_path) == ["toy-data-1.0/fox.txt"]
  forbid_download(monkeypatch)
  assert fetch(artefact) == path


def test_nothing_is_printed_where_no_one_watches(artefact: Artefact, capfd: pytest.CaptureFixture[str]) -> None:
  fetch(artefact)
  assert capfd.readouterr() == ("", "")


def test_a_cache_that_cannot_be_written_is_enough_once_filled(
  artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
  path = fetch(artefact)
  monkeypatch.setattr(pathlib.Path, "mkdir", lambda *args, **kwargs: pytest.fail("wrote"))
  monkeypatch.setattr(fetch_module.filelock, "FileLock", lambda *args: pytest.fail("locked"))
  assert fetch(artefact) == path


@pytest.mark.parametrize("spoilt", [CONTENT[:-1], CONTENT[:-1] + b"?", b""])
def test_a_spoilt_file_is_replaced_with_a_warning(artefact: Artefact, spoilt: bytes) -> None:
  path = fetch(artefact)
  path.write_bytes(spoilt)
  with pytest.warns(UserWarning, match=r"fox\.txt is corrupt"):
    fetch(artefact)
  assert path.read_bytes() == CONTENT


def test_another_archive_than_pinned(artefact: Artefact, tmp_path: pathlib.Path) -> None:
  with pytest.raises(FetchError, match=rf"has sha256 {artefact.archive_sha256}.*pinned are 00") as error:
    fetch(dataclasses.replace(artefact, archive_sha256="00" * 32))
  assert "toy_data-1.0-py3-none-any.whl" in str(error.value)
  assert left_behind(tmp_path) == []


def test_another_member_than_pinned(artefact: Artefact, tmp_path: pathlib.Path) -> None:
  with pytest.raises(FetchError, match=rf"{MEMBER} in .* has sha256 {artefact.member_sha256}; pinned is 00"):
    fetch(dataclasses.replace(artefact, member_sha256="00" * 32))
  with pytest.raises(FetchError, match=r"holds no file 'toy_data/none\.txt'"):
    fetch(dataclasses.replace(artefact, member="toy_data/none.txt"))
  assert left_behind(tmp_path) == []


def test_pip_fails_in_its_own_words(artefact: Artefact, tmp_path: pathlib.Path) -> None:
  with pytest.raises(FetchError, match=r"toy-data==2\.0 \(Toy data\)\. It said:\n(.|\n)*No matching distribution"):
    fetch(dataclasses.replace(artefact, version="2.0"))
  assert left_behind(tmp_path) == []


def test_pip_is_not_there(artefact: Artefact, monkeypatch: pytest.MonkeyPatch) -> None:
  def version(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(fetch_module.importlib.metadata, "version", version)
  with pytest.raises(FetchError, match="-m ensurepip"):
    fetch(artefact)


def test_interrupting_stops_pip_and_leaves_nothing(
  artefact: Artefact, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  processes = []

  def interrupt(process: subprocess.Popen, *args: Any) -> None:
    processes.append(process)
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(fetch_module, "_show_progress", interrupt)
    with pytest.raises(KeyboardInterrupt):
      fetch(artefact)
  assert processes[0].returncode == -signal.SIGKILL
  assert left_behind(tmp_path) == []
  assert fetch(artefact).read_bytes() == CONTENT


def test_a_killed_process_leaves_nothing_under_the_final_name(artefact: Artefact, tmp_path: pathlib.Path) -> None:
  """It dies when the file is half extracted; the next download cleans up and succeeds, and no lock is in its way."""
  script = f"""
import os, signal, shutil
from specjax.fetch import Artefact, fetch
def copy(source, target, size):
  target.write(source.read(100))
  target.flush()
  os.kill(os.getpid(), signal.SIGKILL)
shutil.copyfileobj = copy
fetch({artefact!r})
"""
  process = subprocess.run([sys.executable, "-c", script], env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
  assert process.returncode == -signal.SIGKILL
  assert any(name.endswith("/member") for name in left_behind(tmp_path))
  assert not (tmp_path / "cache" / "toy-data-1.0" / "fox.txt").exists()
  assert fetch(artefact).read_bytes() == CONTENT
  assert left_behind(tmp_path) == ["toy-data-1.0/fox.txt"]


def test_two_at_once_download_once(artefact: Artefact, monkeypatch: pytest.MonkeyPatch) -> None:
  downloads = []
  download = fetch_module._download

  def counted(*args: Any) -> pathlib.Path:
    downloads.append(args)
    return download(*args)

  monkeypatch.setattr(fetch_module, "_download", counted)
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    paths = list(pool.map(fetch, [artefact, artefact]))
  assert paths[0] == paths[1]
  assert paths[0].read_bytes() == CONTENT
  assert len(downloads) == 1


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setenv("SPECJAX_CACHE", "~/mine")
  assert cache_folder() == tmp_path / "mine"
  monkeypatch.delenv("SPECJAX_CACHE")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
  assert cache_folder() == tmp_path / "xdg" / "specjax"
  monkeypatch.delenv("XDG_CACHE_HOME")
  assert cache_folder() == tmp_path / ".cache" / "specjax"
