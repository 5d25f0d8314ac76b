"""The loops that map a tensor element by element: fake-quantize, quantize, dequantize, and the gradient.

Every function takes addresses and the layout's table (``layout.Layout``). Several threads may run one function at the
same time and share its parts. Work is counted in words: vectors of sixteen elements, each with a word in the mask. Rows
that are too short for vectors are walked in flat vectors, for which the parameters are first spread out, a tile at a
time. The last few elements of a row pass through a buffer of a whole vector.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    can_multiply,
    clamp,
    code_of_float,
    code_of_integer,
    first_value,
    load,
    quotient,
    store,
)
from .compiling import called, compiled, inlined
from .lanes import (
    LANES,
    Lanes,
    Scalar,
    add_product,
    as_bits,
    from_mask,
    load_f32,
    load_i32,
    load_mask,
    mask_bits,
    peek_f32,
    peek_i16,
    peek_i32,
    peek_i64,
    poke_i32,
    rint,
    splat,
    splat_int,
    stack_room,
    store_bf16_normal,
    store_i32,
    store_mask,
    store_u8,
    subtract_product,
    to_float,
)
from .walking import VECTOR, block_of_row, copy, element_bytes, first_part, next_part, staged, vector_room

__all__ = [
    "CODES",
    "FAKE",
    "TILE",
    "VALUES",
    "all_set",
    "last_step",
    "map_fake",
    "map_flat",
    "map_part",
    "map_rows",
    "map_words",
    "mask_part",
    "row_parameters",
    "spread",
    "step",
    "tile_room",
]

FAKE, CODES, VALUES = 0, 1, 2
TILE = 32 * LANES
# Vectors of a row from which on it is worth while to find out the first and the last value inside its range.
_LONG = 16

tile_room = stack_room(3 * 4 * (TILE + LANES))


@inlined
def step(
    op: int, x: int, in_dtype: int, y: int, out_dtype: int, mask: int,
    scale: Lanes, offset: Lanes, origin: Lanes, low: Lanes, high: Lanes, integer: int, smallest: int, anchor: int,
) -> None:  # fmt: skip
    """Map sixteen elements; ``mask`` is where their bits go, or 0."""
    codes = load(x, in_dtype)
    if op != VALUES:
        unclamped = code_of_integer(codes, scale, offset, origin) if integer else codes / scale
        if mask != 0:
            store_mask(mask, (low <= unclamped) & (unclamped <= high))
        codes = clamp(unclamped, low, high)
        if not integer:
            codes = code_of_float(codes, smallest, anchor)
    if op != CODES:
        codes = (codes - offset) * scale + origin if integer else codes * scale
    store(y, codes, out_dtype)


@called
def last_step(
    op: int, x: int, in_dtype: int, y: int, out_dtype: int, mask: int,
    scale: Lanes, offset: Lanes, origin: Lanes, low: Lanes, high: Lanes, integer: int, smallest: int, anchor: int,
    count: int, buffer: int,
) -> None:  # fmt: skip
    """``step`` for fewer than sixteen elements; ``buffer`` has room for two vectors."""
    source = staged(x, buffer, count * element_bytes(in_dtype))
    target = buffer + VECTOR
    step(
        op, source, in_dtype, target, out_dtype, mask,
        scale, offset, origin, low, high, integer, smallest, anchor,
    )  # fmt: skip
    copy(target, y, count * element_bytes(out_dtype))


@inlined
def fake_vectors(
    x: int, y: int, dtype: int, anchored: int, mask: int, coded: int, bytes_at: int, count: int, scale: Scalar,
    origin: Scalar, least: Scalar, most: Scalar,
) -> Scalar:  # fmt: skip
    """The loop of ``fake_row`` and ``fake_coded_row``; ``dtype``, ``anchored`` and ``coded`` are constants."""
    size = LANES * element_bytes(dtype)
    steps, origins, nothing = splat(scale), splat(origin), splat(np.float32(0))
    inverse = splat(np.float32(1) / scale)
    rest = subtract_product(inverse, steps, splat(np.float32(1))) * inverse
    lowest, highest = splat(least), splat(most)
    # Values are clamped before they are divided, which keeps infinities away. Whether that changes a value tells
    # whether it lies outside, where the first and the last value inside are known, which takes a while to find out.
    # Where they are not, some is left of what lies outside.
    exact = mask != 0 and count >= _LONG
    margin = np.float32(0 if mask == 0 else 1)
    bottom, top = (least - margin) * scale, (most + margin) * scale
    if exact:
        bottom, top = first_value(least, scale), -first_value(-most, scale)
    smallest, largest = splat(bottom), splat(top)
    numbers, shift = nothing, splat(np.float32(1 << 23) - least)
    for word in range(count):
        values = load(x + word * size, dtype)
        if anchored:
            values = values - origins
        kept = clamp(values, smallest, largest)
        codes = rint(quotient(kept, steps, inverse, rest))
        if exact:
            store_mask(mask + 2 * word, values == kept)
        elif mask != 0:
            kept = clamp(codes, lowest, highest)
            store_mask(mask + 2 * word, codes == kept)
            codes = kept
        if coded:
            store_u8(bytes_at + word * LANES, as_bits(codes + shift))  # the lowest bits are those of codes - least
            numbers = add_product(codes, nothing, numbers)  # NaN from the first NaN on
        # Zero has no sign in a grid of integers, which shows where the origin is minus zero.
        result = add_product(codes, steps, nothing)
        if anchored:
            result = result + origins
        if dtype == BFLOAT16 and not anchored:
            store_bf16_normal(y + word * size, result)
        else:
            store(y + word * size, result, dtype)
    return coded and mask_bits(numbers <= nothing) != 0xFFFF


@inlined
def fake_vectors_of(
    x: int, y: int, dtype: int, anchored: int, mask: int, coded: int, bytes_at: int, count: int, scale: Scalar,
    origin: Scalar, least: Scalar, most: Scalar,
) -> Scalar:  # fmt: skip
    """``fake_vectors`` with the dtype as a constant."""
    if dtype == FLOAT32:
        return fake_vectors(x, y, FLOAT32, anchored, mask, coded, bytes_at, count, scale, origin, least, most)
    if dtype == BFLOAT16:
        return fake_vectors(x, y, BFLOAT16, anchored, mask, coded, bytes_at, count, scale, origin, least, most)
    return fake_vectors(x, y, FLOAT16, anchored, mask, coded, bytes_at, count, scale, origin, least, most)


@called
def fake_row(
    x: int, y: int, dtype: int, anchored: int, mask: int, count: int, scale: Scalar, origin: Scalar,
    least: Scalar, most: Scalar,
) -> None:  # fmt: skip
    """``step`` for so many vectors of a grid of integers with one scale: loops without a branch or a division.

    Args:
        x: address of the input.
        y: address of the output, of the same dtype.
        dtype: dtype of both.
        anchored: whether codes count from ``origin``, else from zero.
        mask: where the bits go, or 0.
        count: number of vectors.
        scale: the scale; see ``can_multiply``.
        origin: the minval.
        least: smallest code less the zero point.
        most: largest code less the zero point.
    """
    if anchored != 0:
        fake_vectors_of(x, y, dtype, True, mask, False, 0, count, scale, origin, least, most)
    else:
        fake_vectors_of(x, y, dtype, False, mask, False, 0, count, scale, origin, least, most)


@called
def fake_coded_row(
    x: int, y: int, dtype: int, anchored: int, mask: int, codes: int, count: int, scale: Scalar, origin: Scalar,
    least: Scalar, most: Scalar,
) -> Scalar:  # fmt: skip
    """``fake_row`` with a mask, which also writes a byte for each element, ``code - quant_min``, to ``codes``.

    It takes at most 256 codes, and returns whether some element is NaN, which has no byte.
    """
    if anchored != 0:
        return fake_vectors_of(x, y, dtype, True, mask, True, codes, count, scale, origin, least, most)
    return fake_vectors_of(x, y, dtype, False, mask, True, codes, count, scale, origin, least, most)


@inlined
def row_parameters(scales: int, points: int, origins: int, block: int, lowest: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """Scale, zero point and minval at an offset in bytes; with minvals codes count from the lowest one.

    Args:
        scales: as in ``map_part``.
        points: as in ``map_part``.
        origins: as in ``map_part``.
        block: offset of the block's parameters.
        lowest: smallest code.
    """
    point, origin = np.float32(0), np.float32(0)
    if points != 0:
        point = np.float32(peek_i32(points + block))
    if origins != 0:
        point, origin = lowest, peek_f32(origins + block)
    return peek_f32(scales + block), point, origin


@inlined
def map_rows(
    op: int, x: int, in_dtype: int, y: int, out_dtype: int, mask: int, scales: int, points: int, origins: int,
    table: int, grid: int, begin: int, end: int, buffer: int,
) -> None:  # fmt: skip
    """Map the words ``begin`` to ``end``, a row after the other; ``buffer`` has room for two vectors."""
    length, per_element = peek_i64(table + 8), peek_i64(table + 16)
    words = (length + LANES - 1) // LANES
    in_bytes, out_bytes = element_bytes(in_dtype), element_bytes(out_dtype)
    # Read before the loop: for all that the compiler knows, writing the output could change the table.
    integer, smallest, anchor = peek_i32(grid), peek_i32(grid + 16), peek_i32(grid + 20)
    lowest, highest = peek_f32(grid + 8), peek_f32(grid + 12)
    low, high = splat(lowest), splat(highest)
    plain = op == FAKE and integer != 0 and in_dtype == out_dtype and per_element == 0
    row = begin // words
    word = begin - row * words
    while begin < end:
        stop = min(words, word + end - begin)
        block = 4 * block_of_row(table, row)
        width, point, start = row_parameters(scales, points, origins, block, lowest)
        scale, offset, origin = splat(width), splat(point), splat(start)
        bits = mask + 2 * begin if mask != 0 else 0
        last = min(length - length % LANES, stop * LANES)
        begun = word * LANES
        if plain and last > begun and can_multiply(width, lowest - point, highest - point):
            at, vectors = row * length + begun, (last - begun) // LANES
            fake_row(
                x + at * in_bytes, y + at * in_bytes, in_dtype, origins, bits, vectors,
                width, start, lowest - point, highest - point,
            )  # fmt: skip
            if mask != 0:
                bits += 2 * vectors
            begun = last
        for first in range(begun, last, LANES):
            if per_element != 0:
                scale = load_f32(scales + block + 4 * first)
                if points != 0:
                    offset = to_float(load_i32(points + block + 4 * first))
                if origins != 0:
                    origin = load_f32(origins + block + 4 * first)
            at = row * length + first
            step(
                op, x + at * in_bytes, in_dtype, y + at * out_bytes, out_dtype, bits,
                scale, offset, origin, low, high, integer, smallest, anchor,
            )  # fmt: skip
            if mask != 0:
                bits += 2
        if last < length and stop == words:
            rest = length - last
            if per_element != 0:
                scale = load_f32(staged(scales + block + 4 * last, buffer, 4 * rest))
                if points != 0:
                    offset = to_float(load_i32(staged(points + block + 4 * last, buffer, 4 * rest)))
                if origins != 0:
                    origin = load_f32(staged(origins + block + 4 * last, buffer, 4 * rest))
            at = row * length + last
            last_step(
                op, x + at * in_bytes, in_dtype, y + at * out_bytes, out_dtype, bits,
                scale, offset, origin, low, high, integer, smallest, anchor, rest, buffer,
            )  # fmt: skip
        begin += stop - word
        row += 1
        word = 0


@inlined
def spread(table: int, source: int, target: int, first: int, count: int) -> None:
    """Copy the 4-byte parameter of each of ``count`` elements from ``first`` on to ``target``."""
    length, per_element = peek_i64(table + 8), peek_i64(table + 16)
    row = first // length
    inside = first - row * length
    done = 0
    while done < count:
        block = source + 4 * block_of_row(table, row)
        until = min(count, done + length - inside)
        if per_element != 0:
            copy(block + 4 * inside, target + 4 * done, 4 * (until - done))
        else:
            # Whole vectors: what they write too far belongs to the next row or lies beyond the tile.
            value = splat_int(peek_i32(block))
            for place in range(done, until, LANES):
                store_i32(target + 4 * place, value)
        done = until
        inside = 0
        row += 1


@inlined
def map_flat(
    op: int, x: int, in_dtype: int, y: int, out_dtype: int, mask: int, scales: int, points: int, origins: int,
    table: int, grid: int, begin: int, end: int, buffer: int,
) -> None:  # fmt: skip
    """Map the vectors ``begin`` to ``end`` of the flat tensor; ``buffer`` has room for two vectors."""
    last = min(peek_i64(table) * peek_i64(table + 8), end * LANES)
    in_bytes, out_bytes = element_bytes(in_dtype), element_bytes(out_dtype)
    # Read before the loop: for all that the compiler knows, writing the output could change the table.
    integer, smallest, anchor = peek_i32(grid), peek_i32(grid + 16), peek_i32(grid + 20)
    low, high = splat(peek_f32(grid + 8)), splat(peek_f32(grid + 12))
    nothing = splat(np.float32(0))
    fixed = low if origins != 0 else nothing
    tile_scales = tile_room()
    tile_points = tile_scales + 4 * (TILE + LANES)
    tile_origins = tile_points + 4 * (TILE + LANES)
    for start in range(begin * LANES, last, TILE):
        size = min(TILE, last - start)
        spread(table, scales, tile_scales, start, size)
        if points != 0:
            spread(table, points, tile_points, start, size)
        if origins != 0:
            spread(table, origins, tile_origins, start, size)
        for inside in range(0, size, LANES):
            scale = load_f32(tile_scales + 4 * inside)
            offset = to_float(load_i32(tile_points + 4 * inside)) if points != 0 else fixed
            origin = load_f32(tile_origins + 4 * inside) if origins != 0 else nothing
            at = start + inside
            bits = mask + at // 8 if mask != 0 else 0
            if inside + LANES <= size:
                step(
                    op, x + at * in_bytes, in_dtype, y + at * out_bytes, out_dtype, bits,
                    scale, offset, origin, low, high, integer, smallest, anchor,
                )  # fmt: skip
            else:
                last_step(
                    op, x + at * in_bytes, in_dtype, y + at * out_bytes, out_dtype, bits,
                    scale, offset, origin, low, high, integer, smallest, anchor, size - inside, buffer,
                )  # fmt: skip


@inlined
def map_words(
    op: int, x: int, in_dtype: int, y: int, out_dtype: int, mask: int, scales: int, points: int, origins: int,
    table: int, grid: int, begin: int, end: int, buffer: int,
) -> None:  # fmt: skip
    """Map the words ``begin`` to ``end`` as the layout has them; ``buffer`` has room for two vectors."""
    if peek_i64(table + 24) != 0:
        map_flat(op, x, in_dtype, y, out_dtype, mask, scales, points, origins, table, grid, begin, end, buffer)
    else:
        map_rows(op, x, in_dtype, y, out_dtype, mask, scales, points, origins, table, grid, begin, end, buffer)


@inlined
def map_fake(
    x: int, dtype: int, y: int, mask: int, codes: int, failed: int, scales: int, points: int, origins: int,
    table: int, grid: int, begin: int, end: int, buffer: int,
) -> None:  # fmt: skip
    """``map_words`` for fake quantization, which can also write a byte for each element, ``code - quant_min``.

    That is for whole vectors with a mask, integers of at most eight bits and a single scale: ``codes`` is where the
    bytes go, or 0, and the int32 at ``failed`` becomes 1 if some element has none.
    """
    lowest, highest = peek_f32(grid + 8), peek_f32(grid + 12)
    scale, point, origin = np.float32(0), np.float32(0), np.float32(0)
    if codes != 0:
        scale, point, origin = row_parameters(scales, points, origins, 0, lowest)
    at = LANES * element_bytes(dtype) * begin
    if codes == 0 or not can_multiply(scale, lowest - point, highest - point):
        map_words(FAKE, x, dtype, y, dtype, mask, scales, points, origins, table, grid, begin, end, buffer)
        if codes != 0:
            poke_i32(failed, np.int32(1))
    elif fake_coded_row(
        x + at, y + at, dtype, origins, mask + 2 * begin, codes + LANES * begin, end - begin,
        scale, origin, lowest - point, highest - point,
    ):  # fmt: skip
        poke_i32(failed, np.int32(1))


@compiled
def map_part(
    op: int, x: int, in_dtype: int, y: int, out_dtype: int, mask: int, scales: int, points: int, origins: int,
    table: int, grid: int, words: int, parts: int, control: int,
) -> None:  # fmt: skip
    """Fake-quantize, quantize or dequantize a tensor.

    Args:
        op: ``FAKE``, ``CODES`` or ``VALUES``.
        x: address of the input.
        in_dtype: its dtype.
        y: address of the output.
        out_dtype: its dtype.
        mask: address of the mask of one bit per element, or 0.
        scales: address of the float32 scales.
        points: address of the int32 zero points, or 0 for none.
        origins: address of the float32 minvals, or 0 for the formulation with zero points.
        table: address of the layout's table.
        grid: address of the grid's words.
        words: number of vectors.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    room = vector_room()
    part = first_part(control)
    while part < parts:
        begin, end = words * part // parts, words * (part + 1) // parts
        map_words(op, x, in_dtype, y, out_dtype, mask, scales, points, origins, table, grid, begin, end, room)
        part = next_part(control, part)


@inlined
def set_until(mask: int, begin: int, end: int) -> Scalar:
    """The first of the words ``begin`` to ``end`` of a mask, or one of the three before it, that has a zero."""
    word = begin
    while word + 4 <= end and peek_i64(mask + 2 * word) == -1:
        word += 4
    return word


@compiled
def all_set(mask: int, words: int) -> bool:
    """Return whether a mask of so many words has no zero."""
    word = set_until(mask, 0, words)
    while word < words and peek_i16(mask + 2 * word) == -1:
        word += 1
    return bool(word == words)


@compiled
def mask_part(
    gradient: int, mask: int, out: int, dtype: int, length: int, total: int, parts: int, control: int
) -> None:  # fmt: skip
    """Multiply by the mask: the gradient of a fake quantizer.

    Args:
        gradient: address of the incoming gradient.
        mask: address of the bits that ``map_part`` wrote.
        out: address of the outgoing gradient, which may be the same.
        dtype: dtype of both gradients.
        length: elements after which the mask starts a new word.
        total: number of words.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    words = (length + LANES - 1) // LANES
    size = element_bytes(dtype)
    room = vector_room()
    part = first_part(control)
    while part < parts:
        word, end = total * part // parts, total * (part + 1) // parts
        while word < end:
            if out == gradient:
                word = set_until(mask, word, end)
                if word == end:
                    break
            row = word // words
            first = (word - row * words) * LANES
            stop = min(end, word + (4 if out == gradient else words - (word - row * words)))
            while word < stop:
                at = size * (row * length + first)
                factors = from_mask(load_mask(mask + 2 * word))
                count = length - first
                if count >= LANES:
                    store(out + at, load(gradient + at, dtype) * factors, dtype)
                else:
                    store(room + VECTOR, load(staged(gradient + at, room, size * count), dtype) * factors, dtype)
                    copy(room + VECTOR, out + at, size * count)
                word += 1
                first += LANES
                if first >= length:
                    first = 0
                    row += 1
        part = next_part(control, part)
