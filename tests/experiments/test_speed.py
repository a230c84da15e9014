"""The speed experiment's arithmetic on figures made up to be easy."""

import numpy as np

from configs import speed as defaults
from experiments import speed


def timing(seconds: float) -> dict:
  """Three turns, of a machine that is twice as slow in the second: ratios must not mix turns."""
  return {"median": seconds, "seconds": (seconds, 2 * seconds, seconds)}


def test_ratios_are_of_what_they_say():
  config = defaults.get_config()
  passes = {
    f"{kind}/{slots}": timing(8 * ms)
    for kind, ms in (("decode", 0.02), ("verify", 0.03))
    for slots in (1024, 2048, 4096)
  }
  passes |= {"decode/8192": timing(8 * 0.022), "verify/8192": timing(8 * 0.036), "decode/8192 full": timing(8 * 0.05)}
  bytes_read = 4 * speed.READ_FLOATS
  times = {"read/sum": 2.0, "read/product": 1.0, "propose": 8 * 0.001}
  times |= {"plain/16": 1.0, "plain/64": 1.0 + 48 * 0.025}
  times |= {"ngram/16": 1.0, "ngram/64": 1.0 + 40 * 0.031, "model/16": 1.0, "model/64": 1.0 + 12 * 0.09}
  times |= {f"pass/{width}": 8 * s for width, s in ((1, 0.02), (2, 0.022), (4, 0.025), (8, 0.03))}
  counts = {"plain/16": 16, "plain/64": 64, "ngram/16": 10, "ngram/64": 50, "model/16": 4, "model/64": 16}
  rounds = {"timings": {name: timing(seconds) for name, seconds in times.items()}, "rounds": counts}
  traces = {"first_call": 2, "20_calls": 2, "compile_s": {}}
  # Weights that the faster reader reads in 20 ms.
  summary = speed._summary(passes, rounds, traces, bytes_read // 50, config)
  close = np.testing.assert_allclose
  close(summary["floor_ms"], 20, rtol=1e-6)
  close(summary["plain_ms_a_token"], 25)
  close(summary["plain_share_of_floor"], 0.8, rtol=1e-6)
  close(summary["v"], 1.5)
  close(summary["round_over_its_passes"]["plain"], 25 / 20)
  close(summary["round_over_its_passes"]["ngram"], 31 / (1 + 30))
  close(summary["round_over_its_passes"]["model"], 90 / (22 + 2 * 20 + 25))
  close(list(summary["decode_over_smallest_cache"].values()), [1, 1, 1, 1.1])
  close(list(summary["verify_over_smallest_cache"].values()), [1, 1, 1, 1.2])
  close(summary["decode_ms_full_cache"], 50)
