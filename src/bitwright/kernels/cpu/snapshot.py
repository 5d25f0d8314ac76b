"""Elements of tensors as they were, compared with what they are by one call of machine code.

Version counters would say whether a tensor was written, but between the operations of a model little is in a cache, and
each counter lies three objects away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from .compiling import compiled, entry, inlined
from .lanes import peek_i32, peek_i64, peek_u8

__all__ = ["Snapshot", "unchanged"]


@inlined
def _same(tensor: int, stride: int, kept: int, count: int, size: int) -> bool:
    """Return whether elements of a tensor have the bits of a copy.

    Args:
        tensor: address of the first element.
        stride: bytes from one element to the next.
        kept: address of the copy, without gaps.
        count: number of elements.
        size: bytes of an element.
    """
    different = np.int32(0)
    if size == 4:
        for place in range(count):
            different |= peek_i32(tensor + place * stride) ^ peek_i32(kept + 4 * place)
    else:
        for place in range(count * size):
            element = place // size
            inside = place - element * size
            different |= np.int32(peek_u8(tensor + element * stride + inside) ^ peek_u8(kept + place))
    return bool(different == 0)


@compiled
def unchanged(table: int) -> bool:
    """Return whether the elements of a snapshot are what they were.

    Args:
        table: its address; 0 for an empty one.
    """
    if table == 0:
        return True
    for row in range(table + 8, table + 8 + 40 * peek_i64(table), 40):
        tensor, stride, kept = peek_i64(row), peek_i64(row + 8), peek_i64(row + 16)
        if not _same(tensor, stride, kept, peek_i64(row + 24), peek_i64(row + 32)):
            return False
    return True


_unchanged = entry(unchanged, 1)


class Snapshot:
    """Copies of some elements. Their memory is kept alive, and must stay where it is.

    Args:
        *tensors: integers or booleans on the CPU, of at most one dimension.

    Attributes:
        address: of the table that ``unchanged`` takes.
        holds: says whether the elements are what they were.
    """

    __slots__ = ("_alive", "address", "holds")

    def __init__(self, *tensors: torch.Tensor) -> None:
        elements = [tensor.detach().view(-1) for tensor in tensors]
        copies = [tensor.clone() for tensor in elements]
        table = [len(elements)]
        for now, kept in zip(elements, copies, strict=True):
            size = now.element_size()
            table += [now.data_ptr(), size * now.stride(0), kept.data_ptr(), len(now), size]
        array = np.array(table, dtype=np.int64)
        self._alive = elements, copies, array
        self.address: int = array.ctypes.data
        self.holds: Callable[[], bool] = partial(_unchanged, self.address)
