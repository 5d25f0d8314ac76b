"""Averages of codes in ONNX graphs, as additions in PyTorch's order.

ONNX Runtime's ``AveragePool`` adds in PyTorch's order, its ``ReduceMean`` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bitwright.export.memory_layout import memory_orders
from bitwright.export.ordered_sums import AveragedShape, OrderedSum

from .activations import comes_from_codes
from .builder import NodeBuilder, replace_value
from .stand_ins import stands_for_quantizer_of

__all__ = ["average_in_order"]


def average_in_order(program: Any) -> None:
    """Write means over dimensions of known sizes, of tensors that come from codes, as additions.

    Args:
        program: torch's ONNX program, whose graph has no stand-ins any more; changed in place.
    """
    graph = program.model.graph
    means = [node for node in graph if node.op_type == "ReduceMean" and comes_from_codes(node.inputs[0])]
    orders = _memory_orders(program.exported_program) if means else {}
    for number, node in enumerate(means):
        shape = _shape(node, orders.get(node.outputs[0].name))
        if shape is None:
            continue
        nodes = _Nodes(NodeBuilder(graph, node, "average", number))
        replace_value(node.outputs[0], nodes.mean(node.inputs[0], shape))
        graph.remove(node, safe=True)


def _memory_orders(program: torch.export.ExportedProgram | None) -> dict[str, tuple[int, ...]]:
    """How the operands of means lie in memory, by the names that the means have in programs and files alike."""
    if program is None:
        return {}
    orders = memory_orders(program.graph, stands_for_quantizer_of)
    means = (node for node in program.graph.nodes if str(node.target) == "aten.mean.dim")
    return {node.name: orders[node.args[0]] for node in means if node.args[0] in orders}


def _shape(node: Any, order: tuple[int, ...] | None) -> AveragedShape | None:
    """The shape of a mean that is written as additions; None for others."""
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if x.shape is None or x.dtype is None or x.dtype.name != "FLOAT" or axes is None or axes.const_value is None:
        return None
    keep = "keepdims" not in node.attributes or bool(node.attributes["keepdims"].value)
    dims = [int(axis) for axis in axes.const_value.numpy().reshape(-1)]
    return AveragedShape.of(list(x.shape), dims, keep, order)


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

    def divide(self, x: Any, divisor: float) -> Any:
        count = torch.tensor(divisor, dtype=torch.float32)
        return self.build("Div", [x, self.build.initializer(count, "count", shared=False)])

    def permute(self, x: Any, order: Sequence[int]) -> Any:
        return self.build("Transpose", [x], {"perm": list(order)})

    def squeeze(self, x: Any, dims: Sequence[int]) -> Any:
        return self.build("Squeeze", [x, self._numbers(list(dims))])

    def joined(self, values: list[Any], axis: int) -> Any:
        return self.build("Concat", values, {"axis": axis})

    def _numbers(self, values: list[int]) -> Any:
        """Integers as an initializer."""
        key = tuple(values)
        if key not in self._constants:
            name = f"numbers_{len(self._constants)}"
            self._constants[key] = self.build.initializer(torch.tensor(values), name, shared=False)
        return self._constants[key]
