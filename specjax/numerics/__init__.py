"""The same tokens through different computation graphs: what each does to the logits, and that to the text."""

from specjax.numerics.graphs import REFERENCE, Graph, logits, unavailable

__all__ = ["REFERENCE", "Graph", "logits", "unavailable"]
