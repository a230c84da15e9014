"""Makes jax strict before any test module is imported: a reused key, a silent broadcast over ranks or a silent dtype
promotion is an error in tests."""

import pathlib

import jax
import pytest

jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

_MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def _room_for_programs():
  """Drops compiled programs before Linux runs out of memory maps (65,530 a process; a program takes some hundred)."""
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 30_000:
    jax.clear_caches()
