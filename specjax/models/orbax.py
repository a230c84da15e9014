"""Decoders in orbax checkpoints: `save_model`, and the reader behind `specjax.load_model`.

Parameters are saved as they lie, every process its own parts, and are restored onto whatever devices and into whatever
form is asked for. This module knows no other format.
"""

import copy
import dataclasses
import os
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from specjax.language_model import LanguageModel
from specjax.models.config import DecoderConfig, RopeScaling, widened
from specjax.models.forms import as_checkpoint, checked_dtype, from_checkpoint, reform
from specjax.models.ops import Options
from specjax.models.transformer import Apply, abstract_decoder
from specjax.sharding import Rules, place, put, shard

_MARK = "specjax_decoder"
_FILES = ("_CHECKPOINT_METADATA", "orbax.checkpoint", "_METADATA", "manifest.ocdbt")


def is_orbax(path: pathlib.Path) -> bool:
  return any((path / name).exists() for name in _FILES)


def save_model(model: LanguageModel, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
  """Writes a decoder's parameters and configuration as an orbax checkpoint, a directory; whole or not at all.

  Every process calls it and writes its own parts. `specjax.load_model` reads it, in any form and on any mesh. Raises
  TypeError for a model that is not of `specjax.models`, and ValueError where `path` exists already unless `overwrite`.
  """
  if not isinstance(apply := model.apply, Apply):
    raise TypeError(f"{model!r} is not of the decoder family of specjax.models: how to load it again is not known.")
  about = {
    "config": dataclasses.asdict(apply.config),
    "options": {"scan_layers": apply.options.scan_layers, "cpu_kernels": apply.options.cpu_kernels},
    "tokenizer_hash": model.tokenizer_hash,
  }
  write(path, model.params, {_MARK: about}, overwrite)


def load_orbax(
  path: pathlib.Path, *, dtype: Any = None, options: Options, mesh: Mesh | None = None, rules: Rules | None = None
) -> LanguageModel:
  """What `save_model` wrote, in the form and place asked for; without a mesh on the first device.

  Each process reads its own parts. A form that fuses weights (`cpu_kernels`) is made on the host.
  """
  about, _ = read_about(path, _MARK, "specjax.save_model")
  if (scaling := about["config"].pop("rope_scaling")) is not None:
    scaling = RopeScaling(**scaling | {"factors": tuple(scaling["factors"])})
  saved_config, saved_options = DecoderConfig(**about["config"], rope_scaling=scaling), Options(**about["options"])
  model = abstract_decoder(saved_config, options=saved_options, dtype=checked_dtype(dtype))
  if mesh is None:
    where = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), model.params)
  else:
    where = place(mesh, rules).shardings(model.params, Apply(saved_config, saved_options).axes(model.params))
    options = dataclasses.replace(options, cpu_kernels=options.cpu_kernels and mesh.size == 1)
  params = read(path, jax.tree.map(put, model.params, where))
  model = dataclasses.replace(model, params=params, tokenizer_hash=about["tokenizer_hash"])
  config = saved_config if options == saved_options and mesh is not None else widened(saved_config)
  if options.cpu_kernels and (config, options) != (saved_config, saved_options):
    model = from_checkpoint(as_checkpoint(model), dtype=dtype, options=options)
  else:
    model = reform(model, config, options)
  return model if mesh is None else shard(model, mesh, rules)


def write(path: str | os.PathLike[str], tree: Any, about: dict[str, Any], overwrite: bool) -> None:
  """Saves a pytree of arrays beside what is known of it, JSON."""
  from orbax.checkpoint import v1 as ocp  # takes a second to import

  ocp.save(_absolute(path), tree, custom_metadata=about, overwrite=overwrite)


def _absolute(path: str | os.PathLike[str]) -> str:
  """orbax takes absolute paths, and those of buckets."""
  return text if "://" in (text := os.fspath(path)) else os.path.abspath(text)


def read_about(path: str | os.PathLike[str], mark: str, by: str) -> tuple[dict[str, Any], Any]:
  """What `write` put beside the arrays under the key `mark`, and the shapes of the arrays.

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
  return copy.deepcopy(about[mark]), found.metadata


def read(path: str | os.PathLike[str], abstract: Any) -> Any:
  """The arrays of a checkpoint: shapes that it has, dtypes and shardings that are asked for.

  Raises ValueError for one that lacks an array, or a file.
  """
  from orbax.checkpoint import v1 as ocp

  try:
    return ocp.load(_absolute(path), abstract)
  except Exception as error:
    raise ValueError(f"{path} can't be read, it is damaged or of another model: {error}") from error
