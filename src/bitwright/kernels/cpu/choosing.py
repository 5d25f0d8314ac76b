"""From ranges to parameters: running ranges, the choice for every block, and observing while quantizing."""

from __future__ import annotations

import numpy as np

from .arithmetic import BFLOAT16, FLOAT32, choose, round_to
from .compiling import compiled, inlined
from .lanes import (
    LANES,
    Scalar,
    f16_of_float,
    float_from_bits,
    float_of_f16,
    float_to_bits,
    peek_f32,
    peek_i16,
    peek_i32,
    peek_i64,
    poke_f32,
    poke_i16,
    poke_i32,
    stack_room,
)
from .mapping import FAKE, map_rows
from .ranges import join_parts, keys_of, range_of_keys, range_of_row
from .walking import element_bytes, first_part, next_part, vector_room

__all__ = ["FEW", "choose_block", "choose_part", "finish", "observe_rows", "track"]

# Number of blocks whose keys ``finish`` keeps on the stack.
FEW = 64

few_keys = stack_room(2 * 4 * FEW)


@inlined
def get(address: int, dtype: int, place: int) -> Scalar:
    """One element as float32."""
    if dtype == FLOAT32:
        return peek_f32(address + 4 * place)
    bits = peek_i16(address + 2 * place)
    if dtype == BFLOAT16:
        return float_from_bits(np.int32(bits) << 16)
    return float_of_f16(bits)


@inlined
def put(address: int, dtype: int, place: int, value: Scalar) -> None:
    """Write one element that the dtype represents."""
    if dtype == FLOAT32:
        poke_f32(address + 4 * place, value)
    elif dtype == BFLOAT16:
        poke_i16(address + 2 * place, np.int16(float_to_bits(value) >> 16))
    else:
        poke_i16(address + 2 * place, f16_of_float(value))


@inlined
def blend(value: Scalar, running: Scalar, dtype: int, mode: int, constant: Scalar, sign: Scalar) -> Scalar:
    """The new running value.

    Args:
        value: the value of this tensor.
        running: the running value.
        dtype: dtype of both, to which every operation rounds.
        mode: 0 takes the value, 1 the moving average, 2 the smaller of ``sign * value`` and ``sign * running``.
        constant: weight of the value in the average.
        sign: 1 for minima, -1 for maxima.
    """
    if mode == 1:
        new = round_to(value * np.float32(constant), dtype)
        old = round_to(running * np.float32(1.0 - constant), dtype)
        return round_to(new + old, dtype)
    if mode == 2 and (np.isnan(running) or np.float32(sign) * running < np.float32(sign) * value):
        return running
    return np.float32(value)


@inlined
def track(
    lows: int, highs: int, blocks: int, dtype: int, mode: int, constant: Scalar, running_lows: int, running_highs: int
) -> None:
    """Bring the running range up to date with float32 ranges, which become the running range.

    Args:
        lows: address of the smallest elements.
        highs: address of the largest.
        blocks: number of blocks.
        dtype: dtype of the running range.
        mode: see ``blend``.
        constant: see ``blend``.
        running_lows: address of the running minimum.
        running_highs: address of the running maximum.
    """
    for block in range(blocks):
        low, high = peek_f32(lows + 4 * block), peek_f32(highs + 4 * block)
        low = np.float32(0) if low >= 0 else low
        high = np.float32(0) if high <= 0 else high
        old_low, old_high = get(running_lows, dtype, block), get(running_highs, dtype, block)
        how = 0 if mode == 1 and old_low == 0 and old_high == 0 else mode  # nothing to average with
        low = blend(low, old_low, dtype, how, constant, 1.0)
        high = blend(high, old_high, dtype, how, constant, -1.0)
        put(running_lows, dtype, block, low)
        put(running_highs, dtype, block, high)
        poke_f32(lows + 4 * block, low)
        poke_f32(highs + 4 * block, high)


@inlined
def choose_block(
    low: Scalar, high: Scalar, dtype: int, scheme: int, grid: int, scales: int, points: int, origins: int, block: int
) -> None:
    """Choose the parameters of one block and write those that are wanted (address not 0)."""
    quant_min, quant_max = peek_f32(grid + 8), peek_f32(grid + 12)
    scale, point, origin = choose(low, high, dtype, scheme, quant_min, quant_max)
    poke_f32(scales + 4 * block, scale)
    if points != 0:
        poke_i32(points + 4 * block, point)
        poke_f32(origins + 4 * block, origin)


@compiled
def choose_part(
    lows: int, highs: int, dtype: int, scheme: int, grid: int, scales: int, points: int, origins: int,
    blocks: int, parts: int, control: int,
) -> None:  # fmt: skip
    """Choose the parameters of blocks.

    Args:
        lows: address of the float32 smallest elements.
        highs: address of the largest.
        dtype: dtype in which to compute.
        scheme: see ``arithmetic.choose``.
        grid: address of the grid's words.
        scales: where the float32 scales go.
        points: where the int32 zero points go, or 0.
        origins: where the float32 minvals go, or 0.
        blocks: number of blocks.
        parts: see ``walking.first_part``.
        control: see ``walking.first_part``.
    """
    part = first_part(control)
    while part < parts:
        for block in range(blocks * part // parts, blocks * (part + 1) // parts):
            low, high = peek_f32(lows + 4 * block), peek_f32(highs + 4 * block)
            choose_block(low, high, dtype, scheme, grid, scales, points, origins, block)
        part = next_part(control, part)


@compiled
def finish(
    x: int, table: int, lows: int, highs: int, parts: int, blocks: int, dtype: int, mode: int, constant: float,
    running_lows: int, running_highs: int, scheme: int, grid: int, scales: int, points: int, origins: int,
) -> None:  # fmt: skip
    """From a small tensor, or from the keys that ``accumulate`` left, to the parameters of all blocks.

    Args:
        x: address of the tensor, or 0 to take the keys at ``lows`` and ``highs``.
        table: address of the layout's table.
        lows: see ``join_parts``; room for the keys of a tensor, or 0 for at most ``FEW`` blocks.
        highs: likewise.
        parts: see ``join_parts``.
        blocks: number of blocks.
        dtype: dtype of the tensor.
        mode: see ``blend``.
        constant: see ``blend``.
        running_lows: address of the running minimum, or 0 for none.
        running_highs: address of the running maximum.
        scheme: see ``arithmetic.choose``.
        grid: address of the grid's words.
        scales: where the float32 scales go.
        points: where the int32 zero points go, or 0.
        origins: where the float32 minvals go, or 0.
    """
    if x != 0:
        if lows == 0:
            lows = few_keys()
            highs = lows + 4 * FEW
        keys_of(x, dtype, table, lows, highs, blocks)
    join_parts(lows, highs, parts, blocks)
    if running_lows != 0:
        track(lows, highs, blocks, dtype, mode, constant, running_lows, running_highs)
    for block in range(blocks):
        low, high = peek_f32(lows + 4 * block), peek_f32(highs + 4 * block)
        choose_block(low, high, dtype, scheme, grid, scales, points, origins, block)


@compiled
def observe_rows(
    x: int, dtype: int, y: int, mask: int, scheme: int, scales: int, points: int, origins: int,
    table: int, grid: int, rows: int, parts: int, control: int,
) -> None:  # fmt: skip
    """Observe and fake-quantize the rows of a layout whose row ``r`` is block ``r``.

    A row is read from memory once: when it is quantized it lies in the cache.
    """
    length = peek_i64(table + 8)
    words = (length + LANES - 1) // LANES
    size = element_bytes(dtype)
    minval = peek_i32(grid + 4)
    room = vector_room()
    part = first_part(control)
    while part < parts:
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            low_key, high_key = range_of_row(x + size * row * length, dtype, length, room)
            low, high = range_of_keys(low_key, high_key)
            choose_block(low, high, dtype, scheme, grid, scales, points, origins, row)
            map_rows(
                FAKE, x, dtype, y, dtype, mask, scales, 0 if minval else points, origins if minval else 0,
                table, grid, row * words, (row + 1) * words, room,
            )  # fmt: skip
        part = next_part(control, part)
