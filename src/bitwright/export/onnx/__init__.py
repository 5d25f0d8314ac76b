"""ONNX: quantize and dequantize nodes on integer initializers, run by ONNX Runtime and many others."""

from __future__ import annotations

from .comparison import CodeComparison, CodeReport, compare_codes
from .exporter import export_onnx
from .runtime import run_onnx

__all__ = ["CodeComparison", "CodeReport", "compare_codes", "export_onnx", "run_onnx"]
