"""The same tokens through different computation graphs: what each does to the logits, and that to the text."""

from specjax.numerics.comparison import Comparison, Interval, Summary, compare
from specjax.numerics.divergence import (
  Curve,
  Shared,
  first_difference,
  flip_probability,
  measured,
  predicted,
  shared_noise,
)
from specjax.numerics.explanation import Evidence, Explanation, explain, judge
from specjax.numerics.graphs import REFERENCE, Graph, logits, unavailable
from specjax.numerics.measure import Measurement
from specjax.numerics.runs import Run, replay
from specjax.numerics.same import Identical

__all__ = [
  "REFERENCE",
  "Comparison",
  "Curve",
  "Evidence",
  "Explanation",
  "Graph",
  "Identical",
  "Interval",
  "Measurement",
  "Run",
  "Shared",
  "Summary",
  "compare",
  "explain",
  "first_difference",
  "flip_probability",
  "judge",
  "logits",
  "measured",
  "predicted",
  "replay",
  "shared_noise",
  "unavailable",
]
