"""A running generation on disk: `save_state` between two rounds, `load_state` anywhere, on any mesh.

A state is saved with its keys and counters, so a generation that goes on from it draws what it would have drawn. The
models are not part of it: `specjax.save_model` and `specjax.load_model` see to them.
"""

import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from specjax.draft.base import Drafter
from specjax.language_model import LanguageModel
from specjax.models import orbax
from specjax.models.transformer import Apply
from specjax.placement import with_auto_axes
from specjax.sampler import SpecState, init, state_specs

_MARK = "specjax_state"


def save_state(state: SpecState, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
  """Writes a state of `init` or `step` as an orbax checkpoint, a directory; whole or not at all.

  Every process calls it and writes its own parts. Raises ValueError where `path` exists already, unless `overwrite`.
  """
  (batch, max_length), gamma = state.tokens.shape, state.tested.shape[-1]
  about = {"batch": batch, "max_length": max_length, "num_draft_tokens": gamma, "stops": state.stop_ids.shape[-1],
           "key": str(jax.random.key_impl(state.key))}  # fmt: skip
  orbax.write(path, {name: leaf for name, leaf in _named(state).items() if leaf.size}, {_MARK: about}, overwrite)


def load_state(path: str | os.PathLike[str], target: LanguageModel, drafter: Drafter | None) -> SpecState:
  """The state that `save_state` wrote, placed for this target and drafter, which go on with it by `step`.

  They must be the models it was made with, in the same form (`scan_layers`); the mesh may be another one, or none.
  Raises FileNotFoundError or ValueError for a directory that is no such checkpoint, a damaged one, or one of models of
  other sizes, all of which are listed.
  """
  about, saved = orbax.read_about(path, _MARK, "specjax.save_state")
  batch, gamma = about["batch"], about["num_draft_tokens"]

  def start(target: LanguageModel, drafter: Drafter | None, key: Array) -> SpecState:
    return init(
      target, drafter if gamma else None, np.zeros((batch, 1), np.int32), key=key, max_new_tokens=0,
      num_draft_tokens=gamma, eos_id=range(about["stops"]), max_length=about["max_length"], prefill_chunk=1,
    )  # fmt: skip

  key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=about["key"]), batch))
  wanted = jax.eval_shape(start, target, drafter, key)
  if target.placement is None:
    places = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), wanted)
  else:
    specs = state_specs(wanted, target, drafter if gamma else None)
    places = jax.tree.map(functools.partial(NamedSharding, target.placement.mesh), specs)
  heads = {"target_cache": _own_heads(target), "draft_state": _own_heads(getattr(drafter, "model", None))}
  leaves = [
    (name, leaf, place, heads.get(name.split(".")[0]))
    for (name, leaf), place in zip(_named(wanted).items(), jax.tree.leaves(places), strict=True)
  ]
  _check(path, {name: (leaf, own) for name, leaf, _, own in leaves if leaf.size}, saved)

  def stored(leaf: Any, name: str, place: Sharding) -> jax.ShapeDtypeStruct:
    shape = leaf.shape if name == "key" else saved[name].shape
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_dividing(place, shape))

  found = orbax.read(path, {name: stored(leaf, name, place) for name, leaf, place, _ in leaves if leaf.size})
  restored = [
    _with_heads(found[name], leaf.shape, place, own)
    if leaf.size
    else jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), place)
    for name, leaf, place, own in leaves
  ]
  return jax.tree.unflatten(jax.tree.structure(wanted), restored)


def _named(state: SpecState) -> dict[str, Any]:
  """Every array by its path, such as "target_cache.k"."""
  return {
    jax.tree_util.keystr(at, simple=True, separator="."): x for at, x in jax.tree_util.tree_leaves_with_path(state)
  }


def _own_heads(model: Any) -> int | None:
  """Key and value heads of a decoder, before any is repeated for a mesh."""
  apply = getattr(model, "apply", None)
  return apply.config.num_kv_heads // apply.config.kv_repeats if isinstance(apply, Apply) else None


def _check(path: Any, wanted: dict[str, tuple[Any, int | None]], saved: dict[str, Any]) -> None:
  """Raises ValueError unless the checkpoint has these arrays, but for how often heads are repeated."""

  def words(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"

  wrong = [f"{name} is not wanted" for name in saved.keys() - wanted.keys()]
  for name, (leaf, own) in wanted.items():
    if name not in saved:
      wrong.append(f"{name} is missing")
      continue
    shape, dtype = tuple(saved[name].shape), saved[name].dtype
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      shape, dtype = shape[:-1], leaf.dtype  # stored as words
    times = shape[-3] % own == 0 if own is not None and len(shape) == leaf.ndim else False
    if (((*shape[:-3], leaf.shape[-3], *shape[-2:]) if times else shape), dtype) != (leaf.shape, leaf.dtype):
      wrong.append(f"{name} is {words(shape, dtype)}, wanted {words(leaf.shape, leaf.dtype)}")
  if wrong:
    raise ValueError(
      f"{path} is of another target or drafter, or of another form of it:\n  " + "\n  ".join(sorted(wrong))
    )


def _dividing(place: Sharding, shape: tuple[int, ...]) -> Sharding:
  """The sharding, with dimensions whole that it doesn't divide."""
  if not isinstance(place, NamedSharding):
    return place
  sizes = place.mesh.shape
  names = [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in place.spec]
  split = [size % math.prod(sizes[axis] for axis in axes) == 0 for axes, size in zip(names, shape, strict=False)]
  return NamedSharding(
    place.mesh, PartitionSpec(*(axes if ok else None for axes, ok in zip(names, split, strict=True)))
  )


def _with_heads(value: Array, shape: tuple[int, ...], place: Sharding, own: int | None) -> Array:
  """A cache with each head repeated as often as `shape` has it."""
  if value.shape == shape:
    return value
  assert own is not None
  before, after = value.shape[-3] // own, shape[-3] // own
  index = np.arange(shape[-3]) // after * before
  if not isinstance(place, NamedSharding):
    return jax.device_put(jnp.take(value, index, axis=-3), place)
  assert isinstance(place.mesh, Mesh)
  mesh = with_auto_axes(place.mesh)  # whatever types the axes have, or those of the mesh that is set
  take = jax.jit(lambda value: jnp.take(value, index, axis=-3), out_shardings=NamedSharding(mesh, place.spec))
  with jax.set_mesh(mesh):
    return jax.device_put(take(jax.device_put(value, _dividing(NamedSharding(mesh, place.spec), value.shape))), place)
