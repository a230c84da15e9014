"""Is what an engine sampled the target's law? Tests of real samples that need no reference samples."""

from specjax.audit.core import NOISE, Noise, audit, drift
from specjax.audit.report import Report
from specjax.audit.samples import Samples
from specjax.audit.two_sample import TwoSample, two_sample

__all__ = ["NOISE", "Noise", "Report", "Samples", "TwoSample", "audit", "drift", "two_sample"]
