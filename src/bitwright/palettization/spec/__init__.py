"""Specs of palettization and what they are made of: granularities and training strategies."""

from __future__ import annotations

from .granularity import PalettizationGranularity, PerGroupedChannelGranularity, PerTensorGranularity
from .soft_assignment import DKMTrainingSpec
from .spec import PalettizationSpec, default_weight_palettization_spec
from .straight_through import STETrainingSpec
from .training_strategy import DefaultTrainingSpec, TrainingStrategy, TrainingStrategySpec

# The names that coreai-opt gives these after 0.3.
TrainingStrategyConfig = TrainingStrategySpec
DefaultTrainingConfig = DefaultTrainingSpec

__all__ = [
    "DKMTrainingSpec",
    "DefaultTrainingConfig",
    "DefaultTrainingSpec",
    "PalettizationGranularity",
    "PalettizationSpec",
    "PerGroupedChannelGranularity",
    "PerTensorGranularity",
    "STETrainingSpec",
    "TrainingStrategy",
    "TrainingStrategyConfig",
    "TrainingStrategySpec",
    "default_weight_palettization_spec",
]
