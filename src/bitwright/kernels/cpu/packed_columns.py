"""Packed 4-bit codes of a weight that has a row for each input, times vectors.

A *strip* is the 32 neighbouring outputs whose codes lie in sixteen bytes of a row: the even ones in the low halves of
the bytes, the odd ones in the high halves. The sums of a strip stay in registers while the rows go by: those of ``RUN``
rows, whose rounding errors grow with their number, and then the totals of runs. The order is that of the rows always,
so a strip's result does not depend on what is computed beside it.
"""

from __future__ import annotations

import numpy as np

from .compiling import compiled, inlined
from .lanes import (
    LANES,
    Lanes,
    even_lanes,
    interleave_high,
    interleave_low,
    load_f32,
    load_i32,
    multiply_add,
    odd_lanes,
    peek_f32,
    splat,
    store_f32,
    to_float,
)
from .packed import plane
from .packed_groups import shift_of, unsigned_codes
from .walking import VECTOR, first_part, next_part

__all__ = ["GROUP", "LINE", "RUN", "STRIP", "multiply_columns_groups_part", "multiply_columns_part"]

STRIP = 2 * LANES
LINE = 4 * STRIP
"""Outputs whose codes fill a line of the cache."""
GROUP = 8
"""Vectors that are multiplied with a strip at a time."""
RUN = 128
"""Rows whose products are added up before their sum goes to a total."""


@inlined
def parameters(
    scales: int, points: int, origins: int, number: int, block: int, common: int
) -> tuple[Lanes, Lanes, Lanes, Lanes]:
    """Scales of the even and the odd outputs of a strip, and what code 0 stands for there.

    Args:
        number: the strip's first block; each output is a block where ``block`` is 1, else all lie in one.
    """
    if block != 1:
        scale = splat(peek_f32(scales + 4 * number))
        shift = shift_of(scale, points, origins, number, common)
        return scale, scale, shift, shift
    at = 4 * number
    low, high = load_f32(scales + at), load_f32(scales + at + VECTOR)
    negative = splat(np.float32(-common))
    low_shift, high_shift = negative * low, negative * high
    if points != 0:
        low_shift = (negative - to_float(load_i32(points + at))) * low
        high_shift = (negative - to_float(load_i32(points + at + VECTOR))) * high
    if origins != 0:
        low_shift = low_shift + load_f32(origins + at)
        high_shift = high_shift + load_f32(origins + at + VECTOR)
    return (
        even_lanes(low, high),
        odd_lanes(low, high),
        even_lanes(low_shift, high_shift),
        odd_lanes(low_shift, high_shift),
    )


@inlined
def strip_weights(source: int, flip: int, found: tuple[Lanes, Lanes, Lanes, Lanes]) -> tuple[Lanes, Lanes]:
    """What the codes of a strip in a row stand for, up to the rounding of what code 0 stands for."""
    even_scale, odd_scale, even_shift, odd_shift = found
    code_bytes = unsigned_codes(source, 4, flip)
    return (
        multiply_add(plane(code_bytes, 0, 4, 0), even_scale, even_shift),
        multiply_add(plane(code_bytes, 1, 4, 0), odd_scale, odd_shift),
    )


@inlined
def add_weight(sums: tuple[Lanes, ...], weight: Lanes, x: tuple[Lanes, ...]) -> tuple[Lanes, ...]:
    """Add weights times an element of each of eight vectors."""
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    x0, x1, x2, x3, x4, x5, x6, x7 = x
    return (
        multiply_add(weight, x0, s0),
        multiply_add(weight, x1, s1),
        multiply_add(weight, x2, s2),
        multiply_add(weight, x3, s3),
        multiply_add(weight, x4, s4),
        multiply_add(weight, x5, s5),
        multiply_add(weight, x6, s6),
        multiply_add(weight, x7, s7),
    )


@inlined
def add_sums(totals: tuple[Lanes, ...], sums: tuple[Lanes, ...]) -> tuple[Lanes, ...]:
    """Add the sums of a run to the totals."""
    t0, t1, t2, t3, t4, t5, t6, t7 = totals
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    return t0 + s0, t1 + s1, t2 + s2, t3 + s3, t4 + s4, t5 + s5, t6 + s6, t7 + s7


@inlined
def elements(x: int) -> tuple[Lanes, ...]:
    """Eight neighbours in memory, each in all lanes."""
    return (
        splat(peek_f32(x)),
        splat(peek_f32(x + 4)),
        splat(peek_f32(x + 8)),
        splat(peek_f32(x + 12)),
        splat(peek_f32(x + 16)),
        splat(peek_f32(x + 20)),
        splat(peek_f32(x + 24)),
        splat(peek_f32(x + 28)),
    )


@inlined
def put_strip(even: Lanes, odd: Lanes, y: int) -> None:
    """Store the sums of a strip."""
    store_f32(y, interleave_low(even, odd))
    store_f32(y + VECTOR, interleave_high(even, odd))


@inlined
def multiply_strip(
    codes: int, flip: int, common: int, scales: int, points: int, origins: int,
    rows: int, length: int, rows_in_block: int, block: int, y: int, x: int, column: int,
) -> None:  # fmt: skip
    """Multiply a group of vectors with a strip."""
    zero = splat(np.float32(0))
    zeros = (zero, zero, zero, zero, zero, zero, zero, zero)
    even_totals, odd_totals = zeros, zeros
    source, number, row, left = codes + column // 2, column // block, 0, rows_in_block
    while row < rows:
        end = min(row + RUN, rows)
        even, odd = zeros, zeros
        while row < end:
            found = parameters(scales, points, origins, number, block, common)
            count = min(left, end - row)
            for _ in range(count):
                even_weight, odd_weight = strip_weights(source, flip, found)
                values = elements(x)
                even, odd = add_weight(even, even_weight, values), add_weight(odd, odd_weight, values)
                source += length // 2
                x += 4 * GROUP
            row, left = row + count, left - count
            if left == 0:
                number, left = number + length // block, rows_in_block
        even_totals, odd_totals = add_sums(even_totals, even), add_sums(odd_totals, odd)
    y += 4 * column
    for vector in range(GROUP):
        put_strip(even_totals[vector], odd_totals[vector], y + 4 * length * vector)


@inlined
def add_line(
    sums: tuple[Lanes, ...], source: int, flip: int, found: tuple[tuple[Lanes, Lanes, Lanes, Lanes], ...], value: Lanes
) -> tuple[Lanes, ...]:
    """Add the weights of four strips in a row times an element."""
    e0, o0, e1, o1, e2, o2, e3, o3 = sums
    even0, odd0 = strip_weights(source, flip, found[0])
    even1, odd1 = strip_weights(source + LANES, flip, found[1])
    even2, odd2 = strip_weights(source + 2 * LANES, flip, found[2])
    even3, odd3 = strip_weights(source + 3 * LANES, flip, found[3])
    return (
        multiply_add(even0, value, e0),
        multiply_add(odd0, value, o0),
        multiply_add(even1, value, e1),
        multiply_add(odd1, value, o1),
        multiply_add(even2, value, e2),
        multiply_add(odd2, value, o2),
        multiply_add(even3, value, e3),
        multiply_add(odd3, value, o3),
    )


@inlined
def multiply_line(
    codes: int, flip: int, common: int, scales: int, points: int, origins: int,
    rows: int, length: int, rows_in_block: int, block: int, y: int, x: int, column: int,
) -> None:  # fmt: skip
    """Multiply a vector with four strips."""
    zero = splat(np.float32(0))
    zeros = (zero, zero, zero, zero, zero, zero, zero, zero)
    totals = zeros
    source, first, row, left = codes + column // 2, 0, 0, rows_in_block
    c0, c1, c2, c3 = (
        column // block,
        (column + STRIP) // block,
        (column + 2 * STRIP) // block,
        (column + 3 * STRIP) // block,
    )
    while row < rows:
        end = min(row + RUN, rows)
        sums = zeros
        while row < end:
            p0 = parameters(scales, points, origins, first + c0, block, common)
            p1 = parameters(scales, points, origins, first + c1, block, common)
            p2 = parameters(scales, points, origins, first + c2, block, common)
            p3 = parameters(scales, points, origins, first + c3, block, common)
            count = min(left, end - row)
            for _ in range(count):
                sums = add_line(sums, source, flip, (p0, p1, p2, p3), splat(peek_f32(x)))
                source += length // 2
                x += 4
            row, left = row + count, left - count
            if left == 0:
                first, left = first + length // block, rows_in_block
        totals = add_sums(totals, sums)
    e0, o0, e1, o1, e2, o2, e3, o3 = totals
    y += 4 * column
    put_strip(e0, o0, y)
    put_strip(e1, o1, y + 2 * VECTOR)
    put_strip(e2, o2, y + 4 * VECTOR)
    put_strip(e3, o3, y + 6 * VECTOR)


@compiled
def multiply_columns_part(
    codes: int, bits: int, flip: int, common: int, scales: int, points: int, origins: int,
    rows: int, length: int, rows_in_block: int, block: int, y: int, x: int, vectors: int, parts: int, control: int,
) -> None:  # fmt: skip
    """Multiply a few vectors with a matrix that has a row for each of their elements.

    Args:
        codes: as in ``packed.decode_packed_part``, like the arguments after it.
        bits: 4.
        length: a multiple of ``STRIP``, at least ``LINE``.
        y: address of the float32 results, ``vectors`` rows of ``length`` numbers.
        x: address of the float32 vectors of ``rows`` elements.
        vectors: number of vectors.
        parts: see ``walking.first_part``.
        control: see ``walking.first_part``.
    """
    lines = (length + LINE - 1) // LINE
    part = first_part(control)
    while part < parts:
        for line in range(lines * part // parts, lines * (part + 1) // parts):
            column = min(line * LINE, length - LINE)
            for vector in range(vectors):
                multiply_line(
                    codes, flip, common, scales, points, origins, rows, length, rows_in_block, block,
                    y + 4 * length * vector, x + 4 * rows * vector, column,
                )  # fmt: skip
        part = next_part(control, part)


@compiled
def multiply_columns_groups_part(
    codes: int, bits: int, flip: int, common: int, scales: int, points: int, origins: int,
    rows: int, length: int, rows_in_block: int, block: int, y: int, x: int, groups: int, parts: int, control: int,
) -> None:  # fmt: skip
    """Multiply groups of eight vectors with a matrix that has a row for each of their elements.

    Args:
        codes: as in ``packed.decode_packed_part``, like the arguments after it.
        bits: 4.
        length: a multiple of ``STRIP``.
        y: address of the float32 results, for each of the ``GROUP * groups`` vectors ``length`` numbers.
        x: address of the float32 vectors, a group after the other; in a group the first elements of all vectors, then
            the second.
        groups: number of groups.
        parts: see ``walking.first_part``.
        control: see ``walking.first_part``.
    """
    strips = length // STRIP
    part = first_part(control)
    while part < parts:
        for group in range(groups):
            for strip in range(strips * part // parts, strips * (part + 1) // parts):
                multiply_strip(
                    codes, flip, common, scales, points, origins, rows, length, rows_in_block, block,
                    y + 4 * GROUP * length * group, x + 4 * GROUP * rows * group, strip * STRIP,
                )  # fmt: skip
        part = next_part(control, part)
