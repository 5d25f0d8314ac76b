"""Where and how a model is palettized."""

from __future__ import annotations

from .palettization_config import KMeansPalettizerConfig, ModuleKMeansPalettizerConfig, OpKMeansPalettizerConfig
from .pat_schedule import PATSchedule
from .vector_kmeans import VectorKMeansConfig

__all__ = [
    "KMeansPalettizerConfig",
    "ModuleKMeansPalettizerConfig",
    "OpKMeansPalettizerConfig",
    "PATSchedule",
    "VectorKMeansConfig",
]
