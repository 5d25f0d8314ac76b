"""See what a model is, and what compression did to it."""

from __future__ import annotations

from .applying import AppliedConfig, apply_configs, plan_config
from .bits import BitsPerWeightResult, bits_per_weight
from .diagnostics import DamageError, DamageWarning, Diagnostic, Finding, diagnostics, explain
from .fidelity import compare
from .guard import GuardResult, guard
from .inspector import ModelInspector
from .metrics import ErrorMetrics, Histogram
from .packing import artifact_of
from .report import ActivationFidelity, EndToEnd, FidelityReport, LayerFidelity, WeightFidelity
from .sensitivity import SweepEntry, SweepResult, sweep
from .types import BoundaryEdge, InputEdge, ModelSummary, ModuleContext, ModuleInfo, OpInfo, SourceFrame

__all__ = [
    "ActivationFidelity",
    "AppliedConfig",
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
    "SweepEntry",
    "SweepResult",
    "WeightFidelity",
    "apply_configs",
    "artifact_of",
    "bits_per_weight",
    "compare",
    "diagnostics",
    "explain",
    "guard",
    "plan_config",
    "sweep",
]
