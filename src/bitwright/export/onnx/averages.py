"""Averages of codes in ONNX graphs, as additions in PyTorch's order.

ONNX Runtime's ``AveragePool`` adds in PyTorch's order, its ``ReduceMean`` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bitwright.export.ordered_sums import AveragedShape, OrderedSum

from .activations import comes_from_codes
from .builder import NodeBuilder, replace_value

__all__ = ["average_in_order"]


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
        nodes = _Nodes(NodeBuilder(graph, node, "average", number))
        total = nodes.total(node.inputs[0], shape)
        count = nodes.build.initializer(torch.tensor(float(shape.count)), "count", shared=False)
        mean = nodes.build("Div", [total, count])
        replace_value(node.outputs[0], nodes.reshape(mean, shape.outer, shape.rest))
        graph.remove(node, safe=True)


def _shape(node: Any) -> AveragedShape | None:
    """The shape of a mean that is written as additions; None for others."""
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if x.shape is None or x.dtype is None or x.dtype.name != "FLOAT" or axes is None or axes.const_value is None:
        return None
    keep = "keepdims" not in node.attributes or bool(node.attributes["keepdims"].value)
    return AveragedShape.of(list(x.shape), [int(axis) for axis in axes.const_value.numpy().reshape(-1)], keep)


class _Nodes(OrderedSum):
    """A sum as ONNX nodes.

    Args:
        build: adds the nodes.
    """

    def __init__(self, build: NodeBuilder) -> None:
        self.build = build
        self._constants: dict[tuple[int, ...], Any] = {}

    def reshape(self, x: Any, axis: int, sizes: Sequence[int]) -> Any:
        return self.build("Reshape", [x, self._numbers([0] * axis + [*sizes])])

    def part(self, x: Any, axis: int, start: int, end: int) -> Any:
        return self.build("Slice", [x, self._numbers([start]), self._numbers([end]), self._numbers([axis])])

    def add(self, one: Any, other: Any) -> Any:
        return self.build("Add", [one, other])

    def joined(self, values: list[Any], axis: int) -> Any:
        return self.build("Concat", values, {"axis": axis})

    def _numbers(self, values: list[int]) -> Any:
        """Integers as an initializer."""
        key = tuple(values)
        if key not in self._constants:
            name = f"numbers_{len(self._constants)}"
            self._constants[key] = self.build.initializer(torch.tensor(values), name, shared=False)
        return self._constants[key]
