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
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from specjax.draft.base import Drafter
from specjax.language_model import LanguageModel
from specjax.models import orbax
from specjax.models.transformer import Apply
from specjax.placement import on_auto_axes
from specjax.sampler import SpecState, init, state_specs

_MARK = "specjax_state"


def save_state(state: SpecState, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
  """Writes a state of `init` or `step` as an orbax checkpoint, a directory; whole or not at all.

  Every process calls it and writes its own parts. overwrite: puts it in the place of a checkpoint, which is there until
  the new one is: a call that is killed leaves one whole, at `path`, or at `path`.old. Only in a bucket the old one is
  deleted first. Raises TypeError for what is no state, and ValueError where `path` exists already unless `overwrite`.
  """
  if not isinstance(state, SpecState):
    raise TypeError(f"state must be a specjax.SpecState, of specjax.init or step, got {type(state).__name__}.")
  (batch, max_length), gamma = state.tokens.shape, state.tested.shape[-1]
  about = {"batch": batch, "max_length": max_length, "num_draft_tokens": gamma, "stops": state.stop_ids.shape[-1],
           "key": str(jax.random.key_impl(state.key))}  # fmt: skip
  orbax.write(path, {name: leaf for name, leaf in _named(state).items() if leaf.size}, _MARK, about, overwrite)


def load_state(path: str | os.PathLike[str], target: LanguageModel, drafter: Drafter | None) -> SpecState:
  """The state that `save_state` wrote, placed for this target and drafter, which go on with it by `step`.

  They must be the models it was made with, in the same form (`scan_layers`); the mesh may be another one, or none. What
  shows in a state is checked, not their weights, which it doesn't hold. Raises FileNotFoundError or ValueError for a
  directory that is no such checkpoint, a damaged one, or one of models of other sizes, all of which are listed.
  """
  names = ("batch", "max_length", "num_draft_tokens", "stops", "key")
  about, saved = orbax.read_about(path, _MARK, "specjax.save_state", names)
  batch, gamma = about["batch"], about["num_draft_tokens"]
  if target.placement is not None and batch % (parts := target.placement.parts("batch")):
    raise ValueError(
      f"{path} has {batch} rows, which {parts} devices can't share evenly: place the models on a mesh with another "
      f"axis for rows than in {dict(target.placement.mesh.shape)}."
    )

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

  abstract = {name: stored(leaf, name, place) for name, leaf, place, _ in leaves if leaf.size}
  found = orbax.read(path, abstract, about["checksums"])
  if (largest := int(found["tokens"].max())) >= target.num_ids:
    raise ValueError(
      f"{path} is of another target: it holds the token {largest}, this one has {target.num_ids} tokens."
    )
  restored = [
    _with_heads(path, name, found[name], leaf.shape, place, own)
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


def _with_heads(path: Any, name: str, value: Array, shape: tuple[int, ...], place: Sharding, own: int | None) -> Array:
  """A cache with each head repeated as often as `shape` has it; raises ValueError unless it was one's own repeated."""
  if value.shape == shape:
    return value
  assert own is not None
  before, after = value.shape[-3] // own, shape[-3] // own

  @jax.jit
  def repeated(value: Array) -> tuple[Array, Array]:
    each = value.reshape(*value.shape[:-3], own, before, *value.shape[-2:])
    apart = jnp.abs(each - each[..., :1, :, :]).max()  # a product may round its columns differently
    return jnp.repeat(each[..., 0, :, :], after, axis=-3), apart <= 0.02 * jnp.abs(each).max()

  moved, context = on_auto_axes(value)
  with context():
    heads, same = repeated(moved)
  if not same:
    raise ValueError(f"{path} is of another target or drafter: {name} has more than {own} heads of keys and values.")
  return jax.device_put(heads, place)
