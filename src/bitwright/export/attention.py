"""Attention of exported programs under masks that hide everything from some queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .graph_edits import call

__all__ = ["zero_where_nothing_is_seen"]

_aten = torch.ops.aten


def zero_where_nothing_is_seen(module: fx.GraphModule) -> None:
    """Write out that queries which a mask hides all keys from have zeros, in place.

    PyTorch gives them zeros, as with the padding in front of a short text; converters that add a large negative number
    to the scores of hidden keys let these count alike where there is no other, and negative infinities become NaN.

    Args:
        module: of an exported program, before attention is decomposed.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.scaled_dot_product_attention.default):
        mask: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if mask is None:
            continue
        users, name, value = list(node.users), node.name, node.meta["val"]
        with graph.inserting_after(node):
            zero = graph.call_function(_aten.zeros_like.default, (node,))
        zero.meta["val"] = torch.zeros_like(value)
        with graph.inserting_after(zero):
            result = graph.call_function(_aten.where.self, (None, node, zero))
        with graph.inserting_before(zero):
            seen = call(graph, _aten.amax.default, _as_numbers(graph, mask), [-1], True)
            seen = call(graph, _aten.gt.Scalar, seen, float("-inf") if mask.meta["val"].is_floating_point() else 0)
        result.args = (seen, node, zero)
        result.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, result)
        node._rename(f"{name}_of_hidden")
        result._rename(name)  # the program's signature calls outputs by it
    module.recompile()


def _as_numbers(graph: fx.Graph, mask: fx.Node) -> fx.Node:
    if mask.meta["val"].is_floating_point():
        return mask
    return call(graph, _aten._to_copy.default, mask, dtype=torch.int32)
