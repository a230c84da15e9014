"""A decoder's parameters in all their forms: as a checkpoint has them, fused or stacked, widened, split over devices.

`from_checkpoint` makes any form, tensor by tensor; `as_checkpoint` undoes it; `reform` goes from one to another on the
devices. Nothing here reads a file or runs a model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array
from jax.sharding import Sharding, SingleDeviceSharding

from specjax.language_model import LanguageModel
from specjax.models.checkpoint import Checkpoint, Index
from specjax.models.config import DecoderConfig, parameter_shapes, widened
from specjax.models.ops import Options
from specjax.models.transformer import DTYPES, Apply, language_model, skeleton
from specjax.placement import Placement, on_auto_axes, rows_first

# Weights that the CPU forms keep as one: two wide products take a tenth less time a token than five narrow ones.
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def from_checkpoint(
  checkpoint: Checkpoint,
  *,
  dtype: Any = None,
  scan_layers: bool | None = None,
  options: Options | None = None,
  config: DecoderConfig | None = None,
  placement: Placement | None = None,
) -> LanguageModel:
  """Loads a checkpoint tensor by tensor: beside the parameters at most one tensor is held.

  dtype: of parameters, activations and cache; default float32 on a CPU, bfloat16 elsewhere.
  options: default: the backend's; `scan_layers` overrides that field of it.
  config: the checkpoint's, or `widened`.
  placement: where to put the parameters; default: jax's default device. Each process reads the parts of its own devices
    alone, part by part, as far as the format allows.
  """
  options = options or Options.for_backend()
  if scan_layers is not None:
    options = dataclasses.replace(options, scan_layers=scan_layers)
  dtype = checked_dtype(dtype)
  config = config or checkpoint.config
  shapes = skeleton(config, options)[1]
  model = language_model(config, options, shapes, checkpoint.tokenizer_hash)
  where = jax.tree.map(lambda _: None, shapes)
  if placement is not None:
    where = placement.shardings(shapes, Apply(config, options).axes(shapes))

  def read(path: tuple, leaf: jax.ShapeDtypeStruct, sharding: Sharding | None) -> Array:
    names = [str(key.key) for key in path]

    def part(index: Index) -> np.ndarray:
      if names[0] != "layers" or not options.scan_layers:
        return _read(checkpoint, config, names, index).astype(dtype, copy=False)
      stacked = np.empty([axis.stop - axis.start for axis in index], dtype)  # filled layer by layer
      for i, layer in enumerate(range(index[0].start, index[0].stop)):
        stacked[i] = _read(checkpoint, config, ["layers", str(layer), *names[1:]], index[1:])
      return stacked

    return _assemble(leaf.shape, sharding, part)

  leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
  bar = tqdm.tqdm(leaves, desc=f"Loading {config.architecture}", unit=" tensors", leave=False, disable=None)
  places = jax.tree.leaves(where, is_leaf=lambda leaf: leaf is None)
  params = jax.tree.unflatten(tree, [read(*item, place) for item, place in zip(bar, places, strict=True)])
  return dataclasses.replace(model, params=params, placement=placement)


def checked_dtype(dtype: Any) -> np.dtype:
  """The dtype of parameters; None stands for the backend's default."""
  dtype = jnp.dtype(dtype or (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16))
  if dtype not in DTYPES:
    raise ValueError(f"dtype={dtype} is not supported: {', '.join(map(str, DTYPES))}.")
  return dtype


def _assemble(shape: tuple[int, ...], sharding: Sharding | None, part: Callable[[Index], np.ndarray]) -> Array:
  """The array whose parts `part(index)` gives, each asked for once and held alone."""
  if sharding is None:
    return jnp.asarray(part(tuple(slice(0, size) for size in shape)))
  devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    bounds = tuple(axis.indices(size)[:2] for axis, size in zip(index or (), shape, strict=True))
    devices.setdefault(bounds, []).append(device)
  arrays = []
  for bounds, own in devices.items():
    value = part(tuple(slice(*bound) for bound in bounds))
    arrays += [jax.device_put(value, rows_first(len(shape), SingleDeviceSharding(device))) for device in own]
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read(checkpoint: Checkpoint, config: DecoderConfig, names: list[str], index: Index) -> np.ndarray:
  """A part of one parameter of `config`, of a single layer, float32."""
  *prefix, module, name = names
  if module in FUSED:  # whole: these forms are for one device
    return np.concatenate([checkpoint.tensor(".".join([*prefix, part, name])) for part in FUSED[module]])
  tensor = functools.partial(checkpoint.tensor, ".".join(names))
  if module in ("k", "v") and config.kv_repeats > 1:
    depth, repeats = config.head_dim, config.kv_repeats
    first, last = index[0].start // (depth * repeats), -(-index[0].stop // (depth * repeats))
    heads = tensor((slice(first * depth, last * depth), *index[1:]))
    start = index[0].start - first * depth * repeats
    return _repeat_heads(heads, depth, repeats)[start : start + index[0].stop - index[0].start]
  if module in ("embed", "head") and config.vocab_padding:
    ids = config.num_ids
    rows = np.zeros([axis.stop - axis.start for axis in index], np.float32)
    if (real := min(index[0].stop, ids) - index[0].start) > 0:
      rows[:real] = tensor((slice(index[0].start, index[0].start + real), *index[1:]))
    return rows
  return tensor(index)


def _repeat_heads(value: Any, depth: int, repeats: int) -> Any:
  """[K*h, ...] with each head `repeats` times, side by side."""
  heads = value.reshape(-1, depth, *value.shape[1:])
  return heads.repeat(repeats, 0).reshape(-1, *value.shape[1:])


def as_checkpoint(model: LanguageModel) -> Checkpoint:
  """A decoder's parameters under their canonical names, whatever its form: `from_checkpoint` makes another form of it.

  Raises TypeError for a model that is not of this family.
  """
  apply = model.apply
  if not isinstance(apply, Apply):
    raise TypeError(f"{model!r} is not of the decoder family of specjax.models: its layers are not known.")
  config = widened(apply.config)
  shapes = parameter_shapes(config)
  params, context = on_auto_axes(model.params)

  def tensor(name: str, index: Index | None = None) -> np.ndarray:
    with context():
      value = np.asarray(_canonical(apply, params, name), np.float32)
    assert value.shape == shapes[name]
    return value if index is None else value[index]

  return Checkpoint(config=config, tensor=tensor, tokenizer_hash=model.tokenizer_hash)


def _canonical(apply: Apply, params: Any, name: str) -> Any:
  """One tensor of `parameter_shapes` of the model as its checkpoint has it."""
  c, stacked = apply.config, apply.options.scan_layers
  *prefix, module, leaf = name.split(".")
  block = params
  if prefix:
    block = params["layers"] if stacked else params["layers"][int(prefix[1])]
  fused = next((whole for whole, parts in FUSED.items() if module in parts and whole in block), None)
  value = block[fused or module][leaf]
  if prefix and stacked:
    value = value[int(prefix[1])]
  if fused is not None:
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    ends = np.cumsum([0, heads, kv_heads, kv_heads] if fused == "qkv" else [0, c.d_ff, c.d_ff])
    part = FUSED[fused].index(module)
    value = value[ends[part] : ends[part + 1]]
  if module in ("k", "v") and c.kv_repeats > 1:
    heads = value.reshape(-1, c.head_dim, *value.shape[1:])
    value = heads[:: c.kv_repeats].reshape(-1, *value.shape[1:])
  if module in ("embed", "head") and c.vocab_padding:
    value = value[: c.num_ids]
  return value


def reform(model: LanguageModel, config: DecoderConfig, options: Options) -> LanguageModel:
  """The same decoder in another form, computed on the devices that hold it; `config` is its own, or `widened`.

  Parameters may be jax.ShapeDtypeStructs. What changes stays on the same devices, split as the compiler likes: placing
  it is for `specjax.sharding`. No form that fuses weights (`cpu_kernels`) can be made of one that doesn't.
  """
  apply = model.apply
  assert isinstance(apply, Apply)
  if (config, options) == (apply.config, apply.options):
    return model
  same = (options.scan_layers, options.cpu_kernels) == (apply.options.scan_layers, apply.options.cpu_kernels)
  changed = {*(("k", "v") if config.kv_repeats != apply.config.kv_repeats else ())}
  changed |= {*(("embed", "head") if config.vocab_size != apply.config.vocab_size else ())}

  def form(params: Any) -> Any:
    def leaf(path: tuple, _: Any) -> Array:
      names = [str(key.key) for key in path]
      if same and names[-2] not in changed:
        return functools.reduce(lambda tree, key: tree[key.key], path, params)
      if names[0] != "layers" or not options.scan_layers:
        return one(params, names)
      return jnp.stack([one(params, ["layers", str(i), *names[1:]]) for i in range(config.num_layers)])

    return jax.tree_util.tree_map_with_path(leaf, skeleton(config, options)[1])

  def one(params: Any, names: list[str]) -> Array:
    value = _canonical(apply, params, ".".join(names))
    if names[-2] in ("k", "v"):
      value = _repeat_heads(value, config.head_dim, config.kv_repeats)
    if names[-2] in ("embed", "head"):
      value = jnp.pad(value, ((0, config.vocab_padding), (0, 0)))
    return value

  if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model.params)):
    params = jax.eval_shape(form, model.params)
  else:
    params, context = on_auto_axes(model.params)
    with context():
      params = form(params)
  return language_model(config, options, params, model.tokenizer_hash)
