"""Operators on bools for torch's ONNX exporter, whose own translations no kernel of ONNX Runtime takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bitwright.export.extras import require

from .torchlib import torchs_translation

__all__ = ["WHERE", "add", "where"]

_BOOL = 9
_aten = torch.ops.aten

WHERE = (_aten.where.Scalar, _aten.where.ScalarOther, _aten.where.ScalarSelf, _aten.where.self)
"""The overloads that choose values."""


def add(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::add.Tensor``, which is ``or`` for two masks.

    Args:
        opset: version of the operator set; None for torch's choice.
    """

    def add_tensors(x: Any, other: Any, alpha: float = 1.0) -> Any:
        if _are_bools(x, other):
            return require("onnxscript", "onnx", "Export to ONNX").opset18.Or(x, other)
        return torchs_translation(_aten.add.Tensor, opset)(x, other, alpha)

    return add_tensors


def where(torchs: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of an overload of ``aten::where``, of masks with ``and`` and ``or``.

    Args:
        torchs: the overload.
        opset: version of the operator set; None for torch's choice.
    """

    def where_tensors(condition: Any, x: Any, other: Any) -> Any:
        if not _are_bools(x, other):
            return torchs_translation(torchs, opset)(condition, x, other)
        op = require("onnxscript", "onnx", "Export to ONNX").opset18
        return op.Or(op.And(condition, x), op.And(op.Not(condition), other))

    return where_tensors


def _are_bools(*tensors: Any) -> bool:
    return all(isinstance(tensor, bool) or getattr(tensor, "dtype", None) == _BOOL for tensor in tensors)
