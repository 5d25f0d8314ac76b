"""Weights in packed integer codes: decoded, or multiplied with vectors, straight from their bytes.

A vector of sixteen bytes holds sixteen codes of 8 bits, 32 of 4 or 64 of 2: one in each lane for every *plane*, a shift
of the bytes. Decoding interleaves the planes; multiplication takes the elements of the other factor in the same order
instead, and reads a code's byte once for every row of it.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import store
from .coding import rounded
from .compiling import compiled, inlined
from .lanes import (
    LANES,
    Lanes,
    interleave_high,
    interleave_low,
    load_f32,
    load_i32,
    load_u8,
    multiply_add,
    peek_f32,
    peek_i32,
    poke_f32,
    reduce_add,
    splat,
    splat_int,
    to_float,
)
from .walking import element_bytes, first_part, next_part

__all__ = ["decode_packed_part", "multiply_packed_part", "offset_of", "plane"]


@inlined
def plane(code_bytes: Lanes, number: int, bits: int, flip: int) -> Lanes:
    """One code of each byte, plus ``flip``, which makes two's complement a number without sign."""
    mask = splat_int(np.int32((1 << bits) - 1))
    codes = (code_bytes >> splat_int(np.int32(number * bits))) & mask
    return to_float(codes ^ splat_int(np.int32(flip)))


@inlined
def offset_of(points: int, block: int, common: int) -> Lanes:
    """The number that a block's codes are counted from."""
    own = peek_i32(points + 4 * block) if points != 0 else np.int32(0)
    return splat(np.float32(own + np.int32(common)))


@inlined
def put(codes: Lanes, y: int, dtype: int, scale: Lanes, offset: Lanes, origin: Lanes, shifted: int) -> None:
    """Store what codes stand for."""
    values = (codes - offset) * scale
    if shifted != 0:
        values = values + origin
    store(y, rounded(values, dtype), dtype)


@inlined
def put_vector(
    source: int, bits: int, flip: int, y: int, dtype: int, scale: Lanes, offset: Lanes, origin: Lanes, shifted: int
) -> None:
    """Decode sixteen bytes."""
    size = LANES * element_bytes(dtype)
    code_bytes = load_u8(source)
    first = plane(code_bytes, 0, bits, flip)
    if bits == 8:
        put(first, y, dtype, scale, offset, origin, shifted)
        return
    second = plane(code_bytes, 1, bits, flip)
    if bits == 4:
        put(interleave_low(first, second), y, dtype, scale, offset, origin, shifted)
        put(interleave_high(first, second), y + size, dtype, scale, offset, origin, shifted)
        return
    third, fourth = plane(code_bytes, 2, bits, flip), plane(code_bytes, 3, bits, flip)
    even, odd = interleave_low(first, third), interleave_low(second, fourth)
    put(interleave_low(even, odd), y, dtype, scale, offset, origin, shifted)
    put(interleave_high(even, odd), y + size, dtype, scale, offset, origin, shifted)
    even, odd = interleave_high(first, third), interleave_high(second, fourth)
    put(interleave_low(even, odd), y + 2 * size, dtype, scale, offset, origin, shifted)
    put(interleave_high(even, odd), y + 3 * size, dtype, scale, offset, origin, shifted)


@inlined
def neighbours(code_bytes: Lanes, place: int, bits: int, flip: int) -> Lanes:
    """Sixteen neighbouring codes of sixteen bytes."""
    first = plane(code_bytes, 0, bits, flip)
    if bits == 8:
        return first
    second = plane(code_bytes, 1, bits, flip)
    if bits == 2:
        third, fourth = plane(code_bytes, 2, bits, flip), plane(code_bytes, 3, bits, flip)
        if place < 2:
            first, second = interleave_low(first, third), interleave_low(second, fourth)
        else:
            first, second = interleave_high(first, third), interleave_high(second, fourth)
    return interleave_low(first, second) if place % 2 == 0 else interleave_high(first, second)


@inlined
def put_columns(
    source: int, bits: int, flip: int, common: int, scales: int, points: int, origins: int, length: int,
    y: int, dtype: int,
) -> None:  # fmt: skip
    """Decode a row whose elements each have a block."""
    planes, size = 8 // bits, element_bytes(dtype)
    for vector in range(length // (LANES * planes)):
        code_bytes = load_u8(source + LANES * vector)
        for place in range(planes):
            at = LANES * (planes * vector + place)
            offset, origin = splat(np.float32(common)), splat(np.float32(0))
            if points != 0:
                offset = offset + to_float(load_i32(points + 4 * at))
            if origins != 0:
                origin = load_f32(origins + 4 * at)
            codes, scale = neighbours(code_bytes, place, bits, flip), load_f32(scales + 4 * at)
            put(codes, y + at * size, dtype, scale, offset, origin, origins)


@compiled
def decode_packed_part(
    codes: int, bits: int, flip: int, common: int, scales: int, points: int, origins: int,
    rows: int, length: int, rows_in_block: int, block: int, y: int, dtype: int, parts: int, control: int,
) -> None:  # fmt: skip
    """Decode a matrix.

    Args:
        codes: address of the packed codes; a row is a whole number of vectors.
        bits: 2, 4 or 8.
        flip: the sign bit of two's complement codes, or 0.
        common: what is subtracted from every code, ``flip`` included.
        scales: address of the float32 scales, a row of blocks after the other.
        points: address of int32 zero points, subtracted as well, or 0.
        origins: address of float32 minvals, or 0.
        rows: rows of the matrix.
        length: elements of a row.
        rows_in_block: rows of a block.
        block: elements of a block in a row, a whole number of vectors or 1.
        y: address of the result.
        dtype: its dtype.
        parts: see ``walking.first_part``.
        control: see ``walking.first_part``.
    """
    step = LANES * 8 // bits
    blocks = length // block
    size = element_bytes(dtype)
    part = first_part(control)
    while part < parts:
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            source = codes + row * (length // 8 * bits)
            target = y + row * length * size
            number = row // rows_in_block * blocks
            if block == 1:
                found, own = scales + 4 * number, points + 4 * number if points != 0 else 0
                lowest = origins + 4 * number if origins != 0 else 0
                put_columns(source, bits, flip, common, found, own, lowest, length, target, dtype)
                continue
            for _ in range(blocks):
                scale = splat(peek_f32(scales + 4 * number))
                offset = offset_of(points, number, common)
                origin = splat(peek_f32(origins + 4 * number)) if origins != 0 else splat(np.float32(0))
                for _ in range(block // step):
                    put_vector(source, bits, flip, target, dtype, scale, offset, origin, origins)
                    source += LANES
                    target += step * size
                number += 1
        part = next_part(control, part)


@inlined
def product(source: int, bits: int, flip: int, offset: Lanes, x: int) -> Lanes:
    """Sixteen bytes of codes times the elements of a vector, which lie plane by plane."""
    code_bytes = load_u8(source)
    found = (plane(code_bytes, 0, bits, flip) - offset) * load_f32(x)
    if bits < 8:
        found = multiply_add(plane(code_bytes, 1, bits, flip) - offset, load_f32(x + 4 * LANES), found)
    if bits < 4:
        found = multiply_add(plane(code_bytes, 2, bits, flip) - offset, load_f32(x + 8 * LANES), found)
        found = multiply_add(plane(code_bytes, 3, bits, flip) - offset, load_f32(x + 12 * LANES), found)
    return found


@inlined
def sum_of(x: int, bits: int) -> Lanes:
    """Sum of the elements that belong to sixteen bytes of codes."""
    found = load_f32(x)
    for number in range(1, 8 // bits):
        found = found + load_f32(x + 4 * LANES * number)
    return found


@inlined
def row_product(
    source: int, bits: int, flip: int, common: int, scales: int, points: int, origins: int,
    number: int, length: int, block: int, x: int,
) -> Lanes:  # fmt: skip
    """A row of the matrix times a vector, in sixteen sums."""
    step = LANES * 8 // bits
    total = splat(np.float32(0))
    offset = offset_of(0, 0, common)
    for _ in range(length // block):
        if points != 0:
            offset = offset_of(points, number, common)
        inside = product(source, bits, flip, offset, x)
        for place in range(1, block // step):
            inside = inside + product(source + LANES * place, bits, flip, offset, x + 4 * step * place)
        total = multiply_add(inside, splat(peek_f32(scales + 4 * number)), total)
        if origins != 0:
            outside = sum_of(x, bits)
            for place in range(1, block // step):
                outside = outside + sum_of(x + 4 * step * place, bits)
            total = multiply_add(outside, splat(peek_f32(origins + 4 * number)), total)
        source += LANES * (block // step)
        x += 4 * block
        number += 1
    return total


@inlined
def multiply_rows(
    codes: int, bits: int, flip: int, common: int, scales: int, points: int, origins: int,
    rows: int, length: int, rows_in_block: int, block: int, y: int, x: int, vectors: int, begin: int, end: int,
) -> None:  # fmt: skip
    """Multiply vectors with some of the rows; ``bits`` is a constant of the compiled code."""
    blocks = length // block
    for row in range(begin, end):
        source = codes + row * (length // 8 * bits)
        number = row // rows_in_block * blocks
        for vector in range(vectors):
            at = x + 4 * length * vector
            sums = row_product(source, bits, flip, common, scales, points, origins, number, length, block, at)
            poke_f32(y + 4 * (rows * vector + row), reduce_add(sums))


@compiled
def multiply_packed_part(
    codes: int, bits: int, flip: int, common: int, scales: int, points: int, origins: int,
    rows: int, length: int, rows_in_block: int, block: int, y: int, x: int, vectors: int, parts: int, control: int,
) -> None:  # fmt: skip
    """Multiply vectors with the rows of a matrix, which is decoded on the way.

    Args:
        codes: as in ``decode_packed_part``, like the arguments after it.
        y: address of the float32 results, ``vectors`` rows of ``rows`` numbers.
        x: address of the float32 vectors of ``length`` elements; each group of ``16 * 8 // bits`` plane by plane.
        vectors: number of vectors.
        parts: see ``walking.first_part``.
        control: see ``walking.first_part``.
    """
    part = first_part(control)
    while part < parts:
        begin, end = rows * part // parts, rows * (part + 1) // parts
        if bits == 8:
            multiply_rows(
                codes, 8, flip, common, scales, points, origins, rows, length, rows_in_block, block, y, x, vectors,
                begin, end,
            )  # fmt: skip
        elif bits == 4:
            multiply_rows(
                codes, 4, flip, common, scales, points, origins, rows, length, rows_in_block, block, y, x, vectors,
                begin, end,
            )  # fmt: skip
        else:
            multiply_rows(
                codes, 2, flip, common, scales, points, origins, rows, length, rows_in_block, block, y, x, vectors,
                begin, end,
            )  # fmt: skip
        part = next_part(control, part)
