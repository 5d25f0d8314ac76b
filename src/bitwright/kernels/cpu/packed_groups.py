"""Packed integer codes times groups of eight vectors: two rows at a time, decoded once for all eight.

Sixteen sums stay in registers; each decoded row is used eight times and each load of the vectors twice.
"""

from __future__ import annotations

import numpy as np

from .compiling import compiled, inlined
from .lanes import LANES, Lanes, load_f32, load_u8, multiply_add, peek_f32, poke_f32, reduce_add, splat, splat_int
from .packed import offset_of, plane
from .walking import first_part, next_part

__all__ = ["GROUP", "multiply_packed_groups_part", "shift_of", "unsigned_codes"]

GROUP = 8


@inlined
def shift_of(scale: Lanes, points: int, origins: int, block: int, common: int) -> Lanes:
    """What code 0 of a block stands for."""
    shift = (splat(np.float32(0)) - offset_of(points, block, common)) * scale
    return shift + splat(peek_f32(origins + 4 * block)) if origins != 0 else shift


@inlined
def unsigned_codes(source: int, bits: int, flip: int) -> Lanes:
    """Sixteen bytes of codes, each plus ``flip`` in its bits."""
    repeated = flip * 0x11 if bits == 4 else flip * 0x55
    return load_u8(source) ^ splat_int(np.int32(repeated))


@inlined
def weights(code_bytes: Lanes, number: int, bits: int, scale: Lanes, shift: Lanes) -> Lanes:
    """What the codes of a plane stand for; rounded once, which may be the last digit beside the decoded weight."""
    return multiply_add(plane(code_bytes, number, bits, 0), scale, shift)


@inlined
def add_products(sums: tuple[Lanes, ...], weight: Lanes, x: int) -> tuple[Lanes, ...]:
    """Add a weight times the same elements of eight vectors."""
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    return (
        multiply_add(weight, load_f32(x), s0),
        multiply_add(weight, load_f32(x + 4 * LANES), s1),
        multiply_add(weight, load_f32(x + 8 * LANES), s2),
        multiply_add(weight, load_f32(x + 12 * LANES), s3),
        multiply_add(weight, load_f32(x + 16 * LANES), s4),
        multiply_add(weight, load_f32(x + 20 * LANES), s5),
        multiply_add(weight, load_f32(x + 24 * LANES), s6),
        multiply_add(weight, load_f32(x + 28 * LANES), s7),
    )


@inlined
def put_sums(sums: tuple[Lanes, ...], y: int, rows: int) -> None:
    """Store the sums of a row: one for each vector, ``rows`` numbers apart."""
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    poke_f32(y, reduce_add(s0))
    poke_f32(y + 4 * rows, reduce_add(s1))
    poke_f32(y + 8 * rows, reduce_add(s2))
    poke_f32(y + 12 * rows, reduce_add(s3))
    poke_f32(y + 16 * rows, reduce_add(s4))
    poke_f32(y + 20 * rows, reduce_add(s5))
    poke_f32(y + 24 * rows, reduce_add(s6))
    poke_f32(y + 28 * rows, reduce_add(s7))


@inlined
def multiply_pair(
    codes: int, bits: int, flip: int, common: int, scales: int, points: int, origins: int,
    rows: int, length: int, rows_in_block: int, block: int, y: int, x: int, row: int, other: int,
) -> None:  # fmt: skip
    """Multiply two rows with a group of vectors; ``bits`` is a constant of the compiled code."""
    blocks, step = length // block, LANES * 8 // bits
    zero = splat(np.float32(0))
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    others = sums
    source, other_source = codes + row * (length // 8 * bits), codes + other * (length // 8 * bits)
    number, other_number = row // rows_in_block * blocks, other // rows_in_block * blocks
    for _ in range(blocks):
        scale, other_scale = splat(peek_f32(scales + 4 * number)), splat(peek_f32(scales + 4 * other_number))
        shift = shift_of(scale, points, origins, number, common)
        other_shift = shift_of(other_scale, points, origins, other_number, common)
        for _ in range(block // step):
            code_bytes, other_bytes = unsigned_codes(source, bits, flip), unsigned_codes(other_source, bits, flip)
            for at in range(8 // bits):
                weight = weights(code_bytes, at, bits, scale, shift)
                other_weight = weights(other_bytes, at, bits, other_scale, other_shift)
                sums, others = add_products(sums, weight, x), add_products(others, other_weight, x)
                x += 32 * LANES
            source += LANES
            other_source += LANES
        number += 1
        other_number += 1
    put_sums(sums, y + 4 * row, rows)
    put_sums(others, y + 4 * other, rows)


@compiled
def multiply_packed_groups_part(
    codes: int, bits: int, flip: int, common: int, scales: int, points: int, origins: int,
    rows: int, length: int, rows_in_block: int, block: int, y: int, x: int, groups: int, parts: int, control: int,
) -> None:  # fmt: skip
    """Multiply groups of eight vectors with the rows of a matrix.

    Args:
        codes: as in ``packed.decode_packed_part``, like the arguments after it.
        bits: 2 or 4.
        y: address of the float32 results, for each of the ``8 * groups`` vectors ``rows`` numbers.
        x: address of the float32 vectors, a group after the other; in a group the elements of sixteen bytes of codes
            plane by plane, in a plane sixteen elements of one vector after those of the other.
        groups: number of groups.
        parts: see ``walking.first_part``.
        control: see ``walking.first_part``.
    """
    part = first_part(control)
    while part < parts:
        begin, end = rows * part // parts, rows * (part + 1) // parts
        for group in range(groups):
            given, found = x + 32 * length * group, y + 32 * rows * group
            for row in range(begin, end, 2):
                other = min(row + 1, end - 1)
                if bits == 4:
                    multiply_pair(
                        codes, 4, flip, common, scales, points, origins, rows, length, rows_in_block, block,
                        found, given, row, other,
                    )  # fmt: skip
                else:
                    multiply_pair(
                        codes, 2, flip, common, scales, points, origins, rows, length, rows_in_block, block,
                        found, given, row, other,
                    )  # fmt: skip
        part = next_part(control, part)
