"""A dense tensor and its blocks as rows, in the order of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from .grid import block_counts
from .reference import check_fit

__all__ = ["LANES", "SMALL", "Layout", "dense", "fitted_layout", "layout_of"]

# Elements that a CPU kernel handles at a time.
LANES = 16

# Elements from which on several threads are worth their while.
SMALL = 1 << 17

_LONG_ROW = 16 * LANES


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Rows of a tensor, and the block of each.

    Attributes:
        counts: shape of the scale.
        blocks: number of blocks.
        numel: number of elements.
        rows: number of rows; row ``r`` holds the elements from ``r * length`` on, in memory order.
        length: elements of a row.
        per_element: whether element ``j`` of a row lies in block ``first + j`` instead of ``first``.
        flat: whether rows are too short for vectors, so that elements are walked in flat vectors.
        rowwise: whether row ``r`` is exactly block ``r``.
        disjoint: number of equal groups of rows that share no block, 1 if there is no such division.
        words: number of vectors of sixteen elements, each with a word in the mask of one bit per element. Rows start a
            word, except in a flat layout.
        table: ``rows, length, per_element, flat, outer count, sizes..., block strides...`` for the kernels.
        address: address of ``table``.
    """

    counts: tuple[int, ...]
    blocks: int
    numel: int
    rows: int
    length: int
    per_element: bool
    flat: bool
    rowwise: bool
    disjoint: int
    words: int
    table: npt.NDArray[np.int64] = field(repr=False)
    address: int = field(repr=False)


@dataclass(slots=True)
class _Run:
    """Neighbouring elements: all of one block (``stride`` 0), or of blocks ``stride`` apart."""

    size: int
    stride: int


def _runs(shape: Sequence[int], order: Sequence[int], block_size: Sequence[int], counts: Sequence[int]) -> list[_Run]:
    """The dimensions from outermost to innermost in memory, each split at its blocks, merged where possible."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * counts[dim + 1]
    runs: list[_Run] = []
    for dim in order:
        for size, stride in ((counts[dim], strides[dim]), (block_size[dim], 0)):
            if size == 1:
                continue
            if runs and runs[-1].stride == size * stride:
                runs[-1] = _Run(runs[-1].size * size, stride)
            else:
                runs.append(_Run(size, stride))
    return runs


@lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], order: tuple[int, ...] | None, block_size: tuple[int, ...]) -> Layout:
    """Describe a tensor without holes.

    Args:
        shape: shape of the tensor; no dimension is 0.
        order: dimensions from the largest stride to the smallest; None for a contiguous tensor.
        block_size: shape of one block.

    Raises:
        ValueError: blocks do not divide the shape.
    """
    counts = block_counts(shape, block_size)
    runs = _runs(shape, range(len(shape)) if order is None else order, block_size, counts)
    numel = int(np.prod(shape, dtype=np.int64))
    per_element = bool(runs) and runs[-1].stride == 1
    inner = runs.pop() if runs and runs[-1].stride in (0, 1) else _Run(1, 0)
    rows = numel // inner.size
    flat = inner.size < _LONG_ROW and inner.size % LANES != 0
    words = -(-numel // LANES) if flat else rows * -(-inner.size // LANES)
    rowwise = not per_element and (rows == 1 or (len(runs) == 1 and runs[0].stride == 1))
    disjoint = runs[0].size if runs and runs[0].stride else 1
    table = np.array(
        [rows, inner.size, per_element, flat, len(runs), *(r.size for r in runs), *(r.stride for r in runs)],
        dtype=np.int64,
    )
    blocks = int(np.prod(counts, dtype=np.int64))
    return Layout(
        counts, blocks, numel, rows, inner.size, per_element, flat, rowwise, disjoint, words, table, table.ctypes.data
    )


def fitted_layout(
    shape: tuple[int, ...],
    order: tuple[int, ...] | None,
    block_size: tuple[int, ...],
    made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    needs_minval: bool,
) -> Layout:
    """``layout_of`` for the parameters that there are: a single block where they are single numbers for all blocks.

    Args:
        shape: see ``layout_of``.
        order: likewise.
        block_size: likewise.
        made: scale, zero point and minval.
        needs_minval: see ``reference.check_fit``.

    Raises:
        ValueError: as ``layout_of`` and ``reference.check_fit``.
    """
    layout = layout_of(shape, order, block_size)
    single = check_fit(layout.counts, *made, needs_minval)
    return layout_of(shape, order, shape) if single and layout.blocks != 1 else layout


def dense(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """Return the tensor without holes (copied if it has any), and its dimensions in the order of memory.

    The order is None for a contiguous tensor.
    """
    if x.is_contiguous():
        return x, None
    strides = x.stride()
    order = tuple(sorted(range(x.ndim), key=lambda dim: (-strides[dim], dim)))
    if x.permute(order).is_contiguous():
        return x, order
    return x.contiguous(), None
