"""Palettization: weights as indices into small tables."""

from __future__ import annotations

from .config import KMeansPalettizerConfig, ModuleKMeansPalettizerConfig
from .kmeans import KMeansPalettizer
from .spec import PalettizationSpec

__all__ = ["KMeansPalettizer", "KMeansPalettizerConfig", "ModuleKMeansPalettizerConfig", "PalettizationSpec"]
