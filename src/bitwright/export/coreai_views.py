"""Views that Core AI's optimizer moves where they do not belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .graph_edits import call, replace

__all__ = ["unsqueeze_views"]

_aten = torch.ops.aten


def unsqueeze_views(graph: fx.Graph) -> None:
    """Write views of dynamic sizes that only add dimensions of one element as ``unsqueeze``, in place.

    The optimizer takes such a view, of position embeddings as in ``x + table[:n].view(1, n, -1)``, behind the sum or
    product that reads it, whose other operand fills the dimensions that the view has added: the sizes do not fit then,
    and the runtime refuses the program.

    Args:
        graph: of a decomposed program.
    """
    for node in list(graph.nodes):
        if node.target not in (_aten.view.default, _aten._unsafe_view.default):
            continue
        value, shape = node.args[0], node.meta["val"].shape
        added = [] if all(isinstance(size, int) for size in shape) else _added(value.meta["val"].shape, shape)
        with graph.inserting_before(node):
            for dim in added:
                value = call(graph, _aten.unsqueeze.default, value, dim)
        if added:
            value.meta = {**node.meta, "val": value.meta["val"]}
            replace(node, value)


def _added(before: Sequence[Any], after: Sequence[Any]) -> list[int]:
    """Where a shape has ones that the other lacks; nowhere if something else differs."""
    added, rest = [], list(before)
    for dim, size in enumerate(after):
        if rest and statically_known_true(rest[0] == size):
            rest.pop(0)
        elif isinstance(size, int) and size == 1:
            added.append(dim)
        else:
            return []
    return [] if rest else added
