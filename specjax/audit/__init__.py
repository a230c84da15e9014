"""Is what an engine sampled the target's law? Tests of real samples, and proof by enumeration on tiny languages."""

from specjax.audit.battery import RuleReport, check_rule
from specjax.audit.core import NOISE, Noise, Stream, audit, drift
from specjax.audit.report import Report
from specjax.audit.samples import Samples
from specjax.audit.two_sample import TwoSample, two_sample

__all__ = [
  "NOISE",
  "Noise",
  "Report",
  "RuleReport",
  "Samples",
  "Stream",
  "TwoSample",
  "audit",
  "check_rule",
  "drift",
  "two_sample",
]
