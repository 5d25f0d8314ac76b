"""Averages of codes in exported programs, as additions in PyTorch's order."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .graph_edits import replace
from .ordered_sums import AveragedShape, OrderedSum

__all__ = ["average_in_order"]

_aten = torch.ops.aten
_POOLS = ("aten::adaptive_avg_pool1d", "aten::adaptive_avg_pool2d", "aten::adaptive_avg_pool3d")
_TRANSPARENT = {
    f"aten::{name}"
    for name in (
        "view", "reshape", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze", "expand", "select",
        "slice", "split", "split_with_sizes", "chunk", "cat", "clone", "contiguous", "alias", "detach", "dropout",
        "relu", "relu_", "clamp", "clamp_min", "hardtanh", "hardtanh_", "relu6", "max_pool1d", "max_pool2d",
        "max_pool3d", "constant_pad_nd", "pad", "pixel_shuffle", "pixel_unshuffle",
    )
}  # fmt: skip
_AFFINE = {f"aten::{name}" for name in ("add", "sub", "mul", "div", "to", "_to_copy")}
"""Ops by constants, as dequantization is written where there is no op for it."""
_CODES = ("coreai::dequantize", "aten::round")


def average_in_order(program: torch.export.ExportedProgram) -> None:
    """Write means over dimensions of known sizes, of float32 tensors that come from codes, as additions.

    Args:
        program: as ``torch.export`` returns it; changed in place.
    """
    graph, depending = program.graph, _depending(program)
    for node in list(graph.nodes):
        shape = _shape(node)
        if shape is None or not _comes_from_codes(node.args[0], depending):
            continue
        with graph.inserting_before(node):
            ops = _Ops(graph)
            mean = ops.call(_aten.div.Tensor, ops.total(node.args[0], shape), float(shape.count))
            mean = ops.reshape(mean, shape.outer, shape.rest)
        replace(node, mean)
    program.graph_module.recompile()


class _Ops(OrderedSum):
    """A sum as calls of operators; where they are inserted is the graph's.

    Args:
        graph: gets the calls.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph

    def call(self, op: Any, *args: Any) -> fx.Node:
        """Call an operator."""
        return self._graph.call_function(op, args)

    def reshape(self, x: fx.Node, axis: int, sizes: Sequence[int]) -> fx.Node:
        flat = self.call(_aten.flatten.using_ints, x, axis, -1)
        if not sizes:
            return self.call(_aten.squeeze.dim, flat, axis)
        return self.call(_aten.unflatten.int, flat, axis, list(sizes))

    def part(self, x: fx.Node, axis: int, start: int, end: int) -> fx.Node:
        return self.call(_aten.slice.Tensor, x, axis, start, end)

    def add(self, one: fx.Node, other: fx.Node) -> fx.Node:
        return self.call(_aten.add.Tensor, one, other)

    def joined(self, values: list[fx.Node], axis: int) -> fx.Node:
        return self.call(_aten.cat.default, values, axis)


def _shape(node: fx.Node) -> AveragedShape | None:
    """The shape of a mean that is written as additions; None for others and for other ops."""
    name = _name(node)
    if name not in ("aten::mean", *_POOLS) or not isinstance(node.args[0], fx.Node):
        return None
    value = node.args[0].meta.get("val")
    if value is None or value.dtype != torch.float32 or node.kwargs:
        return None
    arguments: list[Any] = [*node.args[1:], None, None][:2]
    dims, keep = arguments
    if len(node.args) > 3 or not isinstance(dims, Sequence):
        return None
    if name in _POOLS:
        if any(size != 1 for size in dims):
            return None
        dims, keep = range(-len(dims), 0), True
    return AveragedShape.of(list(value.shape), list(dims), bool(keep))


def _depending(program: torch.export.ExportedProgram) -> set[fx.Node]:
    """The nodes whose values depend on the program's inputs."""
    inputs = set(program.graph_signature.user_inputs)
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.name in inputs or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _comes_from_codes(node: Any, depending: set[fx.Node]) -> bool:
    """Whether a tensor was dequantized, with nothing since but what leaves most codes on a grid."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if _name(node) in _CODES:
            return True
        operands = [operand for operand in node.all_input_nodes if operand in depending]
        if (
            _name(node) in _TRANSPARENT
            or node.target is operator.getitem
            or (_name(node) in _AFFINE and len(operands) == 1)
        ):
            waiting += operands
    return False


def _name(node: fx.Node) -> str:
    """The name of an op, like ``aten::mean``; empty for other nodes."""
    return str(getattr(node.target, "name", str)()).partition(".")[0] if node.op == "call_function" else ""
