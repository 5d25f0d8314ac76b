"""Tensors that are one number: operators along a dimension of theirs, which is none, and what is filled with them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .graph_edits import call, replace

__all__ = ["fill_with_tensors", "give_numbers_a_dimension"]

_aten = torch.ops.aten


_FILLS = (_aten.full.default, _aten.full_like.default, _aten.new_full.default)
_NUMBERS = (_aten.item.default, _aten._local_scalar_dense.default)
"""Operators that return the number of a tensor."""


def fill_with_tensors(graph: fx.Graph) -> None:
    """Write tensors that are filled with the number of a tensor as products with it, in place.

    As the detectors of Ultralytics fill a tensor with each of their strides: coreai-torch fills with constants only.

    Args:
        graph: of an exported program.
    """
    for node in list(graph.nodes):
        number: Any = node.args[-1] if node.target in _FILLS else None
        if not isinstance(number, fx.Node) or number.target not in _NUMBERS:
            continue
        with node.meta["val"].fake_mode, graph.inserting_before(node):
            ones = call(graph, node.target, *node.args[:-1], 1, **{**node.kwargs, "dtype": node.meta["val"].dtype})
            value = call(graph, _aten._to_copy.default, number.args[0], dtype=node.meta["val"].dtype)
            filled = call(graph, _aten.mul.Tensor, ones, call(graph, _aten.reshape.default, value, []))
        replace(node, filled)
    graph.eliminate_dead_code()


def give_numbers_a_dimension(graph: fx.Graph) -> None:
    """Let operators along a dimension have numbers as vectors of one element, in place.

    Converters and runtimes refuse them otherwise, or end the process.

    Args:
        graph: of an exported program.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and _along_none(node):
            with tree_leaves(node.meta["val"])[0].fake_mode:
                _write_with_vectors(graph, node)


def _along_none(node: fx.Node) -> bool:
    """Whether an operator is asked to work along a dimension of a number, and gives numbers."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if not any(one.name in ("dim", "dims") for one in target._schema.arguments) or not node.args:
        return False
    results = tree_leaves(node.meta.get("val"))
    return _is_number(node.args[0]) and all(isinstance(one, torch.Tensor) and not one.ndim for one in results)


def _is_number(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(tensor, torch.Tensor) and not tensor.ndim


def _write_with_vectors(graph: fx.Graph, node: fx.Node) -> None:
    """Write a call with operands of one dimension, and its results with none."""
    with graph.inserting_before(node):
        vectors = [call(graph, _aten.unsqueeze.default, one, 0) if _is_number(one) else one for one in node.args]
        result = call(graph, node.target, *vectors, **node.kwargs)
    result.meta = {**node.meta, "val": result.meta["val"]}
    if isinstance(result.meta["val"], torch.Tensor):
        _replace_by_number(graph, node, result)
        return
    for part in list(node.users):
        with graph.inserting_before(node):
            piece = call(graph, operator.getitem, result, part.args[1])
        _replace_by_number(graph, part, piece)
    graph.erase_node(node)


def _replace_by_number(graph: fx.Graph, node: fx.Node, vector: fx.Node) -> None:
    if vector.meta["val"].ndim:
        with graph.inserting_after(vector):
            number = call(graph, _aten.squeeze.dims, vector, [0])
        number.meta = {**node.meta, "val": number.meta["val"]}
        vector = number
    replace(node, vector)
