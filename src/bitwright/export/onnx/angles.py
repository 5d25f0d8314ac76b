"""Angles of points for torch's ONNX exporter, whose own translation is wrong on the axes and at infinity."""

from __future__ import annotations

import math
from typing import Any

from .torchlib import operators

__all__ = ["angle_of_point"]


def angle_of_point(y: Any, x: Any) -> Any:
    """Translate ``aten::atan2``; ONNX has no such operator.

    The angle in the first quadrant, mirrored by the signs of both numbers. Those of zeros, which quantized values often
    are, count too: the angle of (0.0, -0.0) is pi.
    """
    op = operators()
    zero, one, pi = (op.CastLike(number, y) for number in (0.0, 1.0, math.pi))

    def is_negative(value: Any) -> Any:
        # comparisons do not tell a negative zero from zero, but its reciprocal is a negative infinity
        return op.Or(op.Less(value, zero), op.Less(op.Div(one, value), zero))

    height, width = op.Abs(y), op.Abs(x)
    # quotients of two zeros or two infinities would not be numbers
    slope = op.Where(op.Equal(height, width), op.Sign(height), op.Div(height, width))
    angle = op.Atan(slope)
    angle = op.Where(is_negative(x), op.Sub(pi, angle), angle)
    return op.Where(is_negative(y), op.Neg(angle), angle)
