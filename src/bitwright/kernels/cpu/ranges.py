"""From ranges to parameters, and the loops that observe and quantize in one pass.

Ranges travel as order keys (``arithmetic.order_key``) while they are widened, and as float32 in the same memory after
``join``.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import BFLOAT16, FLOAT32, choose, has_nan, round_to, value_of_key
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
)
from .loops import (
    FAKE,
    HIGHEST,
    LOWEST,
    element_bytes,
    first_part,
    map_rows,
    next_part,
    range_of_row,
    widen,
)

__all__ = ["choose_part", "extremes", "finish", "observe_rows"]


@inlined
def range_of_keys(low_key: Scalar, high_key: Scalar) -> tuple[Scalar, Scalar]:
    """The range as floats; a NaN makes both ends NaN."""
    if has_nan(low_key, high_key):
        return np.float32(np.nan), np.float32(np.nan)
    return value_of_key(low_key), value_of_key(high_key)


@inlined
def join_parts(lows: int, highs: int, parts: int, blocks: int) -> None:
    """Join the keys of several parts; the first part's memory then holds the ranges as float32.

    Args:
        lows: address of ``parts`` times ``blocks`` int32 keys of the smallest elements.
        highs: address of those of the largest.
        parts: number of parts.
        blocks: number of blocks.
    """
    for block in range(blocks):
        low, high = np.int32(HIGHEST), np.int32(LOWEST)
        for part in range(parts):
            at = 4 * (part * blocks + block)
            low = min(low, peek_i32(lows + at))
            high = max(high, peek_i32(highs + at))
        first, last = range_of_keys(low, high)
        poke_f32(lows + 4 * block, first)
        poke_f32(highs + 4 * block, last)


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
        low = blend(low, get(running_lows, dtype, block), dtype, mode, constant, 1.0)
        high = blend(high, get(running_highs, dtype, block), dtype, mode, constant, -1.0)
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


@inlined
def keys_of(x: int, dtype: int, table: int, lows: int, highs: int, blocks: int) -> None:
    """Order keys of the extremes of a whole tensor."""
    buffer = np.empty(LANES, np.float32)
    for block in range(blocks):
        poke_i32(lows + 4 * block, np.int32(HIGHEST))
        poke_i32(highs + 4 * block, np.int32(LOWEST))
    words = peek_i64(table) * ((peek_i64(table + 8) + LANES - 1) // LANES)
    widen(x, dtype, table, lows, highs, 0, words, np.int64(buffer.ctypes.data))


@compiled
def extremes(x: int, dtype: int, table: int, lows: int, highs: int, parts: int, blocks: int) -> None:
    """The range of every block as float32.

    Args:
        x: address of the tensor, or 0 to join the keys that ``accumulate`` left.
        dtype: its dtype.
        table: address of the layout's table.
        lows: address of room for the smallest elements, or of the keys.
        highs: address of room for the largest elements, or of the keys.
        parts: number of parts whose keys there are; 1 for a tensor.
        blocks: number of blocks.
    """
    if x != 0:
        keys_of(x, dtype, table, lows, highs, blocks)
    join_parts(lows, highs, parts, blocks)


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
        parts: see ``loops.first_part``.
        control: see ``loops.first_part``.
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
        lows: see ``join_parts``.
        highs: see ``join_parts``.
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
    keys = np.empty(2 * blocks if x != 0 else 0, np.int32)
    if x != 0:
        lows = np.int64(keys.ctypes.data)
        highs = lows + 4 * blocks
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
    buffer = np.empty((2, LANES), np.float32)
    room = np.int64(buffer.ctypes.data)
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
