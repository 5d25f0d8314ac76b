"""Pruning of the weights of a converted program."""

from __future__ import annotations

from bitwright.coreai_utils._sparsify import sparsify_weights

__all__ = ["sparsify_weights"]
