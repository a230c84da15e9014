"""Makes jax strict before any test module is imported: a reused key, a silent broadcast over ranks or a silent dtype
promotion is an error in tests."""

import os
import pathlib

import jax
import pytest

jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

_CACHE = {"jax_persistent_cache_min_compile_time_secs": 0.2, "jax_compilation_cache_max_size": 2**29}


def pytest_configure(config: pytest.Config) -> None:
  """Compiled programs are kept in .pytest_cache: compiling is nine tenths of the suite's time, and a second run's none.

  Workers share it, and the processes that tests start. `pytest --cache-clear` empties it.
  """
  if cache := getattr(config, "cache", None):
    folder = str(cache.mkdir("jax"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder  # for processes that tests start
    jax.config.update("jax_compilation_cache_dir", folder)
    for name, value in _CACHE.items():
      os.environ[name.upper()] = str(value)
      jax.config.update(name, value)


_MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def _room_for_programs():
  """Drops compiled programs before Linux runs out of memory maps (65,530 a process; a program takes some hundred)."""
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 30_000:
    jax.clear_caches()
