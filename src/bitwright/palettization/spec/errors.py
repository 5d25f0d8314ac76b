"""Errors of palettization: what does not fit a weight's shape."""

from __future__ import annotations

__all__: list[str] = []


class _IncompatibleGranularityError(ValueError):
    """The groups of a granularity do not divide the weight, or it lacks the axis."""


class _IncompatibleClusterDimError(ValueError):
    """Vectors of ``cluster_dim`` entries do not divide dimension 0 of the weight, or of a group."""
