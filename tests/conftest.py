"""Makes jax strict before any test module is imported: a reused key, a silent broadcast over ranks or a silent dtype
promotion is an error in tests."""

import os

import jax

jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_sessionfinish(session):
  """Keeps the exactness suite within its budget of false alarms; every worker has a share of it."""
  from tests import statistics

  workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
  if statistics.made * workers > statistics.MOST:
    raise AssertionError(
      f"{statistics.made} statistical tests in one of {workers} workers: with more than {statistics.MOST} at level "
      f"{statistics.LEVEL} the suite's false alarms pass 1e-6. Merge some, or lower the level."
    )
