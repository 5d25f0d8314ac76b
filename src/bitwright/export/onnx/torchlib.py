"""What translations to ONNX are made of: ONNX's operators, and torch's own translations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bitwright.export.extras import require

__all__ = ["operators", "torchs_translation"]


def operators() -> Any:
    """Return the operators of opset 18, which a translation calls to record them."""
    return require("onnxscript", "onnx", "Export to ONNX").opset18


def torchs_translation(op: Any, opset: int | None) -> Callable[..., Any]:
    """Return torch's translation of an operator for a version of the operator set.

    Args:
        op: an overload of one of PyTorch's operators.
        opset: version of the operator set; None for torch's choice.
    """
    found: Callable[..., Any] = _registry(opset).get_decomps(op)[0].onnx_function
    return found


@functools.cache
def _registry(opset: int | None) -> Any:
    registry: Any = require("torch.onnx._internal.exporter._registration", "onnx", "Export to ONNX").ONNXRegistry
    return registry.from_torchlib() if opset is None else registry.from_torchlib(opset)
