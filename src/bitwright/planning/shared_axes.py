"""Scales along an axis, where ops move values: does the axis survive?"""

from __future__ import annotations

from typing import Any

from bitwright.program import Op
from bitwright.program.aten_names import canonical_name
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity

__all__ = ["channel_axis", "concat_dimension", "keeps_axis", "swapped_dimensions"]

_REDUCING = frozenset({"mean"})
_SWAPPING = frozenset({"transpose", "swapaxes", "swapdims"})
_PERMUTING = _SWAPPING | {"permute", "t", "numpy_T", "mT", "movedim", "flip", "roll"}
_NEVER = frozenset({"flatten", "stack", "unbind"})


def channel_axis(spec: Any, rank: int) -> int | None:
    """Return the axis, from the front, along which ``spec`` has several scales; None where it has no single one."""
    granularity = spec.granularity
    if not isinstance(granularity, PerChannelGranularity | PerBlockGranularity) or granularity.axis is None:
        return None
    return int(granularity.axis) % rank if -rank <= granularity.axis < rank else None


def concat_dimension(op: Op) -> int | None:
    """Return the dimension that ``op`` joins or cuts, None for other ops."""
    if canonical_name(op.type) in ("cat", "split", "chunk"):
        return int(op.literals.get("dim", 0))
    return None


def keeps_axis(op: Op, axis: int) -> bool:
    """Whether dimension ``axis`` of what ``op`` reads is the same dimension, with the same size, of what it returns."""
    if not op.arguments or not op.outputs:
        return False
    before, after = op.arguments[0].value.shape, op.outputs[0].shape
    kind = canonical_name(op.type)
    if kind in _NEVER or not -len(before) <= axis < len(before):
        return False
    axis %= len(before)
    if kind in _PERMUTING:
        return _position_after(op, kind, axis, len(before)) == axis
    if kind in _REDUCING and len(before) != len(after):
        return False
    return axis < len(after) and before[axis] == after[axis]


def swapped_dimensions(op: Op, rank: int) -> tuple[int, int] | None:
    """Return the two dimensions, from the front, that a transposition swaps; None where none are known."""
    if canonical_name(op.type) not in _SWAPPING:
        return None
    literals = op.literals
    first, second = (literals.get(f"dim{i}", literals.get(f"axis{i}")) for i in range(2))
    return (first % rank, second % rank) if isinstance(first, int) and isinstance(second, int) else None


def _position_after(op: Op, kind: str, axis: int, rank: int) -> int:
    swapped = swapped_dimensions(op, rank)
    if swapped is not None:
        first, second = swapped
        return {first: second, second: first}.get(axis, axis)
    if kind == "permute":
        dims = op.literals.get("dims")
        return -1 if dims is None else [int(d) % rank for d in dims].index(axis)
    return -1
