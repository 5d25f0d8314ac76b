"""Errors of pruning specs."""

from __future__ import annotations

__all__: list[str] = []


class _BlockSizeMismatchError(ValueError):
    """Blocks or groups of a scheme do not divide the tensor."""
