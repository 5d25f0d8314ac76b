"""See what a model is, and what compression did to it."""

from __future__ import annotations

from .bits import BitsPerWeightResult, bits_per_weight
from .inspector import ModelInspector
from .types import BoundaryEdge, InputEdge, ModelSummary, ModuleContext, ModuleInfo, OpInfo, SourceFrame

__all__ = [
    "BitsPerWeightResult",
    "bits_per_weight",
    "BoundaryEdge",
    "InputEdge",
    "ModelInspector",
    "ModelSummary",
    "ModuleContext",
    "ModuleInfo",
    "OpInfo",
    "SourceFrame",
]
