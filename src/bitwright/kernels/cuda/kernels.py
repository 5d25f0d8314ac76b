"""The Triton kernels: what ``cpu.mapping``, ``cpu.ranges`` and ``cpu.choosing`` are for the CPU.

A mask holds one bit per element in words of 32, in the order of memory. Ranges are found as order keys with atomic
minima and maxima of integers, whose result does not depend on the order of the threads.
"""

from __future__ import annotations

import triton.language as tl

from .arithmetic import (
    block_of_row,
    byte_of,
    choose,
    code_of,
    code_of_byte,
    jitted,
    jitted_for_all,
    narrow,
    order_key,
    round_to,
    unclamped,
    value_of,
    value_of_key,
    widen,
)

__all__ = [
    "choose_kernel",
    "map_kernel",
    "mask_kernel",
    "observe_rows_kernel",
    "partial_ranges_kernel",
    "range_kernel",
    "track_whole_kernel",
]

_RUNS = ("n1", "n2", "n3", "s0", "s1", "s2", "s3")


@jitted
def _parameters(
    scales: tl.tensor,
    points: tl.tensor,
    origins: tl.tensor,
    block: tl.tensor,
    low: tl.tensor,
    POINTS: tl.constexpr,
    ORIGINS: tl.constexpr,
) -> tl.tensor:
    """Scale, code offset and float offset of a block, or of each element's block; the block must be there."""
    scale = tl.load(scales + block)
    offset = tl.zeros_like(scale)
    origin = tl.zeros_like(scale)
    if POINTS:
        offset = tl.load(points + block).to(tl.float32)
    if ORIGINS:
        offset = tl.zeros_like(scale) + low
        origin = tl.load(origins + block)
    return scale, offset, origin


@jitted_for_all("length", *_RUNS)
def map_kernel(
    x: tl.tensor,
    y: tl.tensor,
    mask: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    points: tl.tensor,
    origins: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    smallest: tl.tensor,
    anchor: tl.tensor,
    numel: tl.tensor,
    length: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
    n3: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
    s3: tl.tensor,
    OP: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    INTEGER: tl.constexpr,
    POINTS: tl.constexpr,
    ORIGINS: tl.constexpr,
    MASK: tl.constexpr,
    DATA: tl.constexpr,
    OUTER: tl.constexpr,
    PER_ELEMENT: tl.constexpr,
    TOGETHER: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Fake-quantize (``OP`` 0), quantize (1) or dequantize (2) ``SIZE`` elements per program.

    With ``DATA``, operation 0 writes a byte for each element too, and operation 2 reads those and the mask.
    ``TOGETHER`` says that the elements of a program lie in one row, so that their block is asked for once. ``LENGTH``
    is the length where the compiler is to know it, else 0.
    """
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    at = program * SIZE + tl.arange(0, SIZE)
    inside = at < numel
    if TOGETHER:
        block = block_of_row(program * SIZE // length, n1, n2, n3, s0, s1, s2, s3, OUTER)
    else:
        last = tl.minimum(at, numel - 1)
        if LENGTH:
            row = last // LENGTH
            column = last % LENGTH
        else:
            row = last // length
            column = last - row * length
        block = block_of_row(row, n1, n2, n3, s0, s1, s2, s3, OUTER)
        if PER_ELEMENT:
            block += column
    scale, offset, origin = _parameters(scales, points, origins, block, low, POINTS, ORIGINS)
    if OP == 2 and DATA:
        kept = (tl.load(mask + at // 32, mask=inside, other=0) >> (at % 32).to(tl.int32)) & 1
        codes = code_of_byte(tl.load(data + at, mask=inside, other=0), kept, low, smallest, anchor, INTEGER)
    else:
        codes = widen(tl.load(x + at, mask=inside, other=0), IN)
    if OP != 2:
        pre = unclamped(codes, scale, offset, origin, INTEGER)
        if MASK:
            bits = ((pre >= low) & (pre <= high)).to(tl.int32)
            words = tl.sum(tl.reshape(bits, (SIZE // 32, 32)) << tl.arange(0, 32)[None, :], axis=1)
            place = program * (SIZE // 32) + tl.arange(0, SIZE // 32)
            tl.store(mask + place, words, mask=place * 32 < numel)
        codes = code_of(pre, low, high, smallest, anchor, INTEGER)
        if DATA:
            tl.store(data + at, byte_of(codes, low, smallest, anchor, INTEGER), mask=inside)
    if OP != 1:
        codes = value_of(codes, scale, offset, origin, INTEGER)
    tl.store(y + at, narrow(codes, OUT), mask=inside)


@jitted
def mask_kernel(
    gradient: tl.tensor,
    mask: tl.tensor,
    out: tl.tensor,
    numel: tl.tensor,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Multiply ``SIZE`` elements per program by their bits."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    at = program * SIZE + tl.arange(0, SIZE)
    inside = at < numel
    words = tl.load(mask + at // 32, mask=inside, other=0)
    bits = ((words >> (at % 32).to(tl.int32)) & 1).to(tl.float32)
    values = widen(tl.load(gradient + at, mask=inside, other=0), DTYPE) * bits
    tl.store(out + at, narrow(values, DTYPE), mask=inside)


@jitted_for_all("tiles", *_RUNS)
def range_kernel(
    x: tl.tensor,
    lows: tl.tensor,
    highs: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    tiles: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
    n3: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
    s3: tl.tensor,
    DTYPE: tl.constexpr,
    OUTER: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Widen the ranges of blocks by a tile of ``ROWS`` times ``COLUMNS`` elements; ``tiles`` of them cross a row."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    row = program // tiles * ROWS + tl.arange(0, ROWS)
    column = program % tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < length)[None, :]
    values = widen(tl.load(x + row[:, None] * length + column[None, :], mask=inside, other=0), DTYPE)
    keys = order_key(values)
    least = tl.min(tl.where(inside, keys, 2147483647), axis=1)
    most = tl.max(tl.where(inside, keys, -2147483648), axis=1)
    block = block_of_row(row, n1, n2, n3, s0, s1, s2, s3, OUTER)
    tl.atomic_min(lows + block, least, mask=row < rows)
    tl.atomic_max(highs + block, most, mask=row < rows)


@jitted
def _range_of_part(
    x: tl.tensor, numel: tl.tensor, DTYPE: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr
) -> tl.tensor:
    """Keys of the range of what this program sees of one block: every so many tiles of ``SIZE`` elements."""
    program = tl.program_id(0)
    least = tl.full((SIZE,), 2147483647, tl.int32)
    most = tl.full((SIZE,), -2147483648, tl.int32)
    first = program * SIZE
    step = tl.num_programs(0) * SIZE
    if WIDE:
        first = first.to(tl.int64)
        step = step.to(tl.int64)
    for start in range(first, numel, step):
        at = start + tl.arange(0, SIZE)
        inside = at < numel
        keys = order_key(widen(tl.load(x + at, mask=inside, other=0), DTYPE))
        least = tl.minimum(least, tl.where(inside, keys, 2147483647))
        most = tl.maximum(most, tl.where(inside, keys, -2147483648))
    return tl.min(least, axis=0), tl.max(most, axis=0)


@jitted
def partial_ranges_kernel(
    x: tl.tensor,
    lows: tl.tensor,
    highs: tl.tensor,
    numel: tl.tensor,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Keys of the ranges of the parts of one block, a program each."""
    least, most = _range_of_part(x, numel, DTYPE, WIDE, SIZE)
    tl.store(lows + tl.program_id(0), least)
    tl.store(highs + tl.program_id(0), most)


@jitted
def _blend(
    value: tl.tensor,
    running: tl.tensor,
    new: tl.tensor,
    old: tl.tensor,
    sign: tl.tensor,
    DTYPE: tl.constexpr,
    KEPT: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """The new running value, of dtype ``KEPT``; see ``cpu.choosing.blend``."""
    if MODE == 1:
        result = round_to(round_to(value * new, DTYPE) + round_to(running * old, KEPT), KEPT)
    else:
        result = tl.where((running != running) | (running * sign < value * sign), running, value)
    return result


@jitted
def _track(
    low: tl.tensor,
    high: tl.tensor,
    running_lows: tl.tensor,
    running_highs: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    new: tl.tensor,
    old: tl.tensor,
    DTYPE: tl.constexpr,
    KEPT: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Move the running ranges, of dtype ``KEPT``, by new ones, and return them."""
    low = tl.where(low >= 0, 0.0, low)
    high = tl.where(high <= 0, 0.0, high)
    if MODE != 0:
        old_low = widen(tl.load(running_lows + at, mask=inside, other=0), KEPT)
        old_high = widen(tl.load(running_highs + at, mask=inside, other=0), KEPT)
        blank = (old_low == 0) & (old_high == 0) & (MODE == 1)  # nothing to average with
        low = tl.where(blank, low, _blend(low, old_low, new, old, 1.0, DTYPE, KEPT, MODE))
        high = tl.where(blank, high, _blend(high, old_high, new, old, -1.0, DTYPE, KEPT, MODE))
    tl.store(running_lows + at, narrow(low, KEPT), mask=inside)
    tl.store(running_highs + at, narrow(high, KEPT), mask=inside)
    return low, high


@jitted
def _store_parameters(
    low: tl.tensor,
    high: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    running_lows: tl.tensor,
    running_highs: tl.tensor,
    scales: tl.tensor,
    points: tl.tensor,
    origins: tl.tensor,
    quant_min: tl.tensor,
    quant_max: tl.tensor,
    new: tl.tensor,
    old: tl.tensor,
    DTYPE: tl.constexpr,
    KEPT: tl.constexpr,
    SCHEME: tl.constexpr,
    MODE: tl.constexpr,
    RUNNING: tl.constexpr,
    INTEGER: tl.constexpr,
) -> tl.tensor:
    """Store the parameters of blocks for ranges, through the running range if there is one, and return them."""
    if RUNNING:
        low, high = _track(low, high, running_lows, running_highs, at, inside, new, old, DTYPE, KEPT, MODE)
    scale, point, origin = choose(low, high, quant_min, quant_max, KEPT, SCHEME)
    tl.store(scales + at, scale, mask=inside)
    if INTEGER:
        tl.store(points + at, point, mask=inside)
        tl.store(origins + at, origin, mask=inside)
    return scale, point, origin


@jitted
def choose_kernel(
    lows: tl.tensor,
    highs: tl.tensor,
    running_lows: tl.tensor,
    running_highs: tl.tensor,
    scales: tl.tensor,
    points: tl.tensor,
    origins: tl.tensor,
    quant_min: tl.tensor,
    quant_max: tl.tensor,
    new: tl.tensor,
    old: tl.tensor,
    blocks: tl.tensor,
    parts: tl.tensor,
    DTYPE: tl.constexpr,
    KEPT: tl.constexpr,
    SCHEME: tl.constexpr,
    MODE: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    RUNNING: tl.constexpr,
    INTEGER: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """From ranges (order keys or float32) to parameters, through the running range if there is one.

    ``MODE`` 0 takes the range, 1 the moving average with weights ``new`` and ``old``, 2 the extremes. With ``PARTS``
    there is one block, whose range is that of up to so many keys.
    """
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < blocks
    if PARTS:
        part = tl.arange(0, PARTS)
        least = tl.min(tl.load(lows + part, mask=part < parts, other=2147483647), axis=0)
        most = tl.max(tl.load(highs + part, mask=part < parts, other=-2147483648), axis=0)
        low, high = value_of_key(at * 0 + least, at * 0 + most)
    elif KEYS:
        low, high = value_of_key(tl.load(lows + at, mask=inside, other=0), tl.load(highs + at, mask=inside, other=0))
    else:
        low = tl.load(lows + at, mask=inside, other=0.0)
        high = tl.load(highs + at, mask=inside, other=0.0)
    _store_parameters(
        low, high, at, inside, running_lows, running_highs, scales, points, origins, quant_min, quant_max, new, old,
        DTYPE, KEPT, SCHEME, MODE, RUNNING, INTEGER,
    )  # fmt: skip


@jitted
def track_whole_kernel(
    x: tl.tensor,
    keys: tl.tensor,
    running_lows: tl.tensor,
    running_highs: tl.tensor,
    scales: tl.tensor,
    points: tl.tensor,
    origins: tl.tensor,
    quant_min: tl.tensor,
    quant_max: tl.tensor,
    new: tl.tensor,
    old: tl.tensor,
    numel: tl.tensor,
    DTYPE: tl.constexpr,
    KEPT: tl.constexpr,
    SCHEME: tl.constexpr,
    MODE: tl.constexpr,
    RUNNING: tl.constexpr,
    INTEGER: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """``partial_ranges_kernel`` of ``PARTS`` programs, a power of two, and ``choose_kernel`` by the last one to end.

    ``keys`` holds the lowest keys, the highest ones, and how many programs have ended so far, at all launches: that
    number is zero once, at the beginning, and after every whole launch it is a multiple of ``PARTS``.
    """
    least, most = _range_of_part(x, numel, DTYPE, WIDE, SIZE)
    tl.store(keys + tl.program_id(0), least)
    tl.store(keys + PARTS + tl.program_id(0), most)
    ended = tl.atomic_add(keys + 2 * PARTS, 1, sem="acq_rel")
    if (ended & (PARTS - 1)) == PARTS - 1:
        part = tl.arange(0, PARTS)
        at = tl.arange(0, 32)
        least = tl.min(tl.load(keys + part, volatile=True), axis=0)
        most = tl.max(tl.load(keys + PARTS + part, volatile=True), axis=0)
        low, high = value_of_key(at * 0 + least, at * 0 + most)
        _store_parameters(
            low, high, at, at < 1, running_lows, running_highs, scales, points, origins, quant_min, quant_max, new, old,
            DTYPE, KEPT, SCHEME, MODE, RUNNING, INTEGER,
        )  # fmt: skip


@jitted
def observe_rows_kernel(
    x: tl.tensor,
    y: tl.tensor,
    mask: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    points: tl.tensor,
    origins: tl.tensor,
    running_lows: tl.tensor,
    running_highs: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    smallest: tl.tensor,
    anchor: tl.tensor,
    new: tl.tensor,
    old: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    DTYPE: tl.constexpr,
    KEPT: tl.constexpr,
    SCHEME: tl.constexpr,
    INTEGER: tl.constexpr,
    MINVAL: tl.constexpr,
    MASK: tl.constexpr,
    DATA: tl.constexpr,
    RUNNING: tl.constexpr,
    MODE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Observe and fake-quantize ``ROWS`` rows, each a block of ``length <= COLUMNS`` elements, in one pass.

    With a mask ``length`` is a multiple of 32 unless there is one row, so that no word is shared by rows. ``DATA`` is
    as in ``map_kernel``, ``RUNNING`` and ``MODE`` as in ``choose_kernel``.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if WIDE:
        row = row.to(tl.int64)
    column = tl.arange(0, COLUMNS)
    present = row < rows
    inside = present[:, None] & (column < length)[None, :]
    at = row[:, None] * length + column[None, :]
    values = widen(tl.load(x + at, mask=inside, other=0), DTYPE)
    keys = order_key(values)
    least = tl.min(tl.where(inside, keys, 2147483647), axis=1)
    most = tl.max(tl.where(inside, keys, -2147483648), axis=1)
    first, last = value_of_key(least, most)
    scale, point, origin = _store_parameters(
        first, last, row, present, running_lows, running_highs, scales, points, origins, low, high, new, old,
        DTYPE, KEPT, SCHEME, MODE, RUNNING, INTEGER,
    )  # fmt: skip
    offset = point.to(tl.float32)
    if MINVAL:
        offset = tl.zeros_like(scale) + low
    else:
        origin = tl.zeros_like(scale)
    pre = unclamped(values, scale[:, None], offset[:, None], origin[:, None], INTEGER)
    if MASK:
        bits = (inside & (pre >= low) & (pre <= high)).to(tl.int32)
        grouped = tl.reshape(bits, (ROWS, COLUMNS // 32, 32)) << tl.arange(0, 32)[None, None, :]
        word = tl.arange(0, COLUMNS // 32)
        kept = present[:, None] & (word * 32 < length)[None, :]
        tl.store(mask + row[:, None] * ((length + 31) // 32) + word[None, :], tl.sum(grouped, axis=2), mask=kept)
    codes = code_of(pre, low, high, smallest, anchor, INTEGER)
    if DATA:
        tl.store(data + at, byte_of(codes, low, smallest, anchor, INTEGER), mask=inside)
    codes = value_of(codes, scale[:, None], offset[:, None], origin[:, None], INTEGER)
    tl.store(y + at, narrow(codes, DTYPE), mask=inside)
