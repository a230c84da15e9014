"""Drafters."""

from specjax.draft.base import Context, Drafter, Proposal
from specjax.draft.model import ModelDrafter
from specjax.draft.ngram import NGramDrafter

__all__ = ["Context", "Drafter", "ModelDrafter", "NGramDrafter", "Proposal"]
