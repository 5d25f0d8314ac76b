"""Errors of the quantization specs."""

from __future__ import annotations

__all__: list[str] = []


class _BlockSizeMismatchError(ValueError):
    """A block does not divide the dimension it lies on; a simulator tolerates this by switching itself off."""
