"""Specs of pruning and what they are made of: schemes, and algorithms that say what is important."""

from __future__ import annotations

from .prune import PruneImplBase
from .prune import _MagnitudePruneImpl as _MagnitudePruneImpl
from .scheme import BlockStructured, ChannelStructured, NMStructured, PruningScheme, Unstructured
from .spec import PruningSpec, default_weight_pruning_spec

__all__ = [
    "BlockStructured",
    "ChannelStructured",
    "NMStructured",
    "PruneImplBase",
    "PruningScheme",
    "PruningSpec",
    "Unstructured",
    "default_weight_pruning_spec",
]
