"""Finished models in the formats of their targets; one module per target, each reading the artifact's tensors."""

from __future__ import annotations

from .eager import finalize_eager
from .extras import MissingExtraError
from .graph import finalize_graph

__all__ = ["MissingExtraError", "finalize_eager", "finalize_graph"]
