"""Averages of codes in PyTorch's order of additions.

An average of 16 codes lies exactly between two codes in one of 16 places. What rounding makes of it there is decided by
the last bits of the float sum, so an average in another order puts many codes beside those of the prepared model. The
mean of most runtimes adds in an order of its own. Here such a mean becomes additions in the order of PyTorch's kernel
on x86 (``cascade_sum`` in ATen/native/cpu/SumKernel.cpp): along the dimension that is innermost in memory 8 lanes at a
time, four vectors interleaved; otherwise row by row; long sums in chunks of 16.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

__all__ = ["AveragedShape", "OrderedSum"]

_LANES = 8
_ROWS = 4
_CHUNK = 16
_LONGEST = _CHUNK * _CHUNK
"""How many additions in a row the two levels of chunks written here stand for."""


@dataclass(frozen=True)
class AveragedShape:
    """A tensor that is averaged, as dimensions in front, those averaged, and those behind.

    Attributes:
        order: the dimensions from the outermost in memory to the innermost, the order of all that follows; None if they
            lie as they are counted.
        outer: how many dimensions lie in front.
        count: elements in an average.
        inner: elements behind, 1 if there are none.
        rest: sizes that the sum has after those in front.
        dropped: dimensions of one element that only the sum has, as the tensor counts them.
    """

    order: tuple[int, ...] | None
    outer: int
    count: int
    inner: int
    rest: tuple[int, ...]
    dropped: tuple[int, ...]

    @classmethod
    def of(
        cls, sizes: Sequence[Any], dims: Sequence[int], keep: bool, order: Sequence[int] | None = None
    ) -> AveragedShape | None:
        """Return the shape of a mean that is written as additions; None for others.

        Args:
            sizes: of the tensor; what is no ``int`` is not known.
            dims: the dimensions that are averaged, also counted from the end.
            keep: whether they stay, with one element.
            order: the dimensions from the outermost in memory to the innermost; None if they lie as they are counted.
        """
        counted = tuple(range(len(sizes)))
        moved = order is not None and tuple(order) != counted
        order = tuple(order) if order is not None else counted
        dims = sorted(dim % len(sizes) for dim in dims)
        reduced = [place for place, dim in enumerate(order) if dim in dims]
        if not reduced or reduced != list(range(reduced[0], reduced[-1] + 1)):
            return None
        known = [sizes[dim] for dim in order[reduced[0] :]]
        if not all(type(size) is int and size > 0 for size in known):
            return None
        averaged, behind = known[: len(reduced)], tuple(known[len(reduced) :])
        count, inner = math.prod(averaged), math.prod(behind)
        rows = count if behind else count // _LANES
        if count == 1 or rows > _LONGEST or (behind and inner == 1):
            return None
        rest = (1,) * (len(reduced) if keep or moved else 0) + behind
        return cls(order if moved else None, reduced[0], count, inner, rest, tuple(dims) if moved and not keep else ())


class OrderedSum(ABC):
    """Writes the additions of a sum in PyTorch's order; what a value is, and how ops are written, is a subclass's."""

    @abstractmethod
    def reshape(self, x: Any, axis: int, sizes: Sequence[int]) -> Any:
        """Give ``x`` these sizes in place of those from ``axis`` on."""

    @abstractmethod
    def part(self, x: Any, axis: int, start: int, end: int) -> Any:
        """Take the elements ``[start, end)`` along ``axis``."""

    @abstractmethod
    def add(self, one: Any, other: Any) -> Any:
        """Add two values."""

    @abstractmethod
    def divide(self, x: Any, divisor: float) -> Any:
        """Divide a value by a number."""

    @abstractmethod
    def permute(self, x: Any, order: Sequence[int]) -> Any:
        """Put the dimensions in this order."""

    @abstractmethod
    def squeeze(self, x: Any, dims: Sequence[int]) -> Any:
        """Drop dimensions of one element."""

    @abstractmethod
    def joined(self, values: list[Any], axis: int) -> Any:
        """Concatenate values along ``axis``."""

    def mean(self, x: Any, shape: AveragedShape) -> Any:
        """Average ``x`` as ``shape`` says."""
        if shape.order is not None:
            x = self.permute(x, shape.order)
        mean = self.reshape(self.divide(self._total(x, shape), float(shape.count)), shape.outer, shape.rest)
        if shape.order is not None:
            mean = self.permute(mean, [shape.order.index(dim) for dim in range(len(shape.order))])
        return self.squeeze(mean, shape.dropped) if shape.dropped else mean

    def _total(self, x: Any, shape: AveragedShape) -> Any:
        """Sum ``x``, in the order of memory, to ``[..., 1, inner]``."""
        x = self.reshape(x, shape.outer, [shape.count, shape.inner])
        return self._along_rows(x, shape) if shape.inner > 1 else self._along_lanes(x, shape)

    def _along_lanes(self, x: Any, shape: AveragedShape) -> Any:
        """Sum ``[..., count, 1]`` to ``[..., 1, 1]`` as the innermost dimension is summed."""
        axis, vectors = shape.outer, shape.count // _LANES
        if not vectors:
            return self._interleaved(x, axis, shape.count, 1)
        terms = [self.part(x, axis, place, place + 1) for place in range(vectors * _LANES, shape.count)]
        front = self.part(x, axis, 0, vectors * _LANES) if terms else x
        lanes = self.reshape(front, axis, [vectors, _LANES])
        lanes = self._interleaved(lanes, axis, vectors, _LANES)
        return self._added([*terms, *(self.part(lanes, axis + 1, lane, lane + 1) for lane in range(_LANES))])

    def _along_rows(self, x: Any, shape: AveragedShape) -> Any:
        """Sum ``[..., count, inner]`` to ``[..., 1, inner]``: 32 columns at a time, the others interleaved."""
        axis, together = shape.outer, _ROWS * (_LANES if shape.inner >= _LANES else 1)
        whole = shape.inner - shape.inner % together
        if whole == shape.inner:
            return self._in_chunks(x, axis, shape.count, shape.inner)
        rest = self.part(x, axis + 1, whole, shape.inner) if whole else x
        rest = self._interleaved(rest, axis, shape.count, shape.inner - whole)
        if not whole:
            return rest
        front = self._in_chunks(self.part(x, axis + 1, 0, whole), axis, shape.count, whole)
        return self.joined([front, rest], axis + 1)

    def _interleaved(self, x: Any, axis: int, count: int, inner: int) -> Any:
        """Sum rows as four sums of every fourth row."""
        whole = count // _ROWS * _ROWS
        left = [self.part(x, axis, row, row + 1) for row in range(whole, count)]
        if not whole:
            return self._added(left)
        front = self.part(x, axis, 0, whole) if left else x
        front = self.reshape(front, axis, [whole // _ROWS, _ROWS * inner])
        front = self._in_chunks(front, axis, whole // _ROWS, _ROWS * inner)
        rows = [self.part(front, axis + 1, row * inner, (row + 1) * inner) for row in range(_ROWS)]
        return self._added([self._added([rows[0], *left]), *rows[1:]])

    def _in_chunks(self, x: Any, axis: int, count: int, inner: int) -> Any:
        """Sum rows one after the other, or where there are many as sums of 16."""
        chunks = count // _CHUNK
        total = [self.part(x, axis, row, row + 1) for row in range(chunks * _CHUNK, count)]
        if chunks:
            front = self.part(x, axis, 0, chunks * _CHUNK) if total else x
            front = self.reshape(front, axis, [chunks, _CHUNK * inner])
            sums = self._added([self.part(front, axis + 1, i * inner, (i + 1) * inner) for i in range(_CHUNK)])
            behind = self._added([self.part(sums, axis, chunk, chunk + 1) for chunk in range(chunks)])
            return self._added([self._added(total), behind]) if total else behind
        return self._added(total)

    def _added(self, terms: list[Any]) -> Any:
        return reduce(self.add, terms)
