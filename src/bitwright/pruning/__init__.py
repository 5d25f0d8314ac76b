"""Pruning: setting unimportant weights to zero."""

from __future__ import annotations

from .channel_removal import ShrinkReport, shrink
from .config import MagnitudePrunerConfig, ModuleMagnitudePrunerConfig
from .magnitude_pruner import MagnitudePruner
from .spec import PruningSpec

__all__ = [
    "MagnitudePruner",
    "MagnitudePrunerConfig",
    "ModuleMagnitudePrunerConfig",
    "PruningSpec",
    "ShrinkReport",
    "shrink",
]
