"""Whole programs compiled for TPUs that are not there: do they fit, what do they move, and how fast could they be?

    devices = aot.devices("v5e:4x4")  # needs libtpu: pip install -e '.[tpu]'
    mesh = specjax.sharding.mesh(model=16, devices=devices)
    target = specjax.sharding.shard(abstract_decoder(config, options=Options.for_backend("tpu")), mesh)
    program = aot.compile_sample(target, None, prompt_tokens=1024, max_new_tokens=128, num_draft_tokens=0)
    print(program.memory, program.round)

Models have shapes in place of weights (`specjax.models.transformer.abstract_decoder`), placed by `specjax.sharding`.
What comes out is XLA's own TPU executable, and its text says the rest (`specjax.plan.hlo`). Nothing runs, so no time
here is measured: times are floors, those of the memory, the matrix units and the links at their published speed.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import specjax
from specjax.language_model import LanguageModel, cache_specs, empty_cache
from specjax.plan.hlo import Item, Module


@dataclasses.dataclass(frozen=True)
class Chip:
  """One generation of TPU, each figure a chip's. Sources: cloud.google.com/tpu/docs/v4, v5e, v5p, v6e.

  devices: how many jax counts a chip as; a v4 is compiled for as two, with half of everything each.
  hbm: bytes that the compiler has for a program, on each device.
  hbm_speed: bytes/s; flops: bfloat16 operations/s; links: bytes/s out of the chip, over all of its links.
  shapes: the topologies from one to 64 chips.
  """

  devices: int
  hbm: float
  hbm_speed: float
  flops: float
  links: float
  shapes: tuple[str, ...]


_CUBES = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")
_SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8")
CHIPS = {
  "v4": Chip(2, 15.25 * 2**30, 1228e9, 275e12, 300e9, _CUBES),
  "v5e": Chip(1, 15.75 * 2**30, 819e9, 197e12, 200e9, _SQUARES),
  "v5p": Chip(1, 95.74 * 2**30, 2765e9, 459e12, 600e9, _CUBES),
  "v6e": Chip(1, 31.25 * 2**30, 1638e9, 918e12, 400e9, _SQUARES),
}
TOPOLOGIES = tuple(f"{name}:{shape}" for name, chip in CHIPS.items() for shape in chip.shapes)

# For the compiler alone, which otherwise looks for the machine's own TPU.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_WORKER_ID": "0",
}


def chip(topology: str) -> Chip:
  """The generation of a topology such as "v5e:4x4". Raises ValueError for one that is not known."""
  if topology not in TOPOLOGIES:
    raise ValueError(f"topology={topology!r} is not known. Known are {', '.join(TOPOLOGIES)}.")
  return CHIPS[topology.partition(":")[0]]


def devices(topology: str) -> list[Any]:
  """The devices of a topology, to make a mesh of: they can be compiled for, not run on.

  Raises ValueError for a topology that is not known, and ImportError where libtpu is not installed.
  """
  chip(topology)
  if importlib.util.find_spec("libtpu") is None:
    raise ImportError("compiling for a TPU needs libtpu, which runs on any Linux machine: pip install -e '.[tpu]'.")
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  single = {"chips_per_host_bounds": [1, 1, 1]} if set(re.findall(r"\d+", topology.partition(":")[2])) == {"1"} else {}
  return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **single).devices)


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of HBM on each device.

  params: of the models' parameters; padding: what their layout in tiles adds.
  caches: of both models, though the compiler may keep some in on-chip memory; temporaries: what is live beside them.
  program: instructions and results. total: what it needs.
  """

  params: int
  padding: int
  caches: int
  temporaries: int
  program: int
  total: int


class DoesNotFit(ValueError):
  """used, available: bytes of HBM on each device, as the compiler counts them."""

  def __init__(self, used: float, limit: float):
    super().__init__(
      f"the program needs {used / 2**30:.2f} GiB of HBM on each device, {(used - limit) / 2**30:.2f} more than the "
      f"{limit / 2**30:.2f} GiB there are: split parameters over more devices, or take a smaller batch or max_length."
    )
    self.used, self.available = used, limit


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a part of a program does on each device.

  hbm: bytes to and from HBM; flops: of matrix products.
  collectives: kind -> (how many, bytes of their results); sent: bytes that each device sends for them.
  cycles: the compiler's estimate, without collectives.
  """

  hbm: int
  flops: int
  collectives: dict[str, tuple[int, int]]
  sent: int
  cycles: int

  @property
  def count(self) -> int:
    return sum(count for count, _ in self.collectives.values())

  @property
  def payload(self) -> int:
    """Bytes of the collectives' results."""
    return sum(size for _, size in self.collectives.values())

  def floor(self, chip: Chip) -> float:
    """Seconds: the longer of memory and matrix units, and the links behind that. Waiting costs nothing here."""
    share = 1 / chip.devices
    return max(self.hbm / (chip.hbm_speed * share), self.flops / (chip.flops * share)) + self.sent / (
      chip.links * share
    )


def cost(items: list[Item], within: int) -> Cost:
  """The sum over `items`, each as often as it runs in one turn of loop number `within` - 1; 0: in the whole program."""
  collectives: dict[str, tuple[int, int]] = {}
  for item in items:
    if kind := item.collective:
      count, size = collectives.get(kind, (0, 0))
      collectives[kind] = count + item.runs(within), size + item.payload * item.runs(within)
  return Cost(
    hbm=sum(item.hbm * item.runs(within) for item in items),
    flops=sum(item.flops * item.runs(within) for item in items),
    collectives=collectives,
    sent=sum(_sent(item) * item.runs(within) for item in items if item.collective),
    cycles=sum(item.cycles * item.runs(within) for item in items),
  )


def _sent(item: Item) -> int:
  """Bytes that a device sends for a collective over a ring of n devices."""
  n = item.devices
  shares = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1, "collective-broadcast": 1}
  return round(item.payload * shares.get(item.collective or "", (n - 1) / n))


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled `specjax.sample`.

  In a round: `draft` and `target` are the parts that the two models take, laws included; filters are in `filters`, and
  are paid only where some row uses top-k or top-p; `round` is everything else too, without filters.
  """

  memory: Memory
  module: Module = dataclasses.field(repr=False)

  @functools.cached_property
  def in_round(self) -> list[Item]:
    """What runs in the loop over rounds."""
    return [item for item in self.module.items if item.loops and "_start" not in item.loops[0].scope]

  @functools.cached_property
  def prompt(self) -> list[Item]:
    """What runs in the loops over passes over the prompt."""
    return [item for item in self.module.items if item.loops and "_start" in item.loops[0].scope]

  @property
  def round(self) -> Cost:
    return cost([item for item in self.in_round if not item.optional], 1)

  @property
  def filters(self) -> Cost:
    """Top-k, top-p and argmax."""
    return cost([item for item in self.in_round if item.optional], 1)

  @property
  def draft(self) -> Cost:
    return cost([item for item in self.in_round if not item.optional and _part(item) == "draft"], 1)

  @property
  def target(self) -> Cost:
    return cost([item for item in self.in_round if not item.optional and _part(item) == "target"], 1)

  def large(self, least: int) -> list[Item]:
    """What a round or a call makes anew of at least so many bytes at once: copies of weights or of a cache, if any.

    Left out are weights that are fetched into on-chip memory as they are, ahead of their use, empty caches, and the
    passes over the prompt, whose activations are as large.
    """
    expected = ("copy-start", "slice-start", "custom-call", "broadcast")
    items = [item for item in self.module.items if not item.loops or "_start" not in item.loops[0].scope]
    return [item for item in items if item.made >= least and item.instruction.opcode not in expected]

  def gathers(self, vocab_size: int) -> list[Item]:
    """All-gathers in a round of as many numbers as a vocabulary, or more: laws, weights or caches."""
    gathers = [item for item in self.in_round if item.collective == "all-gather"]
    return [item for item in gathers if max(math.prod(s.dims) for s in item.instruction.outputs) >= vocab_size]


def _part(item: Item) -> str:
  found = re.findall(r"(?:^|/)(draft|target|verify|commit)(?:/|$)", item.scope)
  return found[0] if found else ""


def compile_sample(
  target: LanguageModel,
  drafter: Any,
  *,
  prompt_tokens: int,
  max_new_tokens: int,
  num_draft_tokens: int,
  max_length: int,
  batch: int = 1,
  verifier: Any = "token",
) -> Program:
  """Compiles `specjax.sample`, the prompt's passes and the loop over rounds, for the devices that the models lie on.

  target, drafter: of shapes, placed by `specjax.sharding.shard` on a mesh of `devices(...)`.
  Raises DoesNotFit if the program needs more memory than the devices have.
  """
  if target.placement is None:
    raise ValueError("target lies on no mesh: place it with specjax.sharding.shard.")
  mesh = target.placement.mesh
  whole = jax.NamedSharding(mesh, jax.P())
  array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)  # noqa: E731
  key = jax.eval_shape(lambda: jax.random.key(0))
  settings: Any = [array((batch,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
  warp = specjax.Warp(*settings)

  def program(target: Any, drafter: Any, prompts: Any, lengths: Any, key: Any, warp: Any) -> specjax.SampleResult:
    return specjax.sample(
      target,
      drafter,
      prompts,
      key=key,
      prompt_lengths=lengths,
      max_new_tokens=max_new_tokens,
      num_draft_tokens=num_draft_tokens,
      warp=warp,
      verifier=verifier,
      max_length=max_length,
    )

  drafter = drafter if num_draft_tokens else None
  prompts, lengths = array((batch, prompt_tokens), jnp.int32), array((batch,), jnp.int32)
  lowered = jax.jit(program).lower(target, drafter, prompts, lengths, key, warp)
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if sizes := parse_refusal(str(error)):
      raise DoesNotFit(*sizes) from None
    raise
  caches = [_bytes(jax.eval_shape(functools.partial(empty_cache, target, batch, max_length)), target)]
  if isinstance(model := getattr(drafter, "model", None), LanguageModel):
    caches.append(_bytes(jax.eval_shape(functools.partial(empty_cache, model, batch, max_length)), model))
  params = sum(_shard(leaf) for leaf in jax.tree.leaves((target.params, getattr(model, "params", ()))))
  found: Any = compiled.memory_analysis()
  program_size = found.output_size_in_bytes + found.generated_code_size_in_bytes
  memory = Memory(
    params=params,
    padding=found.argument_size_in_bytes - params,
    caches=sum(caches),
    temporaries=max(found.temp_size_in_bytes - sum(caches), 0),
    program=program_size,
    total=found.argument_size_in_bytes + found.temp_size_in_bytes + program_size,
  )
  return Program(memory, Module(compiled.as_text() or ""))


def _shard(leaf: Any) -> int:
  """Bytes of an array on each device."""
  return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _bytes(cache: Any, model: LanguageModel) -> int:
  """Bytes of a cache on each device."""
  assert model.placement is not None
  mesh = model.placement.mesh

  def placed(leaf: Any, spec: jax.sharding.PartitionSpec) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

  return sum(map(_shard, jax.tree.leaves(jax.tree.map(placed, cache, cache_specs(model, cache)))))


def parse_refusal(message: str) -> tuple[float, float] | None:
  """Bytes needed and available, of a compiler that ran out of HBM; None of any other error."""
  unit = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
  size = r"([\d.]+)([KMGT])"
  for pattern in (rf"Used {size} of {size} hbm", rf"\({size}\) exceeds available HBM \({size}\)"):
    if found := re.search(pattern, message):
      return float(found[1]) * unit[found[2]], float(found[3]) * unit[found[4]]
  return None
