"""See what a model is, and what compression did to it."""

from __future__ import annotations

from .bits import BitsPerWeightResult, bits_per_weight
from .fidelity import compare
from .inspector import ModelInspector
from .metrics import ErrorMetrics, Histogram
from .report import ActivationFidelity, EndToEnd, FidelityReport, LayerFidelity, WeightFidelity
from .types import BoundaryEdge, InputEdge, ModelSummary, ModuleContext, ModuleInfo, OpInfo, SourceFrame

__all__ = [
    "ActivationFidelity",
    "BitsPerWeightResult",
    "BoundaryEdge",
    "EndToEnd",
    "ErrorMetrics",
    "FidelityReport",
    "Histogram",
    "InputEdge",
    "LayerFidelity",
    "ModelInspector",
    "ModelSummary",
    "ModuleContext",
    "ModuleInfo",
    "OpInfo",
    "SourceFrame",
    "WeightFidelity",
    "bits_per_weight",
    "compare",
]
