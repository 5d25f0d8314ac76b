"""Averages of codes in exported programs, as additions in PyTorch's order."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .graph_edits import replace
from .memory_layout import memory_orders
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
_OF_CODES = ("coreai::quantize", "coreai::dequantize")


def average_in_order(program: torch.export.ExportedProgram) -> None:
    """Write means over dimensions of known sizes, of float32 tensors that come from codes, as additions.

    Args:
        program: as ``torch.export`` returns it; changed in place.
    """
    graph, depending = program.graph, _depending(program)
    means = [node for node in graph.nodes if _is_mean(node) and _comes_from_codes(node.args[0], depending)]
    orders = memory_orders(graph, _quantized_by) if means else {}
    for node in means:
        shape = _shape(node, orders[node.args[0]])
        if shape is None:
            continue
        with graph.inserting_before(node):
            mean = _Ops(graph).mean(node.args[0], shape)
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

    def divide(self, x: fx.Node, divisor: float) -> fx.Node:
        return self.call(_aten.div.Tensor, x, divisor)

    def permute(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        return self.call(_aten.permute.default, x, list(order))

    def squeeze(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        return self.call(_aten.squeeze.dims, x, list(dims))

    def joined(self, values: list[fx.Node], axis: int) -> fx.Node:
        return self.call(_aten.cat.default, values, axis)


def _is_mean(node: fx.Node) -> bool:
    """Whether a node averages a float32 tensor over some of its dimensions."""
    if _name(node) not in ("aten::mean", *_POOLS) or node.kwargs or not 2 <= len(node.args) <= 3:
        return False
    x, dims = node.args[:2]
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and isinstance(dims, Sequence)


def _quantized_by(node: fx.Node) -> fx.Node | None:
    """The operand of a quantizer or of what reads its codes, which have its layout; None for other nodes."""
    x = node.args[0] if _name(node) in _OF_CODES and node.args else None
    return x if isinstance(x, fx.Node) else None


def _shape(node: fx.Node, order: tuple[int, ...]) -> AveragedShape | None:
    """The shape of a mean that is written as additions; None for others."""
    arguments: list[Any] = [*node.args, None]
    x, dims, keep = arguments[:3]
    value = x.meta["val"]
    if _name(node) in _POOLS:
        if any(size != 1 for size in dims):
            return None
        dims, keep = range(-len(dims), 0), True
    return AveragedShape.of(list(value.shape), list(dims), bool(keep), order)


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
