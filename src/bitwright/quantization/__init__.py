"""Quantization: configurations, specs, and the quantizer that applies them to a model."""

from __future__ import annotations

from .config import ExecutionMode, InvalidExecutionModeError, ModuleQuantizerConfig, QuantizerConfig
from .quantizer import Quantizer
from .spec import QuantizationSpec, fake_quantize, qparams_calculator, range_calculator

__all__ = [
    "ExecutionMode",
    "InvalidExecutionModeError",
    "ModuleQuantizerConfig",
    "QuantizationSpec",
    "Quantizer",
    "QuantizerConfig",
    "fake_quantize",
    "qparams_calculator",
    "range_calculator",
]
