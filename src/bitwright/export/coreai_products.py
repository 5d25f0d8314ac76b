"""Products of matrices, kept apart from views that Core AI moves past them in one of two operands only."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from .graph_edits import call

__all__ = ["keep_products_apart"]

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_KEPT = (*_VIEWS, _aten.alias.default, _aten.clone.default, _aten.squeeze.dims, _aten.unsqueeze.default)
"""Operators through which the optimizer sees a view."""


def keep_products_apart(graph: fx.Graph) -> None:
    """Put a maximum of a value and itself behind products that Core AI's optimizer breaks, in place.

    A view that splits a batch of unknown size is joined with the one before the product; a product of rows that a view
    has laid together, behind one another, becomes a product of what the view read. Either happens in one operand of
    what follows, whose sizes no longer fit then: the runtime refuses the first, the second ends the process. Of the
    operators that change nothing, this is one that the optimizer leaves where it is.

    Args:
        graph: of a decomposed program.
    """
    for node in list(graph.nodes):
        if node.target is _aten.bmm.default and not isinstance(node.meta["val"].shape[0], int):
            _put_maximum(graph, node, [user for user in node.users if user.target in _VIEWS])
        elif node.target is _aten.mm.default and _laid_together(node.args[0]):
            for rows in list(_rows(node)):
                _put_maximum(graph, rows, [user for user in rows.users if user.target not in _VIEWS])


def _laid_together(rows: fx.Node) -> bool:
    """Whether a view has laid the rows of a matrix together, or those that its rows are computed from, one by one."""
    while rows.meta["val"].ndim == 2:
        position = 1 if rows.target is _aten.addmm.default else 0
        before = rows.args[position] if len(rows.args) > position else None
        if not isinstance(before, fx.Node) or not isinstance(before.meta["val"], torch.Tensor):
            return False
        of_rows = rows.target in (*_KEPT, _aten.addmm.default, _aten.mm.default)
        if not of_rows and before.meta["val"].shape != rows.meta["val"].shape:
            return False
        rows = before
    return bool(rows.meta["val"].ndim > 2)


def _rows(product: fx.Node) -> Iterator[fx.Node]:
    """A product, and views of it, that are matrices."""
    if product.meta["val"].ndim == 2:
        yield product
    for user in product.users:
        if user.target in _VIEWS:
            yield from _rows(user)


def _put_maximum(graph: fx.Graph, node: fx.Node, users: list[fx.Node]) -> None:
    if not users:
        return
    with graph.inserting_after(node):
        same = call(graph, _aten.maximum.default, node, node)
    for user in users:
        user.replace_input_with(node, same)
