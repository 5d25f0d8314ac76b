"""Operators on bools for torch's ONNX exporter, whose own translations no kernel of ONNX Runtime takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .torchlib import operators, torchs_translation

__all__ = ["EXTREMES", "WHERE", "add", "are_bools", "extreme", "where"]

_BOOL, _INT32 = 9, 6
_aten = torch.ops.aten

WHERE = (_aten.where.Scalar, _aten.where.ScalarOther, _aten.where.ScalarSelf, _aten.where.self)
"""The overloads that choose values."""

EXTREMES = (_aten.amax.default, _aten.amin.default)
"""The largest and the smallest along dimensions."""


def add(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::add.Tensor``, which is ``or`` for two masks.

    Args:
        opset: version of the operator set; None for torch's choice.
    """

    def add_tensors(x: Any, other: Any, alpha: float = 1.0) -> Any:
        if are_bools(x, other):
            return operators().Or(x, other)
        return torchs_translation(_aten.add.Tensor, opset)(x, other, alpha)

    return add_tensors


def where(torchs: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of an overload of ``aten::where``, of masks with ``and`` and ``or``.

    Args:
        torchs: the overload.
        opset: version of the operator set; None for torch's choice.
    """

    def where_tensors(condition: Any, x: Any, other: Any) -> Any:
        if not are_bools(x, other):
            return torchs_translation(torchs, opset)(condition, x, other)
        op = operators()
        return op.Or(op.And(condition, x), op.And(op.Not(condition), other))

    return where_tensors


def extreme(torchs: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of one of :data:`EXTREMES`, of masks in integers.

    Args:
        torchs: the overload.
        opset: version of the operator set; None for torch's choice.
    """

    def extremes(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
        translation = torchs_translation(torchs, opset)
        if not are_bools(x):
            return translation(x, dim, keepdim)
        op = operators()
        return op.Cast(translation(op.Cast(x, to=_INT32), dim, keepdim), to=_BOOL)

    return extremes


def are_bools(*tensors: Any) -> bool:
    """Return whether all of some tensors and numbers are bools; what is unknown is none."""
    return all(isinstance(tensor, bool) or getattr(tensor, "dtype", None) == _BOOL for tensor in tensors)
