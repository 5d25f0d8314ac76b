"""The gradient of learned steps and offsets in one pass: what goes on to the tensor, and the sums of each block."""

from __future__ import annotations

import numpy as np
import torch

from bitwright.kernels.grid import Grid
from bitwright.kernels.layout import LANES, Layout, dense

from .arithmetic import clamp, code_of_integer, load, store
from .compiling import compiled, inlined
from .fused import _prepare
from .lanes import (
    Lanes,
    as_bits,
    as_float,
    from_mask,
    keep_first,
    load_f32,
    load_i32,
    peek_f32,
    peek_i64,
    poke_f32,
    reduce_add,
    select,
    splat,
    splat_int,
    stack_room,
    store_f32,
    to_float,
)
from .mapping import row_parameters
from .memory import CPU, empty_like
from .native import DTYPES, address_of
from .threads import run_parts, threads_for
from .walking import VECTOR, block_of_row, copy, element_bytes, first_part, next_part, staged

__all__ = ["learned_gradient"]

# Words of sixteen elements that are summed up in float32 before the sum goes to a table.
_SUMMED = 256
# Words of a chunk, which has sums of its own. The division is that of the tensor, not of the threads, so that the sums
# are the same bits whatever their number.
_CHUNK = 1024
# Elements for each entry of the tables of all chunks, at least.
_ELEMENTS_PER_SUM = 8

three_vectors = stack_room(3 * VECTOR)


@inlined
def beyond(
    values: Lanes, scale: Lanes, offset: Lanes, origin: Lanes, low: Lanes, high: Lanes, anchored: int
) -> tuple[Lanes, Lanes]:
    """Which elements lie inside the range, and ``dv'/ds * s`` of each."""
    inside = ((low - offset) * scale + origin < values) & (values < (high - offset) * scale + origin)
    codes = clamp(code_of_integer(values, scale, offset, origin), low, high)
    fixed = splat(np.float32(0))
    if anchored != 0:
        fixed = (fixed - offset) * scale + origin
    return inside, (codes - offset) * scale + origin - select(inside, values, fixed)


@inlined
def add_lanes(target: int, values: Lanes, count: int, room: int) -> None:
    """Add up to sixteen elements to a table of float32."""
    if count >= LANES:
        store_f32(target, load_f32(target) + values)
    else:
        store_f32(room, load_f32(staged(target, room, 4 * count)) + values)
        copy(room, target, 4 * count)


@inlined
def learned_words(
    x: int, gradient: int, out: int, dtype: int, scales: int, points: int, origins: int, table: int, grid: int,
    anchored: int, steps: int, offsets: int, begin: int, end: int, room: int,
) -> None:  # fmt: skip
    """Work on the words ``begin`` to ``end``; ``room`` is for three vectors."""
    length, per_element = peek_i64(table + 8), peek_i64(table + 16)
    words = (length + LANES - 1) // LANES
    size = element_bytes(dtype)
    lowest = peek_f32(grid + 8)
    low, high = splat(lowest), splat(peek_f32(grid + 12))
    nothing, no_bits = splat(np.float32(0)), splat_int(np.int32(0))
    while begin < end:
        row = begin // words
        word = begin - row * words
        stop = min(min(words, word + end - begin), word + _SUMMED)
        block = 4 * block_of_row(table, row)
        width, point, start = row_parameters(scales, points, origins, block, lowest)
        scale, offset, origin = splat(width), splat(point), splat(start)
        along, beside = nothing, nothing
        for first in range(word * LANES, min(length, stop * LANES), LANES):
            rest = min(length - first, LANES)
            inside_block = block + 4 * first
            at = size * (row * length + first)
            source, slope, target = x + at, gradient + at, out + at
            if rest < LANES:
                source = staged(source, room, size * rest)
                slope = staged(slope, room + VECTOR, size * rest)
                target = room + 2 * VECTOR
            values, slopes = load(source, dtype), load(slope, dtype)
            if per_element != 0:
                full = rest == LANES
                here = scales + inside_block
                scale = load_f32(here if full else staged(here, room, 4 * rest))
                if points != 0:
                    here = points + inside_block
                    offset = to_float(load_i32(here if full else staged(here, room, 4 * rest)))
                if origins != 0:
                    here = origins + inside_block
                    origin = load_f32(here if full else staged(here, room, 4 * rest))
            inside, moved = beyond(values, scale, offset, origin, low, high, anchored)
            store(target, slopes * from_mask(inside), dtype)
            if rest < LANES:
                copy(target, out + at, size * rest)
            more = slopes * moved
            outside = select(inside, nothing, slopes)
            if rest < LANES:
                more = as_float(keep_first(as_bits(more), no_bits, rest))
                outside = as_float(keep_first(as_bits(outside), no_bits, rest))
            if per_element != 0:
                add_lanes(steps + inside_block, more, rest, room)
                add_lanes(offsets + inside_block, outside, rest, room)
            else:
                along = along + more
                beside = beside + outside
        if per_element == 0:
            poke_f32(steps + block, peek_f32(steps + block) + reduce_add(along))
            poke_f32(offsets + block, peek_f32(offsets + block) + reduce_add(beside))
        begin += stop - word


@compiled
def learned_part(
    x: int, gradient: int, out: int, dtype: int, scales: int, points: int, origins: int, table: int, grid: int,
    anchored: int, sums: int, blocks: int, shared: int, words: int, chunk: int, parts: int, control: int,
) -> None:  # fmt: skip
    """Multiply a gradient by the mask of what lies inside the range, and sum up what belongs to step and offset.

    Args:
        x: address of the input.
        gradient: address of the incoming gradient.
        out: address of the outgoing gradient.
        dtype: dtype of all three.
        scales: as in ``map_part``.
        points: as in ``map_part``.
        origins: as in ``map_part``.
        table: as in ``map_part``.
        grid: as in ``map_part``.
        anchored: whether values outside keep their distance from the offset, not from zero, as the step changes.
        sums: address of float32 zeros ``[chunks or 1, 2, blocks]``.
        blocks: number of blocks.
        shared: whether all chunks have one table.
        words: number of words.
        chunk: words of a chunk.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    room = three_vectors()
    chunks = (words + chunk - 1) // chunk
    part = first_part(control)
    while part < parts:
        for number in range(chunks * part // parts, chunks * (part + 1) // parts):
            steps = sums if shared != 0 else sums + 8 * blocks * number
            learned_words(
                x, gradient, out, dtype, scales, points, origins, table, grid, anchored, steps, steps + 4 * blocks,
                number * chunk, min(words, (number + 1) * chunk), room,
            )  # fmt: skip
        part = next_part(control, part)


def _chunks(layout: Layout) -> tuple[int, int, bool]:
    """Return the number of words, those of a chunk, and whether no two chunks share a block."""
    words = layout.rows * -(-layout.length // LANES)
    if layout.disjoint > 1:
        group = words // layout.disjoint
        return words, group * -(-_CHUNK // group), True
    chunks = max(1, min(-(-words // _CHUNK), layout.numel // (_ELEMENTS_PER_SUM * layout.blocks)))
    return words, -(-words // chunks), chunks == 1


def learned_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    anchored: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``kernels.learned.learned_gradient``."""
    flat, order = dense(x)
    if gradient.stride() != flat.stride() or gradient.is_neg():
        gradient = empty_like(flat).copy_(gradient)
    given = _prepare(flat, order, scale, zero_point, minval, block_size, grid)
    layout = given.layout
    words, chunk, shared = _chunks(layout)
    out = empty_like(flat)
    sums = torch.zeros(1 if shared else -(-words // chunk), 2, layout.blocks, dtype=torch.float32, device=CPU)
    arguments = (
        flat.data_ptr(), gradient.data_ptr(), out.data_ptr(), DTYPES[x.dtype], given.scale.data_ptr(),
        address_of(given.zero_point), address_of(given.minval), layout.address, given.grid.address, int(anchored),
        sums.data_ptr(), layout.blocks, int(shared), words, chunk,
    )  # fmt: skip
    run_parts(learned_part, arguments, threads_for(layout.numel), (flat, gradient, out, sums, given))
    step, offset = (sums[0] if shared else sums.sum(0, dtype=torch.float64).float()).unbind()
    return out, step.view(scale.shape), offset.view(scale.shape)
