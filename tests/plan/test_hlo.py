"""Programs read from their text: what XLA compiles on this machine, and a small one as its TPU compiler writes it."""

import functools
import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from specjax.plan import hlo
from specjax.plan.hlo import Module

LAYERS, WIDTH = 9, 64


@functools.cache
def layers() -> Module:
  """Rows through LAYERS matrices, again and again until a sum is large; a branch with one product more."""

  def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ weight), None

  def program(x: jax.Array, weights: jax.Array, extra: jax.Array) -> jax.Array:
    def body(x: jax.Array) -> jax.Array:
      with jax.named_scope("target"):
        x, _ = lax.scan(layer, x, weights)
      return lax.cond(x[0, 0] > 0, lambda x: x @ extra, lambda x: x, x)

    return lax.while_loop(lambda x: x.sum() < 1e3, body, x)

  shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, WIDTH), (LAYERS, WIDTH, WIDTH), (WIDTH, WIDTH))]
  return Module(jax.jit(program).lower(*shapes).compile().as_text())


def test_flops_of_a_scan_count_every_turn() -> None:
  products = [item for item in layers().items if item.flops]
  always, sometimes = ([item for item in products if item.optional is optional] for optional in (False, True))
  one = 2 * 8 * WIDTH * WIDTH
  assert sum(item.flops * item.runs(1) for item in always) == LAYERS * one
  assert {tuple(loop.trips for loop in item.loops) for item in always} == {(None, LAYERS)}
  assert sum(item.flops for item in sometimes) == one
  assert {tuple(loop.trips for loop in item.loops) for item in sometimes} == {(None,)}
  assert all("target" in item.scope for item in always)
  assert not any("target" in item.scope for item in sometimes)


def test_a_slice_of_stacked_weights_counts_as_that_slice() -> None:
  inside = [item for item in layers().items if len(item.loops) == 2]
  moved = sum(item.hbm for item in inside)
  weight = 4 * WIDTH * WIDTH
  assert weight <= moved < 5 * weight  # read, perhaps copied out of the stack first; never the whole stack
  assert max(item.made for item in inside) <= weight


# As the TPU compiler writes it: a loop of 80 turns over stacked weights, with a cache that is written in place.
TEXT = pathlib.Path(__file__).with_name("program.hlo").read_text()


@pytest.fixture
def items() -> dict[str, hlo.Item]:
  return {item.instruction.name: item for item in Module(TEXT).items}


def test_what_a_tpu_reads_and_writes(items: dict[str, hlo.Item]) -> None:
  weight = 256 * 8192 * 2
  index = 4
  assert items["out"].hbm == weight + index  # a slice in a fusion within; rows and result are in on-chip memory
  assert items["out"].flops == 2 * 5 * 256 * 8192
  assert [loop.trips for loop in items["out"].loops] == [80]
  assert items["grown"].made == 2 * 128 * 2  # in place
  assert items["grown"].hbm == 2 * 128 * 2 + index
  assert items["copy-start"].hbm == 80 * weight  # into on-chip memory
  assert items["empty"].hbm == 80 * 2 * 2048 * 128 * 2 + index
  assert items["out"].scope == "jit(f)/while/body/target/dot"
  assert items["grown"].scope == "jit(f)/while"  # what has no name of its own is where its loop is


def test_collectives_of_several_devices_count(items: dict[str, hlo.Item]) -> None:
  assert {name: item.collective for name, item in items.items() if item.collective} == {
    "reduced": "all-reduce",
    "gather-start": "all-gather",
  }
  assert (items["reduced"].devices, items["reduced"].payload, items["reduced"].runs()) == (16, 5 * 256 * 2, 80)
  assert (items["gather-start"].devices, items["gather-start"].payload) == (32, 1024)


@pytest.mark.parametrize(
  ("attributes", "size"),
  [
    ("replica_groups=mesh['a'=4,'b'=2,'c'=3] {'a','c'}, x", 12),
    ("replica_groups={{0,1,2},{3,4,5}}, x", 3),
    ("replica_groups=[4,8]<=[32], x", 8),
    ("channel_id=1", 2),
  ],
)
def test_group_sizes(attributes: str, size: int) -> None:
  assert hlo.group_size(attributes) == size


def test_sizes_of_arrays() -> None:
  shapes = hlo._arrays("(bf16[3,4]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/pred[5]{0}, f8e4m3fn[7]{0}, s4[6]{0}, f32[])")
  assert [(shape.bytes, shape.space) for shape in shapes] == [(24, 1), (5, 0), (7, 0), (3, 0), (4, 0)]
  assert math.prod(itertools.chain.from_iterable(shape.dims for shape in shapes)) == 3 * 4 * 5 * 7 * 6


def test_no_program() -> None:
  with pytest.raises(ValueError, match="no ENTRY computation"):
    Module("HloModule empty")
