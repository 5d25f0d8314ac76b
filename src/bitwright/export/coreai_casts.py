"""Casts that lose something, kept apart from casts back: Core AI takes two casts in a row for one."""

from __future__ import annotations

import torch
from torch import fx

from .graph_edits import call

__all__ = ["keep_casts"]

_aten = torch.ops.aten


def keep_casts(graph: fx.Graph) -> None:
    """Round numbers before they become integers, and compare integers that become bools with zero, in place.

    Args:
        graph: of a decomposed program.
    """
    for node in graph.find_nodes(op="call_function", target=_aten._to_copy.default):
        x = node.args[0]
        before, after = x.meta["val"].dtype, node.meta["val"].dtype
        if before.is_floating_point and _is_integer(after):
            with graph.inserting_before(node):
                node.replace_input_with(x, call(graph, _aten.trunc.default, x))
        elif _is_integer(before) and after == torch.bool:
            node.target, node.args, node.kwargs = _aten.ne.Scalar, (x, 0), {}


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
