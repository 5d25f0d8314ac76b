"""The loops that find the range of every block.

Ranges travel as order keys (``arithmetic.order_key``) while they are widened, and as float32 in the same memory after
``join_parts``.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import has_nan, load, order_key, value_of_key
from .compiling import compiled, inlined
from .lanes import (
    LANES,
    Scalar,
    keep_first,
    load_i32,
    maximum,
    minimum,
    peek_i32,
    peek_i64,
    poke_f32,
    poke_i32,
    reduce_max,
    reduce_min,
    splat_int,
    store_i32,
)
from .walking import block_of_row, copy, element_bytes, first_part, next_part, staged, vector_room

__all__ = [
    "HIGHEST",
    "LOWEST",
    "accumulate",
    "extremes",
    "join_parts",
    "keys_of",
    "range_of_keys",
    "range_of_row",
    "widen",
]

HIGHEST, LOWEST = (1 << 31) - 1, -(1 << 31)


@inlined
def range_of_row(x: int, dtype: int, length: int, buffer: int) -> tuple[Scalar, Scalar]:
    """Smallest and largest order key of ``length`` elements; ``buffer`` has room for a vector."""
    low, high = splat_int(np.int32(HIGHEST)), splat_int(np.int32(LOWEST))
    size = element_bytes(dtype)
    last = length - length % LANES
    for first in range(0, last, LANES):
        keys = order_key(load(x + size * first, dtype))
        low, high = minimum(low, keys), maximum(high, keys)
    if last < length:
        copy(x + size * last, buffer, size * (length - last))
        keys = order_key(load(buffer, dtype))
        low = minimum(low, keep_first(keys, low, length - last))
        high = maximum(high, keep_first(keys, high, length - last))
    return reduce_min(low), reduce_max(high)


@inlined
def widen(x: int, dtype: int, table: int, lows: int, highs: int, begin: int, end: int, buffer: int) -> None:
    """Widen the ranges of the blocks by the words ``begin`` to ``end``; ``buffer`` has room for a vector.

    Args:
        x: address of the tensor.
        dtype: its dtype.
        table: address of the layout's table.
        lows: address of the int32 order keys of the smallest elements so far.
        highs: address of those of the largest.
        begin: first word; every row starts a word.
        end: the word after the last.
        buffer: address of the buffer.
    """
    length, per_element = peek_i64(table + 8), peek_i64(table + 16)
    size = element_bytes(dtype)
    words = (length + LANES - 1) // LANES
    row = begin // words
    word = begin - row * words
    while begin < end:
        stop = min(words, word + end - begin)
        block = 4 * block_of_row(table, row)
        first, last = word * LANES, min(length, stop * LANES)
        at = x + size * (row * length + first)
        if per_element == 0:
            low, high = range_of_row(at, dtype, last - first, buffer)
            poke_i32(lows + block, min(peek_i32(lows + block), low))
            poke_i32(highs + block, max(peek_i32(highs + block), high))
        else:
            widen_each(at, dtype, lows + block + 4 * first, highs + block + 4 * first, last - first, buffer)
        begin += stop - word
        row += 1
        word = 0


@inlined
def widen_each(x: int, dtype: int, lows: int, highs: int, length: int, buffer: int) -> None:
    """Widen one range per element."""
    size = element_bytes(dtype)
    whole = length - length % LANES
    for first in range(0, whole, LANES):
        keys = order_key(load(x + size * first, dtype))
        store_i32(lows + 4 * first, minimum(load_i32(lows + 4 * first), keys))
        store_i32(highs + 4 * first, maximum(load_i32(highs + 4 * first), keys))
    if whole < length:
        keys = order_key(load(staged(x + size * whole, buffer, size * (length - whole)), dtype))
        store_i32(buffer, keys)
        for place in range(length - whole):
            key, here = peek_i32(buffer + 4 * place), 4 * (whole + place)
            poke_i32(lows + here, min(peek_i32(lows + here), key))
            poke_i32(highs + here, max(peek_i32(highs + here), key))


@compiled
def accumulate(
    x: int,
    dtype: int,
    table: int,
    lows: int,
    highs: int,
    blocks: int,
    groups: int,
    words: int,
    parts: int,
    control: int,
) -> None:
    """Find the order keys of the blocks' extremes, which the caller has set to ``HIGHEST`` and ``LOWEST``.

    Args:
        x: address of the tensor.
        dtype: its dtype.
        table: address of the layout's table.
        lows: address of the keys of the smallest elements: one set, or one for each part.
        highs: address of those of the largest.
        blocks: number of blocks if every part has its own set, else 0.
        groups: number of groups of rows that share no block, among which one set is divided; else ``words``.
        words: number of words, every row starting one.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    room = vector_room()
    part = first_part(control)
    while part < parts:
        begin, end = groups * part // parts, groups * (part + 1) // parts
        shift = 4 * blocks * part
        each = words // groups
        widen(x, dtype, table, lows + shift, highs + shift, begin * each, end * each, room)
        part = next_part(control, part)


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
def keys_of(x: int, dtype: int, table: int, lows: int, highs: int, blocks: int) -> None:
    """Order keys of the extremes of a whole tensor."""
    for block in range(blocks):
        poke_i32(lows + 4 * block, np.int32(HIGHEST))
        poke_i32(highs + 4 * block, np.int32(LOWEST))
    words = peek_i64(table) * ((peek_i64(table + 8) + LANES - 1) // LANES)
    widen(x, dtype, table, lows, highs, 0, words, vector_room())


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
