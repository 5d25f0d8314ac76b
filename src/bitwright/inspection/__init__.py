"""See what a model is, and what compression did to it."""

from __future__ import annotations

from .bits import BitsPerWeightResult, bits_per_weight
from .diagnostics import DamageError, DamageWarning, Diagnostic, Finding, diagnostics, explain
from .fidelity import compare
from .guard import GuardResult, guard
from .inspector import ModelInspector
from .metrics import ErrorMetrics, Histogram
from .report import ActivationFidelity, EndToEnd, FidelityReport, LayerFidelity, WeightFidelity
from .types import BoundaryEdge, InputEdge, ModelSummary, ModuleContext, ModuleInfo, OpInfo, SourceFrame

__all__ = [
    "ActivationFidelity",
    "BitsPerWeightResult",
    "BoundaryEdge",
    "DamageError",
    "DamageWarning",
    "Diagnostic",
    "EndToEnd",
    "ErrorMetrics",
    "FidelityReport",
    "Finding",
    "GuardResult",
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
    "diagnostics",
    "explain",
    "guard",
]
