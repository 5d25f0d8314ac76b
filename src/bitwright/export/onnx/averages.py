"""Averages of codes in PyTorch's order of additions.

An average of 16 codes lies exactly between two codes in one of 16 places. What rounding makes of it there is decided by
the last bits of the float sum, so an average in another order puts many codes beside those of the prepared model. ONNX
Runtime's ``AveragePool`` adds in PyTorch's order, its ``ReduceMean`` does not. Here such a mean becomes additions in
the order of PyTorch's kernel for contiguous tensors on x86 (``cascade_sum`` in ATen/native/cpu/SumKernel.cpp): along
the innermost dimension 8 lanes at a time, four vectors interleaved; otherwise row by row; long sums in chunks of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from .activations import comes_from_codes
from .builder import NodeBuilder, replace_value

__all__ = ["average_in_order"]

_LANES = 8
_ROWS = 4
_CHUNK = 16
_LONGEST = _CHUNK * _CHUNK
"""How many additions in a row the two levels of chunks written here stand for."""


def average_in_order(graph: Any) -> None:
    """Write means over dimensions of known sizes, of tensors that come from codes, as additions.

    Args:
        graph: an ``onnx_ir.Graph`` without stand-ins; changed in place.
    """
    for number, node in enumerate(list(graph)):
        if node.op_type != "ReduceMean" or not comes_from_codes(node.inputs[0]):
            continue
        shape = _shape(node)
        if shape is None:
            continue
        order = _Order(NodeBuilder(graph, node, "average", number))
        x = order.build("Reshape", [node.inputs[0], order.numbers([0] * shape.outer + [shape.count, shape.inner])])
        total = order.along_rows(x, shape) if shape.inner > 1 else order.along_lanes(x, shape)
        count = order.build.initializer(torch.tensor(float(shape.count)), "count", shared=False)
        mean = order.build("Div", [total, count])
        mean = order.build("Reshape", [mean, order.numbers([0] * shape.outer + list(shape.rest))])
        replace_value(node.outputs[0], mean)
        graph.remove(node, safe=True)


@dataclass(frozen=True)
class _Shape:
    """A tensor that is averaged, as dimensions in front, those averaged, and those behind.

    Attributes:
        outer: how many dimensions lie in front.
        count: elements in an average.
        inner: elements behind, 1 if there are none.
        rest: sizes that the result has after those in front.
    """

    outer: int
    count: int
    inner: int
    rest: tuple[int, ...]


def _shape(node: Any) -> _Shape | None:
    """The shape of a mean that is written as additions; None for others."""
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if x.shape is None or x.dtype is None or x.dtype.name != "FLOAT" or axes is None or axes.const_value is None:
        return None
    rank = len(x.shape)
    reduced = sorted(int(axis) % rank for axis in axes.const_value.numpy().reshape(-1))
    if not reduced or reduced != list(range(reduced[0], reduced[-1] + 1)):
        return None
    sizes = list(x.shape)[reduced[0] :]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    averaged, behind = sizes[: len(reduced)], tuple(sizes[len(reduced) :])
    shape = torch.Size(averaged).numel(), torch.Size(behind).numel()
    rows = shape[0] if behind else shape[0] // _LANES
    if shape[0] == 1 or rows > _LONGEST or (behind and shape[1] == 1):
        return None
    keep = "keepdims" not in node.attributes or bool(node.attributes["keepdims"].value)
    return _Shape(reduced[0], *shape, (1,) * (len(reduced) if keep else 0) + behind)


class _Order:
    """Adds nodes that sum along a dimension in an order of its own.

    Args:
        build: adds the nodes.
    """

    def __init__(self, build: NodeBuilder) -> None:
        self.build = build
        self._constants: dict[tuple[int, ...], Any] = {}

    def numbers(self, values: list[int]) -> Any:
        """Integers as an initializer."""
        key = tuple(values)
        if key not in self._constants:
            name = f"numbers_{len(self._constants)}"
            self._constants[key] = self.build.initializer(torch.tensor(values), name, shared=False)
        return self._constants[key]

    def along_lanes(self, x: Any, shape: _Shape) -> Any:
        """Sum ``[..., count, 1]`` to ``[..., 1, 1]`` as the innermost dimension is summed."""
        axis, vectors = shape.outer, shape.count // _LANES
        if not vectors:
            return self._interleaved(x, axis, shape.count, 1)
        terms = [self._part(x, axis, place, place + 1) for place in range(vectors * _LANES, shape.count)]
        front = self._part(x, axis, 0, vectors * _LANES) if terms else x
        lanes = self.build("Reshape", [front, self.numbers([0] * axis + [vectors, _LANES])])
        lanes = self._interleaved(lanes, axis, vectors, _LANES)
        return self._added([*terms, *(self._part(lanes, axis + 1, lane, lane + 1) for lane in range(_LANES))])

    def along_rows(self, x: Any, shape: _Shape) -> Any:
        """Sum ``[..., count, inner]`` to ``[..., 1, inner]``: 32 columns at a time, the others interleaved."""
        axis, together = shape.outer, _ROWS * (_LANES if shape.inner >= _LANES else 1)
        whole = shape.inner - shape.inner % together
        if whole == shape.inner:
            return self._in_chunks(x, axis, shape.count, shape.inner)
        rest = self._part(x, axis + 1, whole, shape.inner) if whole else x
        rest = self._interleaved(rest, axis, shape.count, shape.inner - whole)
        if not whole:
            return rest
        front = self._in_chunks(self._part(x, axis + 1, 0, whole), axis, shape.count, whole)
        return self.build("Concat", [front, rest], {"axis": axis + 1})

    def _interleaved(self, x: Any, axis: int, count: int, inner: int) -> Any:
        """Sum rows as four sums of every fourth row."""
        whole = count // _ROWS * _ROWS
        left = [self._part(x, axis, row, row + 1) for row in range(whole, count)]
        if not whole:
            return self._added(left)
        front = self._part(x, axis, 0, whole) if left else x
        front = self.build("Reshape", [front, self.numbers([0] * axis + [whole // _ROWS, _ROWS * inner])])
        front = self._in_chunks(front, axis, whole // _ROWS, _ROWS * inner)
        rows = [self._part(front, axis + 1, row * inner, (row + 1) * inner) for row in range(_ROWS)]
        return self._added([self._added([rows[0], *left]), *rows[1:]])

    def _in_chunks(self, x: Any, axis: int, count: int, inner: int) -> Any:
        """Sum rows one after the other, or where there are many as sums of 16."""
        chunks = count // _CHUNK
        total = [self._part(x, axis, row, row + 1) for row in range(chunks * _CHUNK, count)]
        if chunks:
            front = self._part(x, axis, 0, chunks * _CHUNK) if total else x
            front = self.build("Reshape", [front, self.numbers([0] * axis + [chunks, _CHUNK * inner])])
            sums = self._added([self._part(front, axis + 1, i * inner, (i + 1) * inner) for i in range(_CHUNK)])
            behind = self._added([self._part(sums, axis, chunk, chunk + 1) for chunk in range(chunks)])
            return self._added([self._added(total), behind]) if total else behind
        return self._added(total)

    def _part(self, x: Any, axis: int, start: int, end: int) -> Any:
        return self.build("Slice", [x, self.numbers([start]), self.numbers([end]), self.numbers([axis])])

    def _added(self, terms: list[Any]) -> Any:
        return reduce(lambda one, other: self.build("Add", [one, other]), terms)
