"""From a name or a path to a model: `load_model("smollm2-135m")`, a GGUF file, a directory, or a repository id.

This module decides what a name means and which reader is asked; it reads no format itself.
"""

import dataclasses
import os
import pathlib
import re
from typing import Any

from specjax.fetch import SMOLLM2, fetch
from specjax.language_model import LanguageModel
from specjax.models.checkpoint import Checkpoint
from specjax.models.forms import from_checkpoint
from specjax.models.gguf import open_gguf
from specjax.models.huggingface import open_huggingface
from specjax.models.ops import Options
from specjax.models.orbax import is_orbax, load_orbax
from specjax.sharding import Mesh, Rules, fit, place

NAMED = {"smollm2-135m": SMOLLM2}

_REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.gguf)(?<!\.safetensors)", re.ASCII)


def load_model(
  name_or_path: str | os.PathLike[str],
  *,
  dtype: Any = None,
  scan_layers: bool | None = None,
  mesh: Mesh | None = None,
  rules: Rules | None = None,
) -> LanguageModel:
  """Loads a model's parameters, tensor by tensor, and the functions that run it.

  name_or_path: a name in `NAMED`, which is downloaded once; a *.gguf file; a directory with config.json and
    *.safetensors, or one of `specjax.save_model`; or a Hugging Face repository id, where huggingface_hub is installed.
  dtype: of the parameters; default float32 on a CPU, bfloat16 elsewhere.
  scan_layers: whether layers run as one scanned loop or unrolled; default: what is faster on the backend.
  mesh, rules: where to put the parameters, as `specjax.sharding.shard` takes them; default: jax's default device. Each
    process reads the parts of its own devices alone, as far as the format allows (a GGUF file is read by whole rows).

  Raises:
    FileNotFoundError: no such name or path, or a directory that lacks its config or a shard.
    ValueError: a file that is corrupt, or a model that is not supported; the message says which part. A mesh or rules
      that don't fit.
    specjax.fetch.FetchError: a download that failed.
  """
  if mesh is None and rules is not None:
    raise ValueError("rules without a mesh place nothing: pass mesh=specjax.sharding.mesh(...), too.")
  placement = None if mesh is None else place(mesh, rules)  # its errors come before a download
  options, path = Options.for_backend(), resolve(name_or_path)
  if scan_layers is not None:
    options = dataclasses.replace(options, scan_layers=scan_layers)
  if is_orbax(path):
    return load_orbax(path, dtype=dtype, options=options, mesh=mesh, rules=rules)
  checkpoint = open_checkpoint(path)
  config = checkpoint.config
  if placement is not None:
    config, options, placement = fit(config, options, placement)
  return from_checkpoint(checkpoint, dtype=dtype, options=options, config=config, placement=placement)


def resolve(name_or_path: str | os.PathLike[str], *, weights: bool = True) -> pathlib.Path:
  """The local file or directory that a name stands for, downloaded if need be (a repository's weights if `weights`)."""
  text = os.fspath(name_or_path)
  if text in NAMED:
    return fetch(NAMED[text])
  path = pathlib.Path(text).expanduser()
  if text and path.exists():  # "" would be the current directory
    return path
  if _REPOSITORY_ID.fullmatch(text):
    return _download_repository(text, weights)
  raise FileNotFoundError(
    f"{text!r} is neither a model that is known by name ({', '.join(NAMED)}) nor an existing path to a *.gguf file or "
    "to a directory with config.json and *.safetensors."
  )


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
  """Opens whatever kind of checkpoint lies at `path`. Raises as `load_model` does."""
  if path.is_file():
    return open_gguf(path)
  if (path / "config.json").is_file():
    return open_huggingface(path)
  if is_orbax(path):
    raise ValueError(f"{path} is an orbax checkpoint, whose tensors are not read one by one: use specjax.load_model.")
  files = sorted(file.name for file in path.glob("*.gguf"))
  hint = f" It holds {', '.join(files)}: give the path of the file." if files else ""
  raise FileNotFoundError(f"{path} is no model directory: it has no config.json.{hint}")


def _download_repository(repository: str, weights: bool) -> pathlib.Path:
  not_local = f"{repository!r} is no local path. As a Hugging Face repository id, it"
  try:
    import huggingface_hub
  except ImportError:
    raise FileNotFoundError(f"{not_local} needs huggingface_hub: pip install -e '.[hub]'.") from None
  patterns = ["*.json", "*.jinja"] + (["*.safetensors"] if weights else [])
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns, ignore_patterns=["*/*"]))
  except Exception as error:  # the hub's client, its HTTP library and the file system all raise their own
    raise FileNotFoundError(f"{not_local} could not be downloaded: {type(error).__name__}: {error}") from error
