"""Writing into a cache, in every form: one row after the other, all at once, parts of rows side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax.models import ops


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("platform", ["tpu", "default"])
@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (8, 1), (8, 4), (12, 1), (24, 2), (6, 4)])
def test_every_row_is_written_where_it_stands(rows, parts, platform, stacked, monkeypatch) -> None:
  monkeypatch.setattr(lax, "platform_dependent", lambda *args, **forms: forms[platform](*args))
  random, layers, slots, width = np.random.default_rng(rows), 3, 9, 2
  shape = ((layers,) if stacked else ()) + (rows, 2, slots, 4)
  cache = random.normal(size=shape).astype(np.float32)
  new = random.normal(size=(rows, 2, width, 4)).astype(np.float32)
  start = random.integers(0, slots - width + 1, rows).astype(np.int32)
  expected = cache.copy()
  for row, at in enumerate(start):
    (expected[1] if stacked else expected)[row, :, at : at + width] = new[row]
  options = ops.Options(scan_layers=stacked, cpu_kernels=False, row_parts=parts)
  write = jax.jit(lambda cache, new, at: ops.write(cache, new, at, options, jnp.int32(1) if stacked else None))
  np.testing.assert_array_equal(write(cache, new, start), expected)
