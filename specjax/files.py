"""Files that are whole or not there, and plain values for JSON."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Generator, Mapping
from typing import Any

import jax
import numpy as np


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[pathlib.Path]:
  """A temporary path of the same name and file system, which becomes `path` if the block ends without an error."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
    temporary = pathlib.Path(folder) / path.name
    yield temporary
    os.replace(temporary, path)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
  """Writes `value`: arrays as lists, dataclasses and configs as objects, numbers that are not finite as null."""
  with replacing(path) as temporary:
    temporary.write_text(json.dumps(plain(value), indent=2) + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
  """`value` in lists, dictionaries, numbers and texts; numbers that are not finite are None."""
  if hasattr(value, "to_dict"):  # ml_collections.ConfigDict
    value = value.to_dict()
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
  if isinstance(value, jax.Array | np.ndarray | np.generic):
    value = np.asarray(value).tolist()
  if isinstance(value, Mapping):
    return {str(key): plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [plain(item) for item in value]
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  return str(value) if isinstance(value, pathlib.Path) else value
