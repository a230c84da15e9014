"""Where arrays lie on a mesh while a program is traced: logical axis names, rules to mesh axes, constraints.

A model that `specjax.sharding.shard` has placed carries a `Placement`; the sampler asks it, and nothing else, where
rows, laws and caches belong. This module knows no model and moves no weights.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

P = PartitionSpec
ROWS = P("batch")  # rows first, everything behind them whole


def rows_first(ndim: int, sharding: Sharding) -> Any:
  """The sharding of a parameter, and on a TPU how it lies in memory there: as it is written, rows first.

  By itself a TPU turns a weight round whose parts fill no tiles (448 of 512 columns, say), and every call would begin
  with turning all of them back: a second copy of those weights.
  """
  on_tpu = next(iter(sharding.device_set)).platform == "tpu"
  return Format(Layout(tuple(range(ndim))), sharding) if on_tpu else sharding


@dataclasses.dataclass(frozen=True)
class Placement:
  """A mesh, and the axes of it that each logical axis is split over. Hashable: a part of a model's static half.

  rules: (logical name, mesh axes) for each name that is split; a name without a rule is whole on every device.
  """

  mesh: Mesh
  rules: tuple[tuple[str, tuple[str, ...]], ...]

  def parts(self, name: Any) -> int:
    """The number of parts that a logical axis is split into."""
    return math.prod(self.mesh.shape[axis] for axis in dict(self.rules).get(name, ()))

  def specs(self, tree: Any, axes: Any) -> Any:
    """Mesh axes of every array in `tree`; axes: logical ones, a pytree of PartitionSpecs or one for all arrays.

    A dimension that its parts don't divide is whole, and so are those of an array beyond the names it was given.
    """
    mesh_axes = dict(self.rules)

    def spec(leaf: Any, own: PartitionSpec) -> PartitionSpec:
      split = [
        mesh_axes.get(name, ()) if size % self.parts(name) == 0 else ()
        for name, size in zip(own, leaf.shape, strict=False)
      ]
      if len(used := [axis for axes in split for axis in axes]) > len(set(used)):
        raise ValueError(f"rules split two axes of one array over the same mesh axis: {own} over {split}.")
      while split and not split[-1]:  # as jax writes what a program returns, which would be compiled anew otherwise
        split.pop()
      return P(*(axes[0] if len(axes) == 1 else axes or None for axes in split))

    axes = jax.tree.map(lambda _: axes, tree) if isinstance(axes, PartitionSpec) else axes
    return jax.tree.map(spec, tree, axes)

  def shardings(self, tree: Any, axes: Any) -> Any:
    """The same as shardings: where arrays lie outside a program."""
    return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(tree, axes))

  def constrain(self, tree: Any, specs: Any) -> Any:
    """Says within a program where arrays lie, by mesh axes. For axes of type Auto: see `automatic`."""
    # Within jax.set_mesh the mesh at hand is this one, perhaps by other axis types, and specs refer to it.
    if not jax.sharding.get_abstract_mesh().axis_names:
      specs = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)

  def automatic(self, function: Callable[..., Any], specs: Callable[[], Any]) -> Callable[..., Any]:
    """`function` with every mesh axis of type Auto inside; specs(): mesh axes of its result, a prefix of the pytree.

    Under Explicit types each operation has to say where its result lies, and gathers, scatters and slices of what is
    split are refused. Inside, `constrain` says it where it matters and the compiler does the rest; outside, types are
    as they were. Arrays must be arguments: `function` may not close over any.

    Raises ValueError where the mesh that is set is another than the model's, or none although its axes are Explicit.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names and AxisType.Explicit in self.mesh.axis_types:
      raise ValueError(
        f"the model lies on a mesh of Explicit axes, {dict(self.mesh.shape)}, and no mesh is set: call within "
        "`with jax.set_mesh(mesh):`, or place the model on a mesh of Auto axes, as specjax.sharding.mesh makes them."
      )
    # In order, too. That the devices are the same, which can't be seen while a program is traced, jax itself requires.
    if mesh.axis_names and [*mesh.shape.items()] != [*self.mesh.shape.items()]:
      raise ValueError(
        f"the model lies on the mesh {dict(self.mesh.shape)}, but jax.set_mesh has set {dict(mesh.shape)}: set "
        "model.placement.mesh, or place the model on this one with specjax.sharding.shard."
      )
    return jax.sharding.auto_axes(function, out_sharding=specs()) if AxisType.Explicit in mesh.axis_types else function


def with_auto_axes(mesh: Mesh) -> Mesh:
  """The same devices under axes of type Auto."""
  return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def on_auto_axes(tree: Any) -> tuple[Any, Callable[[], contextlib.AbstractContextManager]]:
  """Arrays of one place under mesh axes of type Auto, not copied, and the context in which to compute with them."""
  leaves = jax.tree.leaves(tree)
  sharding = leaves[0].sharding if leaves and isinstance(leaves[0], jax.Array) else None
  if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)):
    return tree, contextlib.nullcontext
  mesh = with_auto_axes(sharding.mesh)
  moved = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, leaf.sharding.spec)), tree)
  return moved, lambda: jax.set_mesh(mesh)
