"""What every kernel needs to know about a quantized tensor: its grid of codes and its division into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bitwright.formats import format_of

__all__ = ["Grid", "block_counts", "block_view_shape"]

_FORMULATIONS = ("zp", "minval")


@dataclass(frozen=True, slots=True)
class Grid:
    """The codes that a tensor may take, and how a code stands for a value.

    Attributes:
        dtype: the number format.
        quant_min: smallest code of an integer, smallest value of a float format.
        quant_max: largest code of an integer, largest value of a float format.
        formulation: for integers, ``"zp"``: ``(code - zero_point) * scale``, or ``"minval"``:
            ``(code - quant_min) * scale + minval``. Float formats: ``code * scale`` always.

    Raises:
        ValueError: unknown dtype or formulation, or a range that is empty or outside the format.
    """

    dtype: torch.dtype
    quant_min: int | float
    quant_max: int | float
    formulation: str = "zp"
    _native: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fmt = format_of(self.dtype)
        if fmt.kind == "exponent":
            raise ValueError(f"{fmt.name!r} is a format for scales; quantize to an integer, FP8 or FP4 format.")
        if self.formulation not in _FORMULATIONS:
            raise ValueError(f"formulation must be one of {_FORMULATIONS}, got {self.formulation!r}.")
        if not fmt.minimum <= self.quant_min < self.quant_max <= fmt.maximum:
            raise ValueError(
                f"The range [{self.quant_min!r}, {self.quant_max!r}] is empty or lies outside that of {fmt.name!r}, "
                f"[{fmt.minimum}, {fmt.maximum}]."
            )

    def __reduce__(self) -> tuple[type[Grid], tuple[object, ...]]:
        # A copy must not share the table that the CPU kernels keep with a grid.
        return Grid, (self.dtype, self.quant_min, self.quant_max, self.formulation)

    @property
    def is_integer(self) -> bool:
        """Whether the codes are integers."""
        return format_of(self.dtype).kind == "int"


def block_counts(shape: Sequence[int], block_size: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks along each dimension, which is the shape of the scale.

    Raises:
        ValueError: another number of dimensions, or a block that does not divide its dimension.
    """
    if len(shape) != len(block_size):
        raise ValueError(
            f"block_size {tuple(block_size)} has {len(block_size)} entries for a tensor of shape {tuple(shape)}; "
            "give one entry per dimension."
        )
    counts = []
    for dim, (size, block) in enumerate(zip(shape, block_size, strict=True)):
        if block < 1 or size % block:
            if size == 0 and block == 0:
                counts.append(1)
                continue
            raise ValueError(
                f"A block of {block} does not divide dimension {dim} of a tensor of shape {tuple(shape)}; "
                "choose a block size that divides it."
            )
        counts.append(size // block)
    return tuple(counts)


def block_view_shape(
    shape: tuple[int, ...], block_size: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Split every dimension into (number of blocks, block).

    A dimension that is one block, or blocks of one element, is not split.

    Returns:
        The shape of the tensor's view, the dimensions of it that lie inside a block, the shape to which a scale
        broadcasts against it, and the shape of the scale (one entry per dimension of the tensor).

    Raises:
        ValueError: as ``block_counts``.
    """
    counts = block_counts(shape, block_size)
    view: list[int] = []
    inner: list[int] = []
    scale: list[int] = []
    for count, block, size in zip(counts, block_size, shape, strict=True):
        if count == 1 and size != 1:
            inner.append(len(view))
            view.append(size)
            scale.append(1)
        elif block == 1:
            view.append(size)
            scale.append(size)
        else:
            view += [count, block]
            scale += [count, 1]
            inner.append(len(view) - 1)
    return tuple(view), tuple(inner), tuple(scale), counts
