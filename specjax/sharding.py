"""Models on a mesh of devices: `shard` places parameters, and everything sampled with them follows.

    mesh = specjax.sharding.mesh(model=4)  # 8 devices: 2 for rows, 4 for parameters
    target = specjax.sharding.shard(target, mesh)
    drafter = specjax.sharding.shard(specjax.ModelDrafter(draft), mesh)  # whole on every device of `model`
    with jax.set_mesh(mesh):
      result = specjax.sample(target, drafter, prompts, key=key)

Arrays carry logical axes (vocab, embed, heads, kv_heads, mlp, layers; batch), and rules say which mesh axes each is
split over. With the default rules heads, the inner width of the MLPs and the vocabulary are split over `model`
(Megatron's split, arXiv 1909.08053) and rows over `data`. What can't be split:

  * Fewer key and value heads than parts: each is repeated, so that every device holds the one that its own query heads
    read. The alternatives are worse: whole heads on every device cost num_kv_heads times that cache, and splitting
    within a head costs a sum of all scores over the devices in each layer.
  * A vocabulary that the parts don't divide is padded, by ids whose logits are -inf.
  * Query heads or an MLP width that the parts don't divide stay whole on every device, with a warning.

The forms for a CPU (`cpu_kernels`) can't be split: on a mesh of several devices the plain ones take their place. This
module runs nothing and starts no processes.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AxisType, Mesh, Sharding

from specjax import warp
from specjax.language_model import LanguageModel
from specjax.models.config import DecoderConfig, widened
from specjax.models.forms import reform
from specjax.models.ops import Options
from specjax.models.transformer import Apply
from specjax.placement import P, Placement, rows_first

Rules = Mapping[str, str | tuple[str, ...] | None]

AXES = ("batch", "vocab", "embed", "heads", "kv_heads", "mlp", "layers")
RULES: Rules = {"batch": "data", "vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model"}
DRAFT_RULES: Rules = {"batch": "data"}  # parameters whole everywhere: a draft pass then waits for no other device

_WITH_ROWS = ("vocab", "kv_heads", "layers")  # axes of laws and caches beside `batch`
_MULTIPLE = 128  # padded vocabularies are multiples of it, so that draws can be split in blocks

Placeable = TypeVar("Placeable")


def mesh(*, data: int | None = None, model: int = 1, devices: Any = None, explicit: bool = False) -> Mesh:
  """A mesh of axes `data`, which rows are split over, and `model`, which parameters are.

  data: default: as many as the devices allow. devices: default: all. explicit: axes of type Explicit, in place of Auto.
  Raises TypeError for devices that are none, and ValueError for sizes that don't make up the devices.
  """
  devices = jax.devices() if devices is None else _check_devices(devices)
  for name, size in (("data", data), ("model", model)):
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
      raise ValueError(f"{name}={size!r} must be a whole number of devices, 1 or more.")
  if data is None and len(devices) % model:
    raise ValueError(
      f"model={model} does not divide the {len(devices)} devices: choose a divisor, or pass devices=... to take others."
    )
  data = len(devices) // model if data is None else data
  if data * model != len(devices):
    raise ValueError(f"data={data} times model={model} is not {len(devices)}, the number of devices: pass devices=....")
  types = (AxisType.Explicit if explicit else AxisType.Auto,) * 2
  return jax.make_mesh((data, model), ("data", "model"), axis_types=types, devices=devices)


def shard(model: Placeable, mesh: Mesh, rules: Rules | None = None, *, axes: Any = None) -> Placeable:
  """The same model or drafter with its parameters on the mesh; `specjax.sample`, `init` and `step` take it unchanged.

  model: a LanguageModel, or a drafter: of one with a field `model` that is placed, any other has nothing to place.
    Parameters may be jax.ShapeDtypeStructs, to compile without weights.
  rules: logical axis -> mesh axis, several, or None (whole); names that are missing are whole. Default: `RULES` for a
    model and `DRAFT_RULES` for a drafter, as far as the mesh has their axes.
  axes: logical axes of the parameters, a pytree of jax.P or one for all; default: what the model says. Parameters of a
    model that says nothing are whole.

  Raises TypeError or ValueError for a mesh, rules or axes that can't be, and for more parts than heads.
  """
  own: Any = functools.partial(_shard, mesh=mesh, rules=rules, axes=axes)
  if isinstance(model, LanguageModel):
    return own(model, defaults=RULES)
  if isinstance(inner := getattr(model, "model", None), LanguageModel):
    return dataclasses.replace(cast(Any, model), model=own(inner, defaults=DRAFT_RULES))
  if not callable(getattr(model, "propose", None)):
    raise TypeError(f"model must be a specjax.LanguageModel or a drafter, got {type(model).__name__}.")
  place(mesh, {} if rules is None else rules)  # as wrong here as for a model
  return model


def _shard(model: LanguageModel, mesh: Mesh, rules: Rules | None, axes: Any, defaults: Rules) -> LanguageModel:
  placement = place(mesh, rules, defaults)
  if isinstance(model.apply, Apply):
    config, options, placement = fit(model.apply.config, model.apply.options, placement)
    model = reform(model, config, options)
  if axes is None:
    of = getattr(model.apply, "axes", None)
    axes = P() if of is None else of(model.params)
  shardings = placement.shardings(model.params, _check_axes(axes, model.params))
  return dataclasses.replace(model, params=jax.tree.map(put, model.params, shardings), placement=placement)


def put(leaf: Any, sharding: Sharding) -> Any:
  """An array there, or what is known of one."""
  where = rows_first(leaf.ndim, sharding)
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
  return jax.device_put(leaf, where)


def place(mesh: Mesh, rules: Rules | None = None, defaults: Rules = RULES) -> Placement:
  """The placement of a mesh and rules, checked; raises as `shard` does."""
  return Placement(_check_mesh(mesh), _check_rules(_known(defaults, mesh) if rules is None else rules, mesh))


def fit(config: DecoderConfig, options: Options, placement: Placement) -> tuple[DecoderConfig, Options, Placement]:
  """A decoder's sizes and form that a placement's parts divide, and the placement without rules for what they can't."""
  c, whole = widened(config), list[str]()
  if placement.mesh.size == 1:
    return c, dataclasses.replace(options, row_parts=1), placement
  parts, kv_parts, mlp = placement.parts("heads"), placement.parts("kv_heads"), placement.parts("mlp")
  if parts > c.num_heads:
    raise ValueError(
      f"heads can't be split over {parts} devices: the model has {c.num_heads}. Use at most {c.num_heads} for that "
      "axis and the others for rows, or rules in which heads and kv_heads are None."
    )
  if kv_parts not in (1, parts):
    raise ValueError(
      f"kv_heads in {kv_parts} parts don't go with heads in {parts}: give both the same rule, or kv_heads None."
    )
  if c.num_heads % parts:
    warnings.warn(f"{c.num_heads} heads don't divide over {parts} devices: attention is whole on each.", stacklevel=4)
    whole, kv_parts = ["heads", "kv_heads"], 1
  if c.d_ff % mlp:
    warnings.warn(f"an MLP width of {c.d_ff} doesn't divide over {mlp} devices: it is whole on each.", stacklevel=4)
    whole.append("mlp")
  repeats = math.lcm(c.num_kv_heads, kv_parts) // c.num_kv_heads
  size = padded_vocabulary(c.vocab_size, placement.parts("vocab"))
  rules = tuple(rule for rule in placement.rules if rule[0] not in whole)
  plain = dataclasses.replace(options, cpu_kernels=False, row_parts=placement.parts("batch"))
  return widened(c, repeats, size), plain, Placement(placement.mesh, rules)


def padded_vocabulary(vocab_size: int, parts: int) -> int:
  """The vocabulary, or a larger one that can be split: into equal parts of whole blocks of `warp.categorical`."""
  if vocab_size % parts == 0 and warp.block_shape(vocab_size)[0] % parts == 0:
    return vocab_size
  multiple = math.lcm(_MULTIPLE, parts)
  return -(-vocab_size // multiple) * multiple


def _known(rules: Rules, mesh: Any) -> Rules:
  """The default rules for the axes that this mesh has."""
  known = {name: axis for name, axis in rules.items() if axis in _check_mesh(mesh).axis_names}
  if not known:
    raise ValueError(
      f"the mesh has the axes {', '.join(mesh.axis_names)}, and the default rules know data and model: pass rules, "
      f'such as {{"batch": "{mesh.axis_names[0]}"}}.'
    )
  return known


def _check_devices(devices: Any) -> list[Any]:
  found = list(devices) if isinstance(devices, Iterable) else [devices]
  if not all(hasattr(each, "device_kind") for each in found):
    raise TypeError(f"devices={devices!r} must be a flat sequence of jax devices, such as jax.devices()[:4].")
  if not found or len(set(found)) < len(found):
    raise ValueError(f"devices={devices!r} must be one device or more, each of them once.")
  return found


def _check_mesh(mesh: Any) -> Mesh:
  if not isinstance(mesh, Mesh):
    raise TypeError(
      f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}: make one with specjax.sharding.mesh."
    )
  if AxisType.Manual in mesh.axis_types:
    raise ValueError("the mesh has axes of type Manual, those within a jax.shard_map; they must be Auto or Explicit.")
  return mesh


def _check_axes(axes: Any, params: Any) -> Any:
  """Known logical axes of every parameter, in the structure of the parameters."""
  axes = jax.tree.map(lambda _: axes, params) if isinstance(axes, P) else axes
  given = {jax.tree_util.keystr(path): spec for path, spec in jax.tree.leaves_with_path(axes)}
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
  differ = [f"params{path} has none" for path in paths if path not in given]
  differ += [f"axes{path} is for none" for path in given if path not in set(paths)]
  if differ:
    raise ValueError(
      "axes must be a jax.P for each parameter, in the same structure, or one for all (jax.P() is whole): "
      f"{', '.join(differ[:2])}{f', and {len(differ) - 2} more' if differ[2:] else ''}."
    )
  for path, spec in given.items():
    if not isinstance(spec, P):
      raise TypeError(f"axes{path}={spec!r} must be a jax.P of logical axes (jax.P() is whole).")
    if unknown := [name for name in spec if name is not None and name not in AXES]:
      raise ValueError(
        f"axes{path}={spec} has unknown logical axes: {', '.join(map(repr, unknown))}. Known: {', '.join(AXES)}, None."
      )
  return jax.tree.unflatten(jax.tree.structure(params), [given[path] for path in paths])


def _check_rules(rules: Any, mesh: Mesh) -> tuple[tuple[str, tuple[str, ...]], ...]:
  if not isinstance(rules, Mapping):
    raise TypeError(f"rules must map logical axes to mesh axes, got {rules!r}: for example specjax.sharding.RULES.")
  if unknown := sorted(map(str, rules.keys() - set(AXES))):
    raise ValueError(f"rules name unknown logical axes: {', '.join(unknown)}. Known: {', '.join(AXES)}.")
  checked = {}
  for name, value in rules.items():
    if not isinstance(value, str | tuple | list | None):
      raise TypeError(f"rules split {name} over {value!r}: it must be a mesh axis, a tuple of them, or None (whole).")
    axes = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if missing := [axis for axis in axes if axis not in mesh.axis_names]:
      raise ValueError(
        f"rules split {name} over {', '.join(map(repr, missing))}; the mesh has the axes {', '.join(mesh.axis_names)}."
      )
    if len(set(axes)) < len(axes):
      raise ValueError(f"rules split {name} over {axes}: each mesh axis can be used once.")
    if math.prod(mesh.shape[axis] for axis in axes) > 1:
      checked[name] = axes
  for name in _WITH_ROWS:
    if shared := set(checked.get(name, ())) & set(checked.get("batch", ())):
      raise ValueError(
        f"rules split batch and {name} over the same mesh axis, {', '.join(sorted(shared))}, but laws and caches have "
        "both: give each a mesh axis of its own, or None."
      )
  return tuple(sorted(checked.items()))
