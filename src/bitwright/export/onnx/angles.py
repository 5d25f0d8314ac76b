"""Angles of points for torch's ONNX exporter, whose own translation gives those of the negative axis the wrong sign."""

from __future__ import annotations

import math
from typing import Any

from .torchlib import operators

__all__ = ["angle_of_point"]


def angle_of_point(y: Any, x: Any) -> Any:
    """Translate ``aten::atan2``; ONNX has no such operator.

    On the negative axis, where quantized values often lie, the angle is pi; ONNX's comparisons do not tell a negative
    zero from zero, for which it would be -pi.
    """
    op = operators()
    zero, pi = (op.CastLike(number, y) for number in (0.0, math.pi))
    angle = op.Atan(op.Div(y, x))
    left = op.Where(op.Less(y, zero), op.Sub(angle, pi), op.Add(angle, pi))
    found = op.Where(op.Less(x, zero), left, angle)
    return op.Where(op.And(op.Equal(x, zero), op.Equal(y, zero)), zero, found)
