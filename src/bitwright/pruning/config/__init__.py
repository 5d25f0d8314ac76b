"""Where and how a model is pruned."""

from __future__ import annotations

from .magnitude_pruner_config import MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, OpMagnitudePrunerConfig
from .sparsity_schedule import (
    ConstantSparsitySchedule,
    CosineDecaySchedule,
    PolynomialDecaySchedule,
    SparsityScheduleBase,
)

__all__ = [
    "ConstantSparsitySchedule",
    "CosineDecaySchedule",
    "MagnitudePrunerConfig",
    "ModuleMagnitudePrunerConfig",
    "OpMagnitudePrunerConfig",
    "PolynomialDecaySchedule",
    "SparsityScheduleBase",
]
