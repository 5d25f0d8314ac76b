"""Fake-quantized values to one byte each and back, without loss.

A byte is ``code - quant_min`` for integers, and for float formats exponent and mantissa with the sign in bit 7.
Encoding checks every element: what its byte decodes to must have the bits of the original.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import BFLOAT16, FLOAT16, FLOAT32, can_multiply, clamp, code_of_float, code_of_integer, load, store
from .compiling import called, compiled, inlined
from .lanes import (
    LANES,
    Lanes,
    Scalar,
    add_product,
    as_bits,
    as_float,
    bf16_of,
    f16_of,
    load_f32,
    load_i32,
    load_u8,
    mask_bits,
    peek_f32,
    peek_i32,
    peek_i64,
    poke_i32,
    rint,
    select,
    splat,
    splat_int,
    store_u8,
    to_float,
)
from .mapping import TILE, row_parameters, spread, tile_room
from .walking import VECTOR, block_of_row, copy, element_bytes, first_part, next_part, vector_room

__all__ = ["code_part", "rounded"]


@inlined
def rounded(values: Lanes, dtype: int) -> Lanes:
    """The float32 nearest in the dtype."""
    if dtype == BFLOAT16:
        return bf16_of(values)
    if dtype == FLOAT16:
        return f16_of(values)
    return values


@inlined
def value_of(codes: Lanes, scale: Lanes, offset: Lanes, origin: Lanes, integer: int, dtype: int) -> Lanes:
    """What a quantized value stands for, in the dtype."""
    values = (codes - offset) * scale + origin if integer else codes * scale
    return rounded(values, dtype)


@inlined
def whole(values: Lanes) -> Lanes:
    """Whole numbers below ``2**23`` as integers: the lower bits of their sum with that number. NaN gives anything."""
    return as_bits(values + splat(np.float32(1 << 23))) & splat_int(np.int32(0x7FFFFF))


@inlined
def byte_of_float(codes: Lanes, smallest: int, anchor: int) -> Lanes:
    """Bit pattern of values that a float format represents; see ``code_of_float``.

    A normal number's pattern is the upper part of its float32 bits with another bias, a subnormal's is its multiple
    of the smallest step.
    """
    shift = (anchor >> 23) & 0xFF
    bits = as_bits(codes)
    magnitude = bits & splat_int(np.int32(0x7FFFFFFF))
    normal = (magnitude >> splat_int(np.int32(shift))) - splat_int(np.int32((smallest - (1 << 23)) >> shift))
    # A step is 2**(smallest exponent - mantissa bits): dividing by it is a change of the exponent.
    steps = np.int32((127 << 23) - (smallest - (127 << 23)) + ((23 - shift) << 23))
    subnormal = whole(as_float(magnitude) * as_float(splat_int(steps)))
    small = magnitude < splat_int(np.int32(smallest))
    field = as_bits(select(small, as_float(subnormal), as_float(normal)))
    sign = (bits >> splat_int(np.int32(31))) & splat_int(np.int32(0x80))
    return field | sign


@inlined
def float_of_byte(byte: Lanes, smallest: int, anchor: int) -> Lanes:
    """The value of a bit pattern that ``byte_of_float`` made."""
    shift = (anchor >> 23) & 0xFF
    field = byte & splat_int(np.int32(0x7F))
    normal = (field + splat_int(np.int32((smallest - (1 << 23)) >> shift))) << splat_int(np.int32(shift))
    step = np.int32(smallest - ((23 - shift) << 23))
    subnormal = as_bits(to_float(field) * as_float(splat_int(step)))
    small = field < splat_int(np.int32(1 << (23 - shift)))
    bits = as_bits(select(small, as_float(subnormal), as_float(normal)))
    sign = (byte & splat_int(np.int32(0x80))) << splat_int(np.int32(24))
    return as_float(bits | sign)


@inlined
def nearest_code(
    values: Lanes, scale: Lanes, offset: Lanes, origin: Lanes, low: Lanes, high: Lanes, integer: int,
    smallest: int, anchor: int, dtype: int,
) -> Lanes:  # fmt: skip
    """The quantized value that decodes to each element, if there is one.

    bfloat16 keeps eight bits, so that a code of eight bits may come back one off: its neighbours are tried too.
    """
    if not integer:
        return code_of_float(clamp(values / scale, low, high), smallest, anchor)
    wanted = as_bits(values)
    codes = clamp(code_of_integer(values, scale, offset, origin), low, high)
    if dtype != BFLOAT16:
        return codes
    below = clamp(codes - splat(np.float32(1)), low, high)
    above = clamp(codes + splat(np.float32(1)), low, high)
    fits = as_bits(value_of(codes, scale, offset, origin, integer, dtype)) == wanted
    found = select(as_bits(value_of(below, scale, offset, origin, integer, dtype)) == wanted, below, above)
    return select(fits, codes, found)


@inlined
def code_vector(
    encode: int, y: int, dtype: int, codes: int, scale: Lanes, offset: Lanes, origin: Lanes, grid: int
) -> Scalar:
    """Encode or decode sixteen elements and return which of them, as bits, are right."""
    integer, smallest, anchor = peek_i32(grid), peek_i32(grid + 16), peek_i32(grid + 20)
    low, high = splat(peek_f32(grid + 8)), splat(peek_f32(grid + 12))
    values = load(y, dtype)
    byte = load_u8(codes)
    if encode != 0:
        found = nearest_code(values, scale, offset, origin, low, high, integer, smallest, anchor, dtype)
        byte = whole(found - low) if integer else byte_of_float(found, smallest, anchor)
        store_u8(codes, byte)
    kept = to_float(byte) + low if integer else float_of_byte(byte, smallest, anchor)
    decoded = value_of(kept, scale, offset, origin, integer, dtype)
    if encode == 0:
        store(y, decoded, dtype)
        return np.int32(0xFFFF)
    return mask_bits(as_bits(decoded) == as_bits(values))


@inlined
def code_vectors(
    encode: int, y: int, dtype: int, anchored: int, codes: int, count: int, scale: Scalar, origin: Scalar,
    least: Scalar, most: Scalar,
) -> Scalar:  # fmt: skip
    """The loop of ``code_row``; the caller gives ``encode``, ``dtype`` and ``anchored`` as constants."""
    size = LANES * element_bytes(dtype)
    steps, origins, nothing = splat(scale), splat(origin), splat(np.float32(0))
    inverse, lowest, highest = splat(np.float32(1) / scale), splat(least), splat(most)
    different = splat_int(np.int32(0))
    for word in range(count):
        at, code_at = y + word * size, codes + word * LANES
        if encode:
            values = load(at, dtype)
            kept = rint((values - origins) * inverse if anchored else values * inverse)
            kept = select(lowest < kept, kept, lowest)  # NaN too is clamped, and found to be different
            kept = select(kept < highest, kept, highest)
            store_u8(code_at, whole(kept - lowest))
        else:
            values = nothing
            kept = to_float(load_u8(code_at)) + lowest
        decoded = add_product(kept, steps, nothing)
        if anchored:
            decoded = decoded + origins
        if encode:
            different = different | (as_bits(rounded(decoded, dtype)) ^ as_bits(values))
        else:
            store(at, decoded, dtype)
    return mask_bits(different == splat_int(np.int32(0))) != 0xFFFF


@inlined
def code_vectors_of(
    encode: int, y: int, dtype: int, anchored: int, codes: int, count: int, scale: Scalar, origin: Scalar,
    least: Scalar, most: Scalar,
) -> Scalar:  # fmt: skip
    """``code_vectors`` with the dtype as a constant."""
    if dtype == FLOAT32:
        return code_vectors(encode, y, FLOAT32, anchored, codes, count, scale, origin, least, most)
    if dtype == BFLOAT16:
        return code_vectors(encode, y, BFLOAT16, anchored, codes, count, scale, origin, least, most)
    return code_vectors(encode, y, FLOAT16, anchored, codes, count, scale, origin, least, most)


@called
def code_row(
    encode: int, y: int, dtype: int, anchored: int, codes: int, count: int, scale: Scalar, origin: Scalar,
    least: Scalar, most: Scalar,
) -> Scalar:  # fmt: skip
    """``code_vector`` for so many vectors of a grid of integers with one scale, and return whether any is wrong.

    Codes are found with the inverse of the scale, which is wrong now and then, and told.

    Args:
        encode: the direction.
        y: address of the values.
        dtype: dtype of the values.
        anchored: see ``mapping.fake_row``.
        codes: address of the bytes.
        count: number of vectors.
        scale: the scale; see ``arithmetic.can_multiply``.
        origin: the minval.
        least: smallest code less the zero point.
        most: largest code less the zero point.
    """
    if anchored != 0:
        if encode != 0:
            return code_vectors_of(True, y, dtype, True, codes, count, scale, origin, least, most)
        return code_vectors_of(False, y, dtype, True, codes, count, scale, origin, least, most)
    if encode != 0:
        return code_vectors_of(True, y, dtype, False, codes, count, scale, origin, least, most)
    return code_vectors_of(False, y, dtype, False, codes, count, scale, origin, least, most)


@called
def code_tiles(
    encode: int, y: int, dtype: int, codes: int, failed: int, scales: int, points: int, origins: int,
    table: int, grid: int, begin: int, end: int,
) -> None:  # fmt: skip
    """Encode or decode the vectors ``begin`` to ``end`` of the flat tensor."""
    last = min(peek_i64(table) * peek_i64(table + 8), end * LANES)
    size = element_bytes(dtype)
    nothing = splat(np.float32(0))
    fixed = splat(peek_f32(grid + 8)) if origins != 0 else nothing
    room = vector_room()
    tile_scales = tile_room()
    tile_points = tile_scales + 4 * (TILE + LANES)
    tile_origins = tile_points + 4 * (TILE + LANES)
    for start in range(begin * LANES, last, TILE):
        length = min(TILE, last - start)
        spread(table, scales, tile_scales, start, length)
        if points != 0:
            spread(table, points, tile_points, start, length)
        if origins != 0:
            spread(table, origins, tile_origins, start, length)
        for inside in range(0, length, LANES):
            scale = load_f32(tile_scales + 4 * inside)
            offset = to_float(load_i32(tile_points + 4 * inside)) if points != 0 else fixed
            origin = load_f32(tile_origins + 4 * inside) if origins != 0 else nothing
            count = min(LANES, length - inside)
            value_at, code_at = y + size * (start + inside), codes + start + inside
            partial = count < LANES
            value_here, code_here = (room, room + VECTOR) if partial else (value_at, code_at)
            if partial:
                copy(value_at, room, size * count)
                copy(code_at, room + VECTOR, count)
            right = code_vector(encode, value_here, dtype, code_here, scale, offset, origin, grid)
            if partial:
                copy(room, value_at, size * count)
                copy(room + VECTOR, code_at, count)
            wanted = (1 << count) - 1
            if (right & wanted) != wanted:
                poke_i32(failed, np.int32(1))


@inlined
def code_rows(
    encode: int, y: int, dtype: int, codes: int, failed: int, scales: int, points: int, origins: int,
    table: int, grid: int, begin: int, end: int,
) -> None:  # fmt: skip
    """Encode or decode the vectors ``begin`` to ``end`` of rows of whole vectors, or of a single row."""
    words = peek_i64(table + 8) // LANES
    size = element_bytes(dtype)
    low, high = peek_f32(grid + 8), peek_f32(grid + 12)
    while begin < end:
        row = begin // words
        stop = min(end, (row + 1) * words)
        block = 4 * block_of_row(table, row)
        scale, point, origin = row_parameters(scales, points, origins, block, low)
        least, most = low - point, high - point
        at = LANES * begin
        if not can_multiply(scale, least, most) or code_row(
            encode, y + size * at, dtype, origins, codes + at, stop - begin, scale, origin, least, most
        ):
            code_tiles(encode, y, dtype, codes, failed, scales, points, origins, table, grid, begin, stop)
        begin = stop


@compiled
def code_part(
    encode: int, y: int, dtype: int, codes: int, failed: int, scales: int, points: int, origins: int,
    table: int, grid: int, words: int, parts: int, control: int,
) -> None:  # fmt: skip
    """Encode values into bytes (``encode`` 1), or decode bytes into values (0).

    Args:
        encode: the direction.
        y: address of the values.
        dtype: dtype of the values.
        codes: address of the bytes.
        failed: address of an int32 that becomes 1 where a value is not what its byte decodes to.
        scales: address of the float32 scales.
        points: address of the int32 zero points, or 0.
        origins: address of the float32 minvals, or 0.
        table: address of the layout's table.
        grid: address of the grid's words.
        words: number of vectors of the flat tensor.
        parts: see ``walking.first_part``.
        control: see ``walking.first_part``.
    """
    rows, length = peek_i64(table), peek_i64(table + 8)
    scaled_in_rows = peek_i64(table + 16) == 0 and peek_i64(table + 24) == 0
    whole_vectors = 0
    if peek_i32(grid) != 0 and scaled_in_rows and length >= LANES and (length % LANES == 0 or rows == 1):
        whole_vectors = rows * (length // LANES)
    part = first_part(control)
    while part < parts:
        begin, end = words * part // parts, words * (part + 1) // parts
        until = min(end, whole_vectors)
        if begin < until:
            code_rows(encode, y, dtype, codes, failed, scales, points, origins, table, grid, begin, until)
            begin = until
        code_tiles(encode, y, dtype, codes, failed, scales, points, origins, table, grid, begin, end)
        part = next_part(control, part)
