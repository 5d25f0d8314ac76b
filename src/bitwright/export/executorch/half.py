"""Sums of values in half precision, computed in float32 between casts.

Kernels of ExecuTorch add up halves in half precision where PyTorch's add in float32 and round once: a layer norm of 256
bfloat16 values is 8 dB from exact, and a linear layer 34, where PyTorch's have 56. XNNPACK's own layers on float16 are
as exact as PyTorch's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .graph import call, op_name

__all__ = ["sum_in_float32"]

_HALVES = (torch.float16, torch.bfloat16)
_SUMS = {
    f"aten::{name}"
    for name in (
        "layer_norm", "native_layer_norm", "cumsum", "cumprod", "var", "std", "var_mean", "std_mean", "addmm", "addmv",
        "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
        "lstm", "gru", "rnn_tanh", "rnn_relu", "gelu",
    )
}  # fmt: skip
_LAYERS = {
    f"aten::{name}"
    for name in (
        "linear", "conv1d", "conv2d", "convolution", "conv_transpose1d", "conv_transpose2d",
    )
}  # fmt: skip
"""What XNNPACK computes on float16."""


def sum_in_float32(module: fx.GraphModule) -> None:
    """Put casts around operators that add up halves, in place; each rounds its result once, as PyTorch's does.

    Args:
        module: of an exported program, before GELUs are written as arithmetic, each step of which would round.
    """
    for node in list(module.graph.nodes):
        name = op_name(node).partition(".")[0]
        value = _half(node)
        if value is not None and (name in _SUMS or (name in _LAYERS and value.dtype == torch.bfloat16)):
            _widen(module.graph, node)
    module.recompile()


def _half(node: fx.Node) -> torch.Tensor | None:
    """The first result in half precision; None where there is none."""
    value = node.meta.get("val")
    results = value if isinstance(value, tuple | list) else (value,)
    return next((one for one in results if isinstance(one, torch.Tensor) and one.dtype in _HALVES), None)


def _widen(graph: fx.Graph, node: fx.Node) -> None:
    before = node.meta["val"]

    def wide(operand: fx.Node) -> fx.Node:
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in _HALVES:
            return operand
        return _cast(graph, operand, torch.float32)

    target: Any = node.target
    with graph.inserting_before(node):
        arguments = fx.map_arg((node.args, node.kwargs), wide)
        widened = call(graph, target, *arguments[0], **arguments[1])
        widened.meta = {**node.meta, "val": widened.meta["val"]}
    if isinstance(before, torch.Tensor):
        _narrow(graph, widened, node, before.dtype)
    else:
        for part in list(node.users):
            with graph.inserting_before(node):
                piece = call(graph, operator.getitem, widened, part.args[1])
            _narrow(graph, piece, part, part.meta["val"].dtype)
    graph.erase_node(node)


def _narrow(graph: fx.Graph, wide: fx.Node, node: fx.Node, dtype: torch.dtype) -> None:
    """Let all that reads a node read this one, rounded to the node's type."""
    with graph.inserting_after(wide):
        rounded = wide if wide.meta["val"].dtype == dtype else _cast(graph, wide, dtype)
    node.replace_all_uses_with(rounded)
    if wide is not node and node.target is operator.getitem:
        graph.erase_node(node)
    rounded._rename(node.name)  # the program's signature calls outputs by it


def _cast(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    return call(graph, torch.ops.aten._to_copy.default, value, dtype=dtype)
