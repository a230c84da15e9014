"""The GGUF container: metadata, the table of tensors, and one tensor's numbers.

The `gguf` package names the types and dequantises. Its GGUFReader is not used: it keeps two array views for every
token string, which for 49,152 tokens takes 4.5 s and 160 MB, a third of that model. Here it is 0.1 s and 10 MB.

This module knows no architecture: what the tensors mean is for `specjax.models.gguf`.
"""

import dataclasses
import math
import mmap
import os
import pathlib
import struct
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

_CHUNK_BYTES = 1 << 18  # of stored data; dequantised it is up to 20 times that, beside the result
_MAX_DIMENSIONS = 4
_FORMATS = {
  GGUFValueType.UINT8: "<u1",
  GGUFValueType.INT8: "<i1",
  GGUFValueType.UINT16: "<u2",
  GGUFValueType.INT16: "<i2",
  GGUFValueType.UINT32: "<u4",
  GGUFValueType.INT32: "<i4",
  GGUFValueType.UINT64: "<u8",
  GGUFValueType.INT64: "<i8",
  GGUFValueType.FLOAT32: "<f4",
  GGUFValueType.FLOAT64: "<f8",
  GGUFValueType.BOOL: "?",
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  shape: tuple[int, ...]  # slowest axis first, as numpy has it; GGUF itself lists the fastest first
  type: GGMLQuantizationType
  offset: int  # bytes from the start of the file
  num_bytes: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
  path: pathlib.Path
  metadata: dict[str, Any] = dataclasses.field(repr=False)  # int, float, bool, str, or a list of them
  tensors: dict[str, TensorInfo] = dataclasses.field(repr=False)


def open_file(path: str | os.PathLike[str]) -> GgufFile:
  """Reads the header, and checks that every tensor lies within the file and can be dequantised; reads no tensor.

  Raises:
    ValueError: not a GGUF file, a version or byte order that is not supported, a truncated file (what is cut off is
      named), or a quantisation that the `gguf` package cannot dequantise.
  """
  path = pathlib.Path(path)
  with path.open("rb") as file:
    if (magic := file.read(4)) != b"GGUF":
      raise ValueError(f"{path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'.")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
      return _parse(path, _Cursor(path, data))


def read_tensor(file: GgufFile, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
  """One tensor, or a part of it, dequantised: float32. Peak memory is the result and some megabytes.

  index: a slice of step 1 for each axis. Only the rows asked for are read, and of those every column.
  """
  info = file.tensors[name]
  shape = (1,) * (2 - len(info.shape)) + info.shape  # a vector is one row
  index = index or tuple(slice(0, size) for size in info.shape)
  rows, *columns = (slice(0, 1),) * (2 - len(index)) + index
  result = np.empty([axis.stop - axis.start for axis in (rows, *columns)], np.float32)
  block_elements, block_bytes = gguf.GGML_QUANT_SIZES[info.type]
  row_elements = math.prod(shape[1:])
  row_bytes = row_elements // block_elements * block_bytes
  step = max(1, _CHUNK_BYTES // row_bytes)
  with file.path.open("rb") as source:
    source.seek(info.offset + rows.start * row_bytes)
    for start in range(0, len(result), step):
      part = result[start : start + step]
      # As one long row: rows are whole blocks, and the package works row by row.
      raw = np.fromfile(source, np.uint8, len(part) * row_bytes)[None]
      values = gguf.dequantize(raw, info.type)[0].reshape(len(part), *shape[1:])
      part[...] = values[(slice(None), *columns)]
  return result.reshape([axis.stop - axis.start for axis in index])


class _Cursor:
  """Reads values one after the other."""

  def __init__(self, path: pathlib.Path, data: mmap.mmap):
    self.path, self.data, self.offset = path, data, 4

  def take(self, count: int, what: str) -> bytes:
    end = self.offset + count
    if end > len(self.data):
      raise ValueError(
        f"{self.path} is truncated or corrupt: {what} reaches to byte {end}, and the file has {len(self.data)}."
      )
    taken = self.data[self.offset : end]
    self.offset = end
    return taken

  def uint32(self, what: str) -> int:
    return struct.unpack("<I", self.take(4, what))[0]

  def uint64(self, what: str) -> int:
    return struct.unpack("<Q", self.take(8, what))[0]

  def string(self, what: str) -> str:
    return self.take(self.uint64(what), what).decode()

  def value(self, kind: int, what: str) -> Any:
    if kind == GGUFValueType.STRING:
      return self.string(what)
    if kind == GGUFValueType.ARRAY:
      kind, count = self.uint32(what), self.uint64(what)
      if kind in (GGUFValueType.STRING, GGUFValueType.ARRAY):
        return [self.value(kind, what) for _ in range(count)]
      return self._numbers(kind, count, what)
    return self._numbers(kind, 1, what)[0]

  def _numbers(self, kind: int, count: int, what: str) -> list[Any]:
    if kind not in _FORMATS:
      raise ValueError(f"{self.path} is corrupt: {what} has the unknown value type {kind}.")
    dtype = np.dtype(_FORMATS[GGUFValueType(kind)])
    return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()


def _parse(path: pathlib.Path, cursor: _Cursor) -> GgufFile:
  version = cursor.uint32("the version")
  if version not in (2, 3):
    raise ValueError(
      f"{path} is of GGUF version {version}; versions 2 and 3 in little-endian byte order are supported."
    )
  num_tensors, num_entries = cursor.uint64("the tensor count"), cursor.uint64("the metadata count")
  try:
    metadata = {}
    for _ in range(num_entries):
      key = cursor.string("a metadata key")
      metadata[key] = cursor.value(cursor.uint32(key), f"metadata {key!r}")
    raw = {}
    for _ in range(num_tensors):
      name = cursor.string("a tensor name")
      if name in raw:
        raise ValueError(f"{path} is corrupt: it lists tensor {name!r} twice.")
      raw[name] = _tensor_entry(cursor, name)
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is corrupt: a name or a string before byte {cursor.offset} is not UTF-8.") from error
  parts, alignment = metadata.get("split.count", 1), metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
  if not (isinstance(parts, int) and isinstance(alignment, int) and alignment > 0):
    raise ValueError(f"{path} is corrupt: split.count={parts!r} and general.alignment={alignment!r} must be numbers.")
  if parts > 1:
    raise ValueError(f"{path} is one of {parts} parts of a model. Join them first (llama-gguf-split --merge).")
  base = -(-cursor.offset // alignment) * alignment
  tensors = {name: _tensor_info(path, name, *entry, base, len(cursor.data)) for name, entry in raw.items()}
  return GgufFile(path, metadata, tensors)


def _tensor_entry(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], int, int]:
  """(shape, type, offset) as they are stored, the shape turned round."""
  what = f"the entry of tensor {name!r}"
  num_dimensions = cursor.uint32(what)
  if num_dimensions > _MAX_DIMENSIONS:
    raise ValueError(f"{cursor.path} is corrupt: {what} has {num_dimensions} dimensions.")
  shape = tuple(cursor.uint64(what) for _ in range(num_dimensions))[::-1]
  return shape, cursor.uint32(what), cursor.uint64(what)


def _tensor_info(
  path: pathlib.Path, name: str, shape: tuple[int, ...], kind: int, offset: int, base: int, file_bytes: int
) -> TensorInfo:
  if not _can_dequantise(kind):
    known = [known.name for known in GGMLQuantizationType if _can_dequantise(known)]
    label = GGMLQuantizationType(kind).name if kind in set(GGMLQuantizationType) else f"type {kind}"
    raise ValueError(
      f"{path}: tensor {name!r} is stored as {label}, which the gguf package cannot dequantise. It can: "
      f"{', '.join(known)}."
    )
  block_elements, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
  if shape[-1:] and shape[-1] % block_elements:
    raise ValueError(f"{path} is corrupt: rows of {name!r} {shape} are not whole blocks of {block_elements}.")
  num_bytes = math.prod(shape) // block_elements * block_bytes
  if (end := base + offset + num_bytes) > file_bytes:
    raise ValueError(f"{path} is truncated: tensor {name!r} reaches to byte {end}, and the file has {file_bytes}.")
  return TensorInfo(shape, GGMLQuantizationType(kind), base + offset, num_bytes)


def _can_dequantise(kind: int) -> bool:
  """Asks the package itself, with one block of zeros: what it supports grows from version to version."""
  if kind not in set(GGMLQuantizationType):
    return False
  known = GGMLQuantizationType(kind)
  try:
    gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[known][1]), np.uint8), known)
  except NotImplementedError:
    return False
  return True
