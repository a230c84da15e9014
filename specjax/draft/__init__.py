"""Drafters."""

from specjax.draft.base import Context, Drafter, Proposal
from specjax.draft.model import ModelDrafter
from specjax.draft.ngram import NGramDrafter
from specjax.draft.none import NoDrafter

__all__ = ["Context", "Drafter", "ModelDrafter", "NGramDrafter", "NoDrafter", "Proposal"]
