"""Faulty samplers, built by composition: what checks and audits of samplers have to find.

Each replaces one part of an `Engine`: the acceptance rule, the models, the state between rounds, the report. No source
text is patched. `specjax.audit.suite` holds the checks.
"""

from specjax.audit.mutants import caches, drafts, figures, keys, rules
from specjax.audit.mutants.base import Mutant

MUTANTS: tuple[Mutant, ...] = (
  *rules.MUTANTS, *drafts.MUTANTS, *keys.MUTANTS, *caches.MUTANTS, *figures.MUTANTS
)  # fmt: skip

__all__ = ["MUTANTS", "Mutant"]
