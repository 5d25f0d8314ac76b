"""Operators along a dimension of a number, which has none, for converters and runtimes that refuse or crash."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .graph_edits import call, replace

__all__ = ["give_numbers_a_dimension"]

_aten = torch.ops.aten


def give_numbers_a_dimension(graph: fx.Graph) -> None:
    """Let operators along a dimension have numbers as vectors of one element, in place.

    Args:
        graph: of an exported program.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not _along_none(node):
            continue
        with node.meta["val"][0].fake_mode if isinstance(node.meta["val"], tuple) else node.meta["val"].fake_mode:
            _write_with_vectors(graph, node)


def _along_none(node: fx.Node) -> bool:
    """Whether an operator is asked to work along a dimension of a number, and gives numbers."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if not any(one.name in ("dim", "dims") for one in target._schema.arguments) or not node.args:
        return False
    results = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else (node.meta["val"],)
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
