"""Parts of tensors: what a device of a mesh reads of a checkpoint, in every layout that files have."""

import pathlib

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from specjax.models import gguf_file
from specjax.models.config import parameter_shapes
from specjax.models.gguf import open_gguf
from specjax.models.load import open_checkpoint
from tests import checkpoints, gguf_files

KINDS = [(name, kind) for name in ("llama", "qwen2", "gpt2") for kind in ("safetensors", "gguf")]


@pytest.mark.parametrize(("name", "kind"), [*KINDS, ("gpt2", "gguf Q8_0")])
def test_parts_are_parts_of_the_whole(name: str, kind: str, tmp_path: pathlib.Path) -> None:
  """Bounds anywhere, within heads and blocks too: transposed, fused and reordered tensors are cut where they lie."""
  if kind == "safetensors":
    checkpoints.write(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
  else:
    type = GGMLQuantizationType.F32 if kind == "gguf" else GGMLQuantizationType.Q8_0
    gguf_files.save(tmp_path / "model.gguf", gguf_files.metadata(name), gguf_files.tensors(name), type)
    checkpoint = open_gguf(tmp_path / "model.gguf")
  random = np.random.default_rng(0)
  for tensor, shape in parameter_shapes(checkpoint.config).items():
    whole = checkpoint.tensor(tensor)
    for _ in range(3):
      bounds = [sorted(random.integers(0, size + 1, 2)) for size in shape]
      index = tuple(slice(int(start), int(stop)) for start, stop in bounds)
      part = checkpoint.tensor(tensor, index)
      assert part.dtype == np.float32
      np.testing.assert_array_equal(part, whole[index], err_msg=f"{tensor} {index}")


def test_no_more_rows_are_read_than_asked_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  weight = np.random.default_rng(0).normal(size=(4096, 256)).astype(np.float32)
  gguf_files.save(tmp_path / "a.gguf", {"general.architecture": "llama"}, {"w": weight}, GGMLQuantizationType.Q8_0)
  file, real, read = gguf_file.open_file(tmp_path / "a.gguf"), np.fromfile, []

  def fromfile(source, dtype, count):
    read.append(count)
    return real(source, dtype, count)

  monkeypatch.setattr(np, "fromfile", fromfile)
  part = gguf_file.read_tensor(file, "w", (slice(1000, 1100), slice(64, 128)))
  assert sum(read) == 100 * 256 // 32 * 34  # a block of Q8_0 has 32 numbers in 34 bytes
  np.testing.assert_allclose(part, weight[1000:1100, 64:128], atol=0.02)
