"""Ranges and parameters of tensors whose blocks are many, or whose rows are blocks, by all threads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bitwright.kernels.layout import LANES, Layout

from .choosing import FEW, finish, observe_rows
from .native import DTYPES, NativeGrid, address_of
from .ranges import HIGHEST, LOWEST, accumulate
from .threads import part_count, run_parts, threads_for

__all__ = ["find_parameters", "goes_by_rows", "observe_by_rows", "range_keys"]

Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def range_keys(x: torch.Tensor, layout: Layout, threads: int) -> tuple[npt.NDArray[np.int32], int]:
    """Order keys of the blocks' extremes, found by several threads: shape (2, sets, blocks), and the address.

    Parts share one set of keys where they work on different blocks, else each has its own.
    """
    parts = part_count(threads)
    shared = layout.disjoint >= parts
    keys = np.empty((2, 1 if shared else parts, layout.blocks), dtype=np.int32)
    keys[0], keys[1] = HIGHEST, LOWEST
    words = layout.rows * -(-layout.length // LANES)
    address = keys.ctypes.data
    arguments = (
        x.data_ptr(), DTYPES[x.dtype], layout.address, address, address + keys[0].nbytes,
        0 if shared else layout.blocks, layout.disjoint if shared else words, words,
    )  # fmt: skip
    run_parts(accumulate, arguments, threads, (x, keys))
    return keys, address


def find_parameters(
    x: torch.Tensor,
    layout: Layout,
    grid: NativeGrid,
    scheme: int,
    made: Parameters,
    running: tuple[int, float, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Find the ranges of the blocks, update the running range if there is one, and write the parameters."""
    scale, zero_point, minval = made
    threads = threads_for(layout.numel)
    source, lows, highs, sets = x.data_ptr(), 0, 0, 1
    if threads > 1:
        keys, lows = range_keys(x, layout, threads)
        source, highs, sets = 0, lows + keys[0].nbytes, keys.shape[1]
    elif layout.blocks > FEW:
        keys = np.empty((2, layout.blocks), dtype=np.int32)
        lows = keys.ctypes.data
        highs = lows + keys[0].nbytes
    mode, constant, running_lows, running_highs = 0, 0.0, 0, 0
    if running is not None:
        mode, constant = running[:2]
        running_lows, running_highs = running[2].data_ptr(), running[3].data_ptr()
    finish(
        source, layout.address, lows, highs, sets, layout.blocks, DTYPES[x.dtype], mode, constant,
        running_lows, running_highs, scheme, grid.address, scale.data_ptr(), address_of(zero_point), address_of(minval),
    )  # fmt: skip


def goes_by_rows(layout: Layout, threads: int) -> bool:
    """Return whether ``observe_by_rows`` takes such tensors and has work for so many threads."""
    return layout.rowwise and not layout.flat and (threads == 1 or layout.rows >= part_count(threads))


def observe_by_rows(
    x: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor | None,
    layout: Layout,
    grid: NativeGrid,
    scheme: int,
    made: Parameters,
    threads: int,
) -> None:
    """Observe and fake-quantize in one pass a tensor whose rows are its blocks."""
    scale, zero_point, minval = made
    arguments = (
        x.data_ptr(), DTYPES[x.dtype], y.data_ptr(), address_of(mask), scheme, scale.data_ptr(), address_of(zero_point),
        address_of(minval), layout.address, grid.address, layout.rows,
    )  # fmt: skip
    run_parts(observe_rows, arguments, threads, (x, y, mask, made))
