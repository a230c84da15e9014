"""Decoders in orbax checkpoints: `save_model`, and the reader behind `specjax.load_model`.

Parameters are saved as they lie, every process its own parts, and are restored onto whatever devices and into whatever
form is asked for. This module knows no other format.
"""

import copy
import dataclasses
import math
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding

from specjax.language_model import LanguageModel
from specjax.models.config import DecoderConfig, RopeScaling, widened
from specjax.models.forms import as_checkpoint, checked_dtype, from_checkpoint, reform
from specjax.models.ops import Options
from specjax.models.transformer import Apply, abstract_decoder
from specjax.placement import on_auto_axes
from specjax.sharding import Rules, place, put, shard

_MARK = "specjax_decoder"
_FILES = ("_CHECKPOINT_METADATA", "orbax.checkpoint", "_METADATA", "manifest.ocdbt")


def is_orbax(path: pathlib.Path) -> bool:
  return any((path / name).exists() for name in _FILES)


def save_model(model: LanguageModel, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
  """Writes a decoder's parameters and configuration as an orbax checkpoint, a directory; whole or not at all.

  Every process calls it and writes its own parts. `specjax.load_model` reads it, in any form and on any mesh.
  overwrite: as of `specjax.save_state`. Raises TypeError for a model that is not of `specjax.models`, and ValueError
  where `path` exists already unless `overwrite`.
  """
  if not isinstance(apply := model.apply, Apply):
    raise TypeError(f"{model!r} is not of the decoder family of specjax.models: how to load it again is not known.")
  about = {
    "config": dataclasses.asdict(apply.config),
    "options": {"scan_layers": apply.options.scan_layers, "cpu_kernels": apply.options.cpu_kernels},
    "tokenizer_hash": model.tokenizer_hash,
  }
  write(path, model.params, _MARK, about, overwrite)


def load_orbax(
  path: pathlib.Path, *, dtype: Any = None, options: Options, mesh: Mesh | None = None, rules: Rules | None = None
) -> LanguageModel:
  """What `save_model` wrote, in the form and place asked for; without a mesh on the first device.

  Each process reads its own parts. A form that fuses weights (`cpu_kernels`) is made on the host.
  """
  about, _ = read_about(path, _MARK, "specjax.save_model", ("config", "options", "tokenizer_hash"))
  try:
    if (scaling := about["config"].pop("rope_scaling")) is not None:
      scaling = RopeScaling(**scaling | {"factors": tuple(scaling["factors"])})
    saved_config, saved_options = DecoderConfig(**about["config"], rope_scaling=scaling), Options(**about["options"])
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"{path} holds a configuration that this version of specjax can't read: {error}") from error
  model = abstract_decoder(saved_config, options=saved_options, dtype=checked_dtype(dtype))
  if mesh is None:
    where = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), model.params)
  else:
    where = place(mesh, rules).shardings(model.params, Apply(saved_config, saved_options).axes(model.params))
    options = dataclasses.replace(options, cpu_kernels=options.cpu_kernels and mesh.size == 1)
  params = read(path, jax.tree.map(put, model.params, where), about["checksums"])
  model = dataclasses.replace(model, params=params, tokenizer_hash=about["tokenizer_hash"])
  config = saved_config if options == saved_options and mesh is not None else widened(saved_config)
  if options.cpu_kernels and (config, options) != (saved_config, saved_options):
    model = from_checkpoint(as_checkpoint(model), dtype=dtype, options=options)
  else:
    model = reform(model, config, options)
  return model if mesh is None else shard(model, mesh, rules)


def write(path: str | os.PathLike[str], tree: Any, mark: str, about: dict[str, Any], overwrite: bool) -> None:
  """Saves a pytree of arrays, their checksums, and under the key `mark` what is known of it, JSON.

  What is overwritten is there until the new one is: on a disk they change places at the end. Raises ValueError where
  `path` exists, unless it is a checkpoint and to be overwritten.
  """
  from orbax.checkpoint import v1 as ocp  # takes a second to import

  where = _absolute(path)
  old = pathlib.Path(where)
  exists = "://" not in where and old.exists()
  if exists and not overwrite:
    raise ValueError(f"{path} exists already: pass overwrite=True to put the new one in its place, or another path.")
  if exists and not is_orbax(old):
    raise ValueError(f"{path} exists and is no orbax checkpoint, so it is not overwritten: give another path.")
  custom_metadata = cast(Any, {mark: about | {"checksums": checksums(tree)}})  # reads all arrays
  if not exists:
    ocp.save(where, tree, custom_metadata=custom_metadata, overwrite=overwrite)
    return
  new, aside = (old.with_name(f"{old.name}.{what}") for what in ("new", "old"))
  ocp.save(os.fspath(new), tree, custom_metadata=custom_metadata, overwrite=True)
  if jax.process_index() == 0:
    shutil.rmtree(aside, ignore_errors=True)
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f"specjax has overwritten {where}")


def checksums(tree: Any) -> dict[str, tuple[str, int]]:
  """Path -> type and checksum of every array: the sum of its numbers' bits, each times an odd one of its own, mod 2^32.

  No number changes without the sum. It is the same however an array is split over devices: each reads its own part.
  """

  def of(x: Array) -> Array:
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    bits = x if x.dtype == jnp.bool else lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    strides = [np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32) for axis in range(x.ndim)]
    index = sum((lax.broadcasted_iota(jnp.uint32, x.shape, axis) * step for axis, step in enumerate(strides)), 0)
    return jnp.sum(bits.astype(jnp.uint32) * (2 * jnp.uint32(index) + 1), dtype=jnp.uint32)

  moved, context = on_auto_axes(jax.tree.map(jnp.asarray, tree))
  with context():
    sums = jax.jit(lambda tree: jax.tree.map(of, tree))(moved)
  return {
    jax.tree_util.keystr(at): (str(x.dtype), int(total))
    for (at, x), total in zip(jax.tree_util.tree_leaves_with_path(moved), jax.tree.leaves(sums), strict=True)
  }


def _absolute(path: str | os.PathLike[str]) -> str:
  """orbax takes absolute paths, and those of buckets."""
  return text if "://" in (text := os.fspath(path)) else os.path.abspath(text)


def read_about(path: str | os.PathLike[str], mark: str, by: str, names: Sequence[str]) -> tuple[dict[str, Any], Any]:
  """What `write` put beside the arrays under the key `mark`, which has these names, and the shapes of the arrays.

  Raises FileNotFoundError or ValueError for a directory that is no such checkpoint; by: what writes one.
  """
  from orbax.checkpoint import v1 as ocp

  where = _absolute(path)
  if "://" not in where and not os.path.isdir(where):
    raise FileNotFoundError(f"{path} is no directory; {by} writes one.")
  try:
    found = ocp.metadata(where)
  except Exception as error:  # orbax and tensorstore raise their own
    raise ValueError(f"{path} is no orbax checkpoint, or a damaged one: {error}") from error
  about: Any = found.custom_metadata or {}
  if mark not in about:
    raise ValueError(f"{path} is an orbax checkpoint, but not one of {by}.")
  leaves = jax.tree.leaves(found.metadata, is_leaf=lambda leaf: leaf is None)
  if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
    raise ValueError(f"{path} is damaged: it doesn't say which arrays it holds.")
  if missing := [name for name in (*names, "checksums") if name not in about[mark]]:
    raise ValueError(f"{path} is damaged, or of another version of {by}: it doesn't say {', '.join(missing)}.")
  return copy.deepcopy(about[mark]), found.metadata


def read(path: str | os.PathLike[str], abstract: Any, sums: dict[str, tuple[str, int]]) -> Any:
  """The arrays of a checkpoint: shapes that it has, dtypes and shardings that are asked for.

  sums: their checksums, which are compared where arrays are read as the type that they were saved in. Raises ValueError
  for a checkpoint that lacks an array, or a file, or holds other numbers than were saved.
  """
  from orbax.checkpoint import v1 as ocp

  try:
    found = ocp.load(_absolute(path), abstract)
  except Exception as error:
    raise ValueError(f"{path} can't be read, it is damaged or of another model: {error}") from error
  if not all(jax.tree.leaves(jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), found, abstract))):
    raise ValueError(f"{path} is damaged: arrays have not the types and shapes that it says they have.")
  for name, (kind, total) in checksums(found).items():
    saved_as, saved = sums.get(name, (kind, None))
    if kind == saved_as and total != saved:
      raise ValueError(f"{path} is damaged: of {name} other numbers were saved than are read.")
  return found
