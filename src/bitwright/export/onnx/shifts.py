"""Shifts of integers for torch's ONNX exporter.

Its own translations make signed integers of unsigned ones, take operands of one type only, and move by more bits than
there are as the processor does, where PyTorch leaves zeros or signs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .promotion import in_type, number, result_type
from .torchlib import operators

__all__ = ["SHIFTS", "shift"]

_aten = torch.ops.aten
SHIFTS = {
    getattr(packet, overload): direction
    for packet, named, direction in (
        (_aten.__lshift__, _aten.bitwise_left_shift, "LEFT"),
        (_aten.__rshift__, _aten.bitwise_right_shift, "RIGHT"),
    )
    for packet, overloads in ((packet, ("Scalar", "Tensor")), (named, ("Scalar_Tensor", "Tensor", "Tensor_Scalar")))
    for overload in overloads
}
"""The directions of overloads."""


def shift(direction: str) -> Callable[..., Any]:
    """Return the translation of a shift, in 32 or 64 bits, which ONNX Runtime has kernels for.

    Args:
        direction: one of the values of :data:`SHIFTS`.
    """

    def shifted(x: Any, bits: Any) -> Any:
        dtype = result_type(x, bits)
        wide, unsigned, width = (
            (torch.int64, torch.uint64, 64) if dtype == torch.int64 else (torch.int32, torch.uint32, 32)
        )
        x = in_type(in_type(x, dtype), wide)
        outside, bits = _within(bits, dtype, wide, width)
        moved = _left(x, bits, wide, unsigned) if direction == "LEFT" else _right(x, bits, wide, unsigned)
        if outside is not None and direction == "LEFT":
            moved = operators().Where(outside, number(0, wide), moved)
        return in_type(moved, dtype)

    return shifted


def _within(bits: Any, dtype: torch.dtype, wide: torch.dtype, width: int) -> tuple[Any, Any]:
    """Where as many bits are asked for as there are, more, or fewer than none; and what can be done: all but one."""
    op, most = operators(), number(width - 1, wide)
    if isinstance(bits, int):
        fits = 0 <= bits < width
        return (None, number(bits, wide)) if fits else (number(True, torch.bool), most)
    bits = in_type(in_type(bits, dtype), wide)
    outside = op.Or(op.Less(bits, number(0, wide)), op.Greater(bits, most))
    return outside, op.Where(outside, most, bits)


def _left(x: Any, bits: Any, wide: torch.dtype, unsigned: torch.dtype) -> Any:
    moved = operators().BitShift(in_type(x, unsigned), in_type(bits, unsigned), direction="LEFT")
    return in_type(moved, wide)


def _right(x: Any, bits: Any, wide: torch.dtype, unsigned: torch.dtype) -> Any:
    """Of negative numbers the complements are moved, which are none."""
    op, complement = operators(), number(-1, wide)
    negative = op.Less(x, number(0, wide))
    size = op.Where(negative, op.Sub(complement, x), x)
    moved = in_type(op.BitShift(in_type(size, unsigned), in_type(bits, unsigned), direction="RIGHT"), wide)
    return op.Where(negative, op.Sub(complement, moved), moved)
