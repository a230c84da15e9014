"""An experiment in several processes, one a machine: who is here, do all agree, and who writes.

jax.distributed does the work. A launch script says in the environment that there are others:

  SPECJAX_PROCESSES   their number, or "auto" where jax finds it out (TPU VMs, GKE, Slurm); absent: one process
  SPECJAX_PROCESS     the number of this one, from 0; not with "auto"
  SPECJAX_HEARTBEAT   seconds without a sign of life after which a process is taken for dead (default 100)

and JAX_COORDINATOR_ADDRESS names the host and port of process 0, unless "auto". Every process runs the whole
experiment; process 0 writes what there is to write. This module starts no processes and knows no experiment.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def join(environment: Mapping[str, str] | None = None) -> None:
  """Joins the other processes, if there are any. To be called before anything asks jax for a device.

  Raises ValueError for an environment that can't be, and RuntimeError if the others are not there in time.
  """
  environment = os.environ if environment is None else environment
  count = environment.get("SPECJAX_PROCESSES")
  if not count:
    return
  _initialize(count, environment)
  # Collectives on CPUs report every connection on stdout, which is for results: theirs becomes stderr.
  sys.stdout.flush()
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)


def _initialize(count: str, environment: Mapping[str, str]) -> None:
  heartbeat = _number(environment, "SPECJAX_HEARTBEAT", 1, default="100")
  # That service takes SIGTERM for a warning and lets the process run on: Ctrl-C of a launch script would end nothing.
  jax.config.update("jax_enable_preemption_service", False)
  if count == "auto":
    jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat)
    return
  number = _number(environment, "SPECJAX_PROCESSES", 1)
  process = _number(environment, "SPECJAX_PROCESS", 0)
  if process >= number:
    raise ValueError(f"SPECJAX_PROCESS={process} must be 0 to {number - 1}: SPECJAX_PROCESSES={number}.")
  address = environment.get("JAX_COORDINATOR_ADDRESS", "")
  if not address.rpartition(":")[0]:
    raise ValueError(f"JAX_COORDINATOR_ADDRESS={address!r} must be the host:port of process 0.")
  jax.distributed.initialize(
    address, number, process, cluster_detection_method="deactivate", heartbeat_timeout_seconds=heartbeat
  )


def _number(environment: Mapping[str, str], name: str, least: int, default: str | None = None) -> int:
  value = environment.get(name, default)
  if value is None or not value.isdecimal() or int(value) < least:
    raise ValueError(f"{name}={value!r} must be a whole number, {least} or more.")
  return int(value)


def several() -> bool:
  return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
  """Whether this is the process that writes files and prints."""
  return not several() or jax.process_index() == 0


def share(value: Any) -> Any:
  """The value that process 0 gave; all processes call it, at the same point. value: what JSON can hold."""
  return gather(value)[0] if several() else value


def gather(value: Any) -> list[Any]:
  """What each process gave, in their order; all call it, at the same point. value: what JSON can hold."""
  if not several():
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  lengths = multihost_utils.process_allgather(np.int32(len(text)))
  padded = np.zeros(lengths.max(), np.uint8)
  padded[: len(text)] = text
  rows = multihost_utils.process_allgather(padded)
  return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]


def whole(array: Any) -> np.ndarray:
  """All of an array that may be split over the devices of several processes; all call it, at the same point.

  An array that lies on this process's devices alone is whole already.
  """
  if several() and not array.is_fully_addressable:
    return multihost_utils.process_allgather(array, tiled=True)
  return np.asarray(array)


def require_same(what: str, value: Mapping[str, Any]) -> None:
  """Raises ValueError, in every process, unless all have given the same; names the first processes' differences."""
  values = [_flat(each) for each in gather(value)]
  for process, other in enumerate(values):
    differ = sorted(key for key in values[0].keys() | other.keys() if values[0].get(key) != other.get(key))
    if differ:
      shown = ", ".join(f"{key}: {values[0].get(key)!r} and {other.get(key)!r}" for key in differ)
      raise ValueError(
        f"{what} must be the same in every process, but processes 0 and {process} differ in {shown}. Start all of them "
        "with the same flags, from the same commit."
      )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
  """Nested mappings as one, with dotted names."""
  if not isinstance(value, Mapping):
    return {prefix: value}
  return {
    name: leaf for key, inner in value.items() for name, leaf in _flat(inner, f"{prefix}.{key}".lstrip(".")).items()
  }
