"""What every checkpoint reader hands over: a config, and canonical tensors one at a time.

A reader maps the names in its files to those of `parameter_shapes`, and checks the whole file against them when it is
opened; this module holds that check and the seam itself, and reads no file.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from specjax.models.config import DecoderConfig

Shape = tuple[int, ...]
Index = tuple[slice, ...]  # one for each axis, with start and stop, of step 1


class Tensor(Protocol):
  def __call__(self, name: str, index: Index | None = None, /) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A model on disk.

  `tensor(name)` reads one tensor of `parameter_shapes(config)` as a new float32 array of the shape given there;
  `tensor(name, index)` a part of it, and no more of the file than the format makes necessary. Nothing is kept in memory
  between calls. `tokenizer_hash` is equal for equal tokenizers whatever file they came from, and
  None where the checkpoint has no tokenizer.
  """

  config: DecoderConfig
  tensor: Tensor = dataclasses.field(repr=False)
  tokenizer_hash: str | None


def hash_tokens(tokens: Mapping[int, str]) -> str:
  """sha256 (hex) of id -> token in the order of ids. Entries that only pad the vocabulary must not be among them."""
  return hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest()


def check_tensors(where: object, found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
  """Raises ValueError unless `found` holds exactly the `expected` names with their shapes; lists all that is wrong."""
  wrong = {name: shape for name, shape in expected.items() if name in found and found[name] != shape}
  complaints = [
    _list("missing", expected.keys() - found.keys()),
    _list("unexpected", found.keys() - expected.keys()),
    _list("of the wrong shape", (f"{name} {found[name]}, expected {shape}" for name, shape in wrong.items())),
  ]
  if any(complaints):
    raise ValueError(f"{where} does not hold the tensors that its configuration asks for.{''.join(complaints)}")


def _list(what: str, items: Iterable[str]) -> str:
  items = sorted(items)
  return f"\n  {len(items)} {what}: {', '.join(items)}" if items else ""
