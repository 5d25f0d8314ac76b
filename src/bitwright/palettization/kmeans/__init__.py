"""Palettization by k-means."""

from __future__ import annotations

from .palettizer import KMeansPalettizer
from .sensitivity import CalibrationHelper, SensitivityStatistics

__all__ = ["CalibrationHelper", "KMeansPalettizer", "SensitivityStatistics"]
