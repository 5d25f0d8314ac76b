"""See what a model is, and what compression did to it."""

from __future__ import annotations

from .inspector import ModelInspector
from .types import BoundaryEdge, InputEdge, ModelSummary, ModuleContext, ModuleInfo, OpInfo, SourceFrame

__all__ = [
    "BoundaryEdge",
    "InputEdge",
    "ModelInspector",
    "ModelSummary",
    "ModuleContext",
    "ModuleInfo",
    "OpInfo",
    "SourceFrame",
]
