"""What a compiled program does, from its text: loops, collectives, traffic of HBM, floating point operations.

XLA's own `cost_analysis` counts the body of a loop once, whatever the number of its turns; here every instruction comes
with the loops it is in. Bytes are those of buffers in HBM (an array that the compiler keeps in on-chip memory costs
none) and of what is read of them: a slice of a stacked weight counts as that slice, an update in place as the update.
Padding to tiles is left out.

It reads the text of `jax.stages.Compiled.as_text()`, for any backend, and compiles nothing.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "reduce-scatter")

_BITS = {"pred": 8, "bf16": 16, "token": 0}
_FREE = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
  "opt-barrier", "optimization-barrier",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Shape:
  """One array: dtype, dimensions, and the memory that it is in (0 is HBM)."""

  dtype: str
  dims: tuple[int, ...]
  space: int

  @property
  def bytes(self) -> int:
    bits = _BITS.get(self.dtype)
    if bits is None:
      bits = int(re.findall(r"\d+", self.dtype)[0])  # f32, s8, u4, f8e4m3fn
    return math.prod(self.dims) * bits // 8

  @property
  def hbm(self) -> int:
    """Its bytes if it is in HBM, else 0."""
    return 0 if self.space else self.bytes


@dataclasses.dataclass(frozen=True)
class Instruction:
  """outputs: the arrays of its value, a tuple's one by one."""

  name: str
  opcode: str
  outputs: tuple[Shape, ...]
  operands: tuple[str, ...]
  attributes: str
  root: bool

  @property
  def scope(self) -> str:
    """The names of the functions and scopes that it was traced in."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found[1] if found else ""

  def called(self, *names: str) -> list[str]:
    """Computations that it names under these attributes."""
    found = re.findall(rf"\b(?:{'|'.join(names)})=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
    return [name for group in found for name in re.findall(r"%([\w.\-]+)", group)]


@dataclasses.dataclass(frozen=True)
class Loop:
  """trips: how often its body runs; None where that depends on the data."""

  name: str
  scope: str
  trips: int | None
  carried: tuple[Shape, ...]


@dataclasses.dataclass(frozen=True)
class Item:
  """One instruction where it runs.

  loops: from the outermost to the innermost; optional: in a branch that may not be taken.
  hbm: bytes read from and written to HBM; flops: of its matrix products.
  made: bytes of its largest new array, in any memory; an update in place counts as the update.
  """

  instruction: Instruction
  loops: tuple[Loop, ...]
  optional: bool
  scope: str
  hbm: int
  made: int
  flops: int

  @property
  def collective(self) -> str | None:
    opcode = self.instruction.opcode.removesuffix("-start")
    return opcode if opcode in COLLECTIVES and self.devices > 1 else None

  @property
  def cycles(self) -> int:
    """The TPU compiler's estimate, by which it chooses among forms; 0 where it gives none, as for collectives."""
    found = re.search(r'"estimated_cycles":"(\d+)"', self.instruction.attributes)
    return int(found[1]) if found else 0

  @property
  def payload(self) -> int:
    """Bytes of a collective's result on each device."""
    outputs = self.instruction.outputs
    if self.instruction.opcode in ("all-gather-start", "collective-permute-start"):
      outputs = outputs[1:2]
    return sum(shape.bytes for shape in outputs)

  @property
  def devices(self) -> int:
    """How many devices take part in one group of a collective."""
    return group_size(self.instruction.attributes)

  def runs(self, within: int = 0) -> int:
    """How often it runs in one turn of loop number `within` - 1; loops whose trips depend on the data count once."""
    return math.prod(loop.trips or 1 for loop in self.loops[within:])


class Module:
  """computations: name -> instructions; entry: the name of the first one."""

  def __init__(self, text: str):
    self.computations: dict[str, list[Instruction]] = {}
    self.entry = ""
    current: list[Instruction] | None = None
    for line in text.splitlines():
      if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
        current = self.computations.setdefault(header[2], [])
        self.entry = header[2] if header[1] else self.entry
      elif line.startswith("}"):
        current = None
      elif current is not None and (instruction := _instruction(line)):
        current.append(instruction)
    if not self.entry:
      raise ValueError("this is no text of a compiled program: it has no ENTRY computation.")

  @functools.cached_property
  def items(self) -> list[Item]:
    """Every instruction that moves or computes something, as scheduled; bodies are where they are called."""
    return list(self._walk(self.entry, (), False, ""))

  def _walk(self, name: str, loops: tuple[Loop, ...], optional: bool, scope: str) -> Iterator[Item]:
    shapes = self._shapes(name)
    for instruction in self.computations[name]:
      own = instruction.scope if "/" in instruction.scope else scope
      if instruction.opcode == "while":
        (body,), (condition,) = instruction.called("body"), instruction.called("condition")
        loop = Loop(instruction.name, own, self.trips(instruction, condition), instruction.outputs)
        yield from self._walk(body, (*loops, loop), optional, own)
      elif instruction.opcode == "conditional":
        for branch in instruction.called("branch_computations", "true_computation", "false_computation"):
          yield from self._walk(branch, loops, True, own)
      elif instruction.opcode in ("call", "async-start"):
        for called in instruction.called("to_apply", "calls", "called_computation"):
          yield from self._walk(called, loops, optional, own)
      elif instruction.opcode not in _FREE and not instruction.opcode.endswith("-done"):
        hbm, made = self._hbm(instruction, shapes), max(self._made(instruction, shapes), default=0)
        yield Item(instruction, loops, optional, own, hbm, made, self._flops(instruction, name))

  @functools.cache  # noqa: B019 # modules are few, and live as long as their program is looked at
  def _shapes(self, name: str) -> dict[str, tuple[Shape, ...]]:
    return {instruction.name: instruction.outputs for instruction in self.computations[name]}

  def trips(self, loop: Instruction, condition: str) -> int | None:
    """How often a loop runs: what XLA says, or the constant that a counter from 0 is compared with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
      return int(known[1])
    instructions = {instruction.name: instruction for instruction in self.computations[condition]}
    root = next(instruction for instruction in instructions.values() if instruction.root)
    if root.opcode == "fusion":
      (fused,) = root.called("calls")
      inner = self.computations[fused]
      constants = [instructions[name] for name in root.operands if instructions[name].opcode == "constant"]
      compare = next((each for each in inner if each.root), root)
      constants += [each for each in inner if each.opcode == "constant"]
    else:
      compare = root
      constants = [instructions[name] for name in root.operands if instructions[name].opcode == "constant"]
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes or len(constants) != 1:
      return None
    value = re.match(r"(\d+)\)", constants[0].attributes)
    return int(value[1]) if value else None

  def _hbm(self, instruction: Instruction, shapes: Mapping[str, tuple[Shape, ...]]) -> int:
    """Bytes read from HBM and written to it."""
    opcode, given = instruction.opcode, [shapes[name] for name in instruction.operands if name in shapes]
    if opcode in ("copy-start", "slice-start"):  # (one array, the other, context): a slice reads what it makes
      size = min(shape.bytes for shape in instruction.outputs[:2])
      return sum(size for shape in instruction.outputs[:2] if not shape.space)
    made = zip(instruction.outputs, self._made(instruction, shapes), strict=True)
    written = sum(size for shape, size in made if not shape.space)
    if opcode == "fusion":
      (fused,) = instruction.called("calls")
      return written + sum(self._read(fused, i, sum(s.hbm for s in operand)) for i, operand in enumerate(given))
    if opcode == "dynamic-update-slice":
      return written + given[1][0].hbm
    if opcode in _SLICES:
      return written + sum(shape.bytes for shape in instruction.outputs if not given[0][0].space)
    return written + sum(shape.hbm for operand in given for shape in operand)

  def _made(self, instruction: Instruction, shapes: Mapping[str, tuple[Shape, ...]]) -> list[int]:
    """Bytes of each array that it returns, as far as they are new."""
    if instruction.opcode == "dynamic-update-slice":
      return [shapes[instruction.operands[1]][0].bytes]
    updates: list[int | None] = [None] * len(instruction.outputs)
    if instruction.opcode == "fusion":
      updates = self._results(instruction.called("calls")[0])
    return [s.bytes if update is None else update for s, update in zip(instruction.outputs, updates, strict=True)]

  @functools.cache  # noqa: B019 # modules are few, and live as long as their program is looked at
  def _bodies(self, fused: str) -> tuple[list[Instruction], dict[str, Instruction]]:
    """A fused computation, and for each name in it the instruction that makes that array, behind bitcasts."""
    body = self.computations[fused]
    by_name = {instruction.name: instruction for instruction in body}

    def source(instruction: Instruction) -> Instruction:
      while instruction.opcode == "bitcast":
        instruction = by_name[instruction.operands[0]]
      return instruction

    return body, {instruction.name: source(instruction) for instruction in body}

  def _read(self, fused: str, number: int, whole: int) -> int:
    """Bytes that a fused computation reads of parameter `number`, which has `whole`."""
    body, source = self._bodies(fused)
    parameter = next(each for each in body if each.opcode == "parameter" and each.attributes.startswith(f"{number})"))
    read = 0
    for user in body:
      for i, name in enumerate(user.operands):
        if user.opcode == "bitcast" or source[name] is not parameter:
          continue
        if i == 0 and user.opcode in _SLICES:
          read += sum(shape.bytes for shape in user.outputs)
        elif user.opcode == "fusion":
          read += self._read(user.called("calls")[0], i, whole)
        elif not (i == 0 and user.opcode == "dynamic-update-slice"):
          return whole
    return min(read, whole)

  def _results(self, fused: str) -> list[int | None]:
    """For each array that a fused computation returns: the bytes of an update in place, or None if it is all new."""
    body, source = self._bodies(fused)
    root = source[next(each.name for each in body if each.root)]
    results: list[int | None] = []
    for result in [source[name] for name in root.operands] if root.opcode == "tuple" else [root]:
      if result.opcode == "fusion" and len(result.outputs) == 1:
        results += self._results(result.called("calls")[0])
      elif result.opcode == "dynamic-update-slice":
        results.append(source[result.operands[1]].outputs[0].bytes)
      else:
        results += [None] * len(result.outputs)
    return results

  def _flops(self, instruction: Instruction, computation: str) -> int:
    if instruction.opcode == "fusion":
      (fused,) = instruction.called("calls")
      return sum(self._flops(each, fused) for each in self.computations[fused])
    if instruction.opcode not in ("dot", "convolution", "reduce"):
      return 0
    source = self._bodies(computation)[1]
    if instruction.opcode == "reduce":  # of products: how a TPU multiplies a single row
      factors = source[instruction.operands[0]]
      while factors.opcode == "convert":
        factors = source[factors.operands[0]]
      return 2 * math.prod(factors.outputs[0].dims) if factors.opcode == "multiply" else 0
    left, right = (self._shapes(computation)[name][0].dims for name in instruction.operands[:2])
    if instruction.opcode == "dot":
      found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
      contracted = math.prod(left[int(i)] for i in found[1].split(",") if i) if found else 1
    else:  # the form that products take on a TPU; spatial dimensions are those of a batch
      labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
      contracted = right[labels[1].index("i")] if labels else 1
    return 2 * math.prod(instruction.outputs[0].dims) * contracted


def group_size(attributes: str) -> int:
  """Devices in one group of a collective; 2 where the text does not say."""
  if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
  if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
    return listed[1].count(",") + 1
  if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
    return int(tiled[1])
  return 2


def _instruction(line: str) -> Instruction | None:
  found = re.match(r"\s*(ROOT )?%?([\w.\-]+) = (.*)$", line)
  if not found:
    return None
  rest = found[3]
  end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
  call = re.match(r"\s*([\w\-]+)\(", rest[end:])
  if not call:
    return None
  begin = end + call.end()
  close = _closing(rest, begin - 1)
  inside = rest[begin:close]
  # Constants and parameters have their value where others have operands.
  plain = call[1] in ("constant", "parameter", "iota")
  operands = () if plain else tuple(re.findall(r"%([\w.\-]+)", inside))
  attributes = f"{inside}){rest[close + 1 :]}" if plain else rest[close + 1 :]
  return Instruction(found[2], call[1], _arrays(rest[:end]), operands, attributes, bool(found[1]))


def _closing(text: str, begin: int) -> int:
  """Where the parenthesis that opens at `begin` closes."""
  depth = 0
  for i in range(begin, len(text)):
    depth += {"(": 1, ")": -1}.get(text[i], 0)
    if depth == 0:
      return i
  raise ValueError(f"an instruction without its end: {text[:80]}")


def _arrays(text: str) -> tuple[Shape, ...]:
  found = re.findall(r"([a-z][a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?", text)
  return tuple(
    Shape(dtype, tuple(int(n) for n in dims.split(",") if n), int((re.findall(r"S\((\d+)\)", layout) or [0])[0]))
    for dtype, dims, layout in found
  )
