"""A large tensor in one call of machine code: observe it, choose the parameters, fake-quantize it.

The threads share the tensor in each stage and meet in between. Calls of their own for every stage, with what prepares
them, cost more than some of the stages: between the operations of a model, little of that code is in a cache.
"""

from __future__ import annotations

from array import array

import numpy as np

from .choosing import choose_block, track
from .compiling import compiled, inlined
from .lanes import LANES, fetch_add, give_way, peek_f32, peek_f64, peek_i32, peek_i64, peek_shared, poke_f32, poke_i32
from .mapping import map_fake
from .ranges import HIGHEST, LOWEST, join_parts, widen
from .relu import map_with_signs
from .walking import first_part, next_part, vector_room

__all__ = ["AS_THEY_ARE", "FAILED", "PARAMETERS", "THIS_ALONE", "new_call", "stages_part"]

# What is done about the parameters, besides the modes of ``choosing.blend`` for a running range.
AS_THEY_ARE, THIS_ALONE = -1, 3
_KEYS = 96
# So often a thread looks whether the others are done before it lets the system run them in its place.
_SHORT = 2000
_BEGUN, _ENDED, _CHOSEN = 48, 56, 64
# Which word of the table tells that some element has no byte, and where scale, zero point and minval lie.
FAILED, PARAMETERS = 9, 80


def new_call(
    job: int, x: int, y: int, mask: int, signs: int, codes: int, parts: int, blocks: int
) -> array[int]:  # fmt: skip
    """Make the table of a call of ``stages_part``.

    Args:
        job: address of the table of ``ready.ReadyCall``.
        x: address of the input.
        y: address of the output, which may be that of the input; 0 only observes.
        mask: address of the mask of one bit per element, or 0.
        signs: address of the bits of ``relu.write_signs``, or 0.
        codes: address of a byte for each element, see ``mapping.map_fake``, or 0.
        parts: number of parts; 0 if nothing is observed.
        blocks: number of blocks, at most ``FEW``.
    """
    return array("q", (job, x, y, mask, signs, codes, *bytes(6 + parts * blocks)))


@inlined
def note_parameters(call: int, scales: int, points: int, origins: int) -> None:
    """Write the parameters that the bytes are made with into the table, from where they can be decoded later."""
    poke_f32(call + PARAMETERS, peek_f32(scales))
    if points != 0:
        poke_i32(call + PARAMETERS + 4, peek_i32(points))
    if origins != 0:
        poke_f32(call + PARAMETERS + 8, peek_f32(origins))


@inlined
def choose_shared(call: int, job: int, parts: int, mode: int) -> None:
    """From the keys of all parts to the parameters."""
    dtype, grid, blocks, scheme = peek_i64(job), peek_i64(job + 24), peek_i64(job + 96), peek_i64(job + 104)
    scales, points, origins = peek_i64(job + 56), peek_i64(job + 64), peek_i64(job + 72)
    lows = call + _KEYS
    highs = lows + 4 * parts * blocks
    join_parts(lows, highs, parts, blocks)
    if mode != THIS_ALONE:
        track(lows, highs, blocks, dtype, mode, peek_f64(job + 112), peek_i64(job + 80), peek_i64(job + 88))
    for block in range(blocks):
        low, high = peek_f32(lows + 4 * block), peek_f32(highs + 4 * block)
        choose_block(low, high, dtype, scheme, grid, scales, points, origins, block)


@inlined
def observe_shared(call: int, job: int, parts: int, mode: int, room: int) -> None:
    """Observe a tensor of at most ``FEW`` blocks and choose its parameters; return when that is done.

    Nobody waits for a thread that has not come: whoever ends the last part that was begun chooses.
    """
    x, dtype, table, blocks = peek_i64(call + 8), peek_i64(job), peek_i64(job + 16), peek_i64(job + 96)
    words = peek_i64(table) * ((peek_i64(table + 8) + LANES - 1) // LANES)
    part = fetch_add(call + _BEGUN)
    while part < parts:
        lows = call + _KEYS + 4 * part * blocks
        highs = lows + 4 * parts * blocks
        for block in range(blocks):
            poke_i32(lows + 4 * block, np.int32(HIGHEST))
            poke_i32(highs + 4 * block, np.int32(LOWEST))
        widen(x, dtype, table, lows, highs, words * part // parts, words * (part + 1) // parts, room)
        if fetch_add(call + _ENDED) == parts - 1:
            choose_shared(call, job, parts, mode)
            fetch_add(call + _CHOSEN)
        part = fetch_add(call + _BEGUN)
    waited = 0
    while peek_shared(call + _CHOSEN) == 0:
        waited += 1
        if waited > _SHORT:
            give_way(waited)


@compiled
def stages_part(call: int, mode: int, parts: int, control: int) -> None:
    """Observe a tensor, choose its parameters and fake-quantize it, as far as each is asked for.

    Args:
        call: address of the table that ``new_call`` makes.
        mode: ``AS_THEY_ARE``, ``THIS_ALONE``, or see ``choosing.blend``.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    job, x, y, mask, signs, codes = (
        peek_i64(call), peek_i64(call + 8), peek_i64(call + 16), peek_i64(call + 24), peek_i64(call + 32),
        peek_i64(call + 40),
    )  # fmt: skip
    failed = call + 8 * FAILED
    dtype, words, table, grid = peek_i64(job), peek_i64(job + 8), peek_i64(job + 16), peek_i64(job + 24)
    scales, points, origins = peek_i64(job + 32), peek_i64(job + 40), peek_i64(job + 48)
    room = vector_room()
    if mode != AS_THEY_ARE:
        observe_shared(call, job, parts, mode, room)
    part = first_part(control)
    while part < parts:
        begin, end = words * part // parts, words * (part + 1) // parts
        if codes != 0 and part == 0:
            note_parameters(call, scales, points, origins)
        if signs != 0:
            count = peek_i64(table) * peek_i64(table + 8)
            map_with_signs(
                x, dtype, y, mask, scales, points, origins, table, grid, signs, count, codes, failed, begin, end, room
            )  # fmt: skip
        elif y != 0:
            map_fake(x, dtype, y, mask, codes, failed, scales, points, origins, table, grid, begin, end, room)
        part = next_part(control, part)
