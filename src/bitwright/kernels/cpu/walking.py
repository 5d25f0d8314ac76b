"""How every loop walks a tensor: rows and their blocks, the parts of a job, the last few elements of a row."""

from __future__ import annotations

from .compiling import inlined
from .lanes import LANES, Scalar, fetch_add, peek_i64, peek_u8, poke_u8, stack_room

__all__ = ["VECTOR", "block_of_row", "copy", "element_bytes", "first_part", "next_part", "staged", "vector_room"]


# Bytes of a vector of float32, and room for two of them.
VECTOR = 4 * LANES
vector_room = stack_room(2 * VECTOR)


@inlined
def block_of_row(table: int, row: int) -> Scalar:
    """First block of a row: the row's index in mixed radix, times the strides."""
    outer = peek_i64(table + 32)
    if outer == 0:
        return 0
    sizes = table + 40
    strides = sizes + 8 * outer
    block = 0
    for place in range(outer - 1, 0, -1):
        size = peek_i64(sizes + 8 * place)
        quotient = row // size
        block += (row - quotient * size) * peek_i64(strides + 8 * place)
        row = quotient
    return block + row * peek_i64(strides)


@inlined
def first_part(control: int) -> Scalar:
    """The number of the first part that the calling thread works on.

    Threads take the parts of a job one after the other from a counter in memory, so that a thread that comes late or
    is held up does less. The second number in memory counts the parts that are done.

    Args:
        control: address of two int64 zeros shared by the threads, or 0 for a single thread.
    """
    return fetch_add(control) if control != 0 else 0


@inlined
def next_part(control: int, part: int) -> Scalar:
    """Report a part as done and return the number of the next one."""
    if control == 0:
        return part + 1
    fetch_add(control + 8)
    return fetch_add(control)


@inlined
def element_bytes(dtype: int) -> int:
    """Bytes of one element."""
    return 4 if dtype == 0 else 2


@inlined
def copy(source: int, target: int, size: int) -> None:
    """Copy bytes."""
    for place in range(size):
        poke_u8(target + place, peek_u8(source + place))


@inlined
def staged(source: int, buffer: int, size: int) -> int:
    """Where a whole vector can be read: the buffer, with the last ``size`` bytes copied into it."""
    copy(source, buffer, size)
    return buffer
