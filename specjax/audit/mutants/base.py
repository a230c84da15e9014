"""What a mutant is: a sampler with one planted fault, and what is known about it."""

import dataclasses

from specjax.audit.engine import Engine


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A faulty sampler.

  name: a few words. description: what it does that it must not.
  visible: whether samples could show it: the law of the output differs by more than rounding.
  check: the name, in `specjax.audit.suite.CHECKS`, of a check that catches it.
  """

  name: str
  description: str
  visible: bool
  check: str
  engine: Engine
