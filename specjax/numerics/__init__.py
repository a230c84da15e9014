"""The same tokens through different computation graphs: what each does to the logits, and that to the text."""

from specjax.numerics.comparison import Comparison, Interval, Summary, compare
from specjax.numerics.graphs import REFERENCE, Graph, logits, unavailable
from specjax.numerics.measure import Measurement
from specjax.numerics.same import Identical

__all__ = [
  "REFERENCE",
  "Comparison",
  "Graph",
  "Identical",
  "Interval",
  "Measurement",
  "Summary",
  "compare",
  "logits",
  "unavailable",
]
