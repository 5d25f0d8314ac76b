"""The kernels put together with the numbers and constants of a layout and a grid, ready to be launched."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from bitwright.formats import format_of
from bitwright.kernels.grid import Grid
from bitwright.kernels.layout import Layout

from .kernels import (
    choose_kernel,
    map_kernel,
    mask_kernel,
    observe_rows_kernel,
    partial_ranges_kernel,
    range_kernel,
    track_whole_kernel,
)
from .launching import Launch

__all__ = [
    "choose_launch",
    "divided",
    "fits_one_pass",
    "is_covered",
    "map_launch",
    "mask_launch",
    "numbers_of",
    "parts_of",
    "range_launch",
    "rows_launch",
    "whole_launch",
]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SIZES = (1024, 512, 256)  # elements of a program; the first that divides a row, so that its block is asked for once
_KNOWN_LENGTHS = frozenset(1 << n for n in range(9))  # rows for which code of their own is compiled
_LONGEST_ROW = 8192
_MOST_PARTS = 1024
_MOST_RUNS = 4
_MOST_LAUNCHES = 4096  # kept ready of each kernel
_WIDE = 1 << 31
_WARPS, _MORE_WARPS, _MOST_WARPS = 4, 8, 16


class Numbers(NamedTuple):
    """A grid as the kernels take it."""

    integer: bool
    minval: bool
    low: float
    high: float
    smallest: int
    anchor: int


@lru_cache(maxsize=256)
def numbers_of(grid: Grid) -> Numbers:
    """Return a grid as the kernels take it."""
    fmt = format_of(grid.dtype)
    integer = fmt.kind == "int"
    minval = integer and grid.formulation == "minval"
    low, high = float(grid.quant_min), float(grid.quant_max)
    return Numbers(integer, minval, low, high, (128 - fmt.bias) << 23, (23 - fmt.mantissa_bits) << 23)


def _runs(layout: Layout) -> tuple[int, tuple[int, ...]]:
    """Number of outer runs, and the seven numbers that ``block_of_row`` takes."""
    count = int(layout.table[4])
    sizes = [int(v) for v in layout.table[5 : 5 + count]] + [1] * (_MOST_RUNS - count)
    strides = [int(v) for v in layout.table[5 + count :]] + [0] * (_MOST_RUNS - count)
    return count, (*sizes[1:_MOST_RUNS], *strides[:_MOST_RUNS])


def divided(number: int, by: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // by)


def _power_of_two(least: int) -> int:
    """The smallest one that is not less."""
    return 1 << (least - 1).bit_length()


def is_covered(layout: Layout) -> bool:
    """Return whether the kernels find the blocks of such rows."""
    return int(layout.table[4]) <= _MOST_RUNS


@lru_cache(maxsize=_MOST_LAUNCHES)
def map_launch(
    op: int,
    dtype: torch.dtype,
    out: torch.dtype,
    layout: Layout,
    grid: Grid,
    points: bool,
    origins: bool,
    mask: bool,
    data: bool,
) -> Launch:
    """Return the launch of ``map_kernel``; the booleans say which of the tensors there are."""
    numbers, (count, runs), (size, together) = numbers_of(grid), _runs(layout), _tile(layout)
    return Launch(
        map_kernel, divided(layout.numel, size), (*numbers[2:], layout.numel, layout.length, *runs), _WARPS,
        OP=op, IN=_DTYPES[dtype], OUT=_DTYPES[out], INTEGER=numbers.integer, POINTS=points, ORIGINS=origins,
        MASK=mask, DATA=data, OUTER=count, PER_ELEMENT=layout.per_element, TOGETHER=together,
        LENGTH=0 if together or layout.length not in _KNOWN_LENGTHS else layout.length,
        WIDE=layout.numel + size >= _WIDE, SIZE=size,
    )  # fmt: skip


def _tile(layout: Layout) -> tuple[int, bool]:
    """Elements of a program, and whether they lie in one row and one block."""
    if not layout.per_element:
        if layout.rows == 1:
            return _SIZES[0], True
        for size in _SIZES:
            if layout.length % size == 0:
                return size, True
    return _SIZES[0], False


@lru_cache(maxsize=_MOST_LAUNCHES)
def mask_launch(numel: int, dtype: torch.dtype) -> Launch:
    """Return the launch of ``mask_kernel``."""
    return Launch(
        mask_kernel, divided(numel, _SIZES[0]), (numel,), _WARPS,
        DTYPE=_DTYPES[dtype], WIDE=numel + _SIZES[0] >= _WIDE, SIZE=_SIZES[0],
    )  # fmt: skip


def parts_of(layout: Layout) -> int:
    """In how many parts the range of a single block is found, a power of two."""
    return min(_MOST_PARTS, _power_of_two(divided(layout.numel, 4 * _SIZES[0])))


def _strides_far(layout: Layout) -> bool:
    """Whether the parts of a single block leave the numbers of 32 bits."""
    return layout.numel + 2 * parts_of(layout) * _SIZES[0] >= _WIDE


@lru_cache(maxsize=_MOST_LAUNCHES)
def range_launch(layout: Layout, dtype: torch.dtype) -> Launch:
    """Return the launch of the kernel that finds ranges: in ``parts_of`` parts where there is one block."""
    if layout.blocks == 1:
        return Launch(
            partial_ranges_kernel, parts_of(layout), (layout.numel,), _WARPS,
            DTYPE=_DTYPES[dtype], WIDE=_strides_far(layout), SIZE=_SIZES[0],
        )  # fmt: skip
    columns = min(4096, _power_of_two(layout.length))
    rows = max(1, 4096 // columns)
    tiles = divided(layout.length, columns)
    count, runs = _runs(layout)
    return Launch(
        range_kernel, divided(layout.rows, rows) * tiles, (layout.rows, layout.length, tiles, *runs), _MORE_WARPS,
        DTYPE=_DTYPES[dtype], OUTER=count, WIDE=layout.numel + 4096 >= _WIDE, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


@lru_cache(maxsize=_MOST_LAUNCHES)
def choose_launch(
    blocks: int,
    keys: bool,
    parts: int,
    grid: Grid,
    scheme: int,
    dtype: torch.dtype,
    kept: torch.dtype,
    mode: int | None,
    constant: float,
) -> Launch:
    """Return the launch of ``choose_kernel``; ``kept`` is the dtype of the running range, ``mode`` None without one."""
    numbers = numbers_of(grid)
    return Launch(
        choose_kernel, divided(blocks, 256),
        (numbers.low, numbers.high, constant, 1.0 - constant, blocks, parts), _WARPS,
        DTYPE=_DTYPES[dtype], KEPT=_DTYPES[kept], SCHEME=scheme, MODE=mode or 0, KEYS=keys,
        PARTS=_MOST_PARTS if parts else 0, RUNNING=mode is not None, INTEGER=numbers.integer, SIZE=256,
    )  # fmt: skip


@lru_cache(maxsize=_MOST_LAUNCHES)
def whole_launch(
    layout: Layout, grid: Grid, scheme: int, dtype: torch.dtype, kept: torch.dtype, mode: int | None, constant: float
) -> Launch:
    """Return the launch of ``track_whole_kernel``, for a single block; see ``choose_launch``."""
    numbers, parts = numbers_of(grid), parts_of(layout)
    return Launch(
        track_whole_kernel, parts, (numbers.low, numbers.high, constant, 1.0 - constant, layout.numel), _WARPS,
        DTYPE=_DTYPES[dtype], KEPT=_DTYPES[kept], SCHEME=scheme, MODE=mode or 0, RUNNING=mode is not None,
        INTEGER=numbers.integer, PARTS=parts, WIDE=_strides_far(layout), SIZE=_SIZES[0],
    )  # fmt: skip


@lru_cache(maxsize=_MOST_LAUNCHES)
def rows_launch(
    layout: Layout,
    grid: Grid,
    scheme: int,
    dtype: torch.dtype,
    kept: torch.dtype,
    mask: bool,
    data: bool,
    mode: int | None,
    constant: float,
) -> Launch:
    """Return the launch of ``observe_rows_kernel``; see ``choose_launch``."""
    numbers = numbers_of(grid)
    columns = max(32, _power_of_two(layout.length))
    rows = max(1, 4096 // columns)
    return Launch(
        observe_rows_kernel, divided(layout.rows, rows),
        (*numbers[2:], constant, 1.0 - constant, layout.rows, layout.length),
        _MOST_WARPS if columns > 4096 else _MORE_WARPS,
        DTYPE=_DTYPES[dtype], KEPT=_DTYPES[kept], SCHEME=scheme, INTEGER=numbers.integer, MINVAL=numbers.minval,
        MASK=mask, DATA=data, RUNNING=mode is not None, MODE=mode or 0, WIDE=layout.numel + 4096 >= _WIDE,
        ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


def fits_one_pass(layout: Layout) -> bool:
    """Whether every program can hold whole blocks, with whole words of the mask."""
    return layout.rowwise and layout.length <= _LONGEST_ROW and (layout.length % 32 == 0 or layout.rows == 1)
