"""ExecuTorch: a ``.pte`` file whose quantized layers run in XNNPACK."""

from __future__ import annotations

from .exporter import check_executorch_operators, export_executorch
from .runtime import run_executorch
from .weights import stays_int8

__all__ = ["check_executorch_operators", "export_executorch", "run_executorch", "stays_int8"]
