"""Decoders, checkpoint readers, tokenizers, and toy languages."""

from specjax.models import tabular

__all__ = ["tabular"]
