"""Products of matrices: of rows where one matrix is for all, and apart from views that Core AI moves past them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false

from .graph_edits import call, widen

__all__ = ["keep_products_apart", "lay_rows_in_order", "widen_products"]

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_KEPT = (*_VIEWS, _aten.alias.default, _aten.clone.default, _aten.squeeze.dims, _aten.unsqueeze.default)
"""Operators through which the optimizer sees a view."""
_REDUCTIONS = (
    *(_aten.mean.dim, _aten.sum.dim_IntList, _aten.amax.default, _aten.amin.default),
    *(_aten.any.dim, _aten.all.dim, _aten.prod.dim_int, _aten.argmax.default, _aten.argmin.default),
)
_RIGHT = {_aten.mm.default: 1, _aten.bmm.default: 1, _aten.addmm.default: 2, _aten.baddbmm.default: 2}
"""Where products have their second operand."""


def lay_rows_in_order(graph: fx.Graph) -> None:
    """Copy batches of rows whose memory is in another order, where one matrix multiplies them all, in place.

    PyTorch makes one product of rows that lie in order, and repeats the matrix for others. Core AI stores small results
    of that, several times the weight.

    Args:
        graph: of a program before it is decomposed.
    """
    for op in (_aten.linear.default, _aten.matmul.default):
        for node in graph.find_nodes(op="call_function", target=op):
            x, matrix = node.args[:2]
            value = x.meta["val"]
            if value.dim() > 2 and matrix.meta["val"].dim() == 2 and not is_contiguous_or_false(value):
                with graph.inserting_before(node):
                    rows = call(graph, _aten.clone.default, x, memory_format=torch.contiguous_format)
                node.update_arg(0, rows)


def keep_products_apart(graph: fx.Graph) -> None:
    """Put a maximum of a value and itself beside products that Core AI's optimizer breaks, in place.

    A view that splits a batch of unknown size is joined with the one before the product; a product of rows that a view
    has laid together, behind one another, becomes a product of what the view read. Either happens in one operand of
    what follows, whose sizes no longer fit then: the runtime refuses the first, the second ends the process. A product
    with a view, as second operand, of what has as many rows by chance becomes one with what the view read, with other
    numbers. Of the operators that change nothing, this is one that the optimizer leaves where it is.

    Args:
        graph: of a decomposed program.
    """
    for node in list(graph.nodes):
        right: Any = node.args[_RIGHT[node.target]] if node.target in _RIGHT else None
        if right is not None and _read_as_it_was(right):
            _put_maximum(graph, right, [node])
        if node.target is _aten.bmm.default and not isinstance(node.meta["val"].shape[0], int):
            _put_maximum(graph, node, [user for user in node.users if user.target in _VIEWS])
        elif node.target is _aten.mm.default and _laid_together(node.args[0]):
            for rows in list(_rows(node)):
                _put_maximum(graph, rows, [user for user in rows.users if user.target not in _VIEWS])


def widen_products(graph: fx.Graph) -> None:
    """Let products of bfloat16 matrices be added up in float32, as PyTorch adds them up, and be rounded once, in place.

    Core AI's runtime adds those of a batch with one matrix in bfloat16: with 1024 inputs, 28 dB of a linear layer are
    left.

    Args:
        graph: of a decomposed program, in which :func:`keep_products_apart` has been.
    """
    for op in _RIGHT:
        for node in graph.find_nodes(op="call_function", target=op):
            if node.meta["val"].dtype == torch.bfloat16:
                widen(graph, node)


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


def _read_as_it_was(right: Any) -> bool:
    """Whether a view has made a product's second operand of a tensor with as many rows, and other columns."""
    rows, columns = right.meta["val"].shape[-2:]
    viewed = right
    while (viewed := _viewed(viewed)) is not None:
        shapes = [viewed.meta["val"].shape, _with_reduced(viewed)]
        for sizes in (shape[-2:] for shape in shapes if len(shape) > 1):
            if str(sizes[1]) != str(columns) and _may_be_equal(sizes[0], rows):
                return True
    return False


def _with_reduced(node: Any) -> list[Any]:
    """The sizes of a reduction's result before the dimensions that it was reduced by, now of one, are left out."""
    if node.target not in _REDUCTIONS or len(node.args) < 2:
        return []
    rank, dims = node.args[0].meta["val"].dim(), node.args[1]
    reduced = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
    left = iter(node.meta["val"].shape)
    is_kept = node.meta["val"].dim() == rank
    return [1 if dim in reduced and not is_kept else next(left) for dim in range(rank)]


def _viewed(node: Any) -> Any:
    """What a node is a view of, whose elements have the same order; None for other operators."""
    if node.target in (*_KEPT, _aten.select.int):
        return node.args[0]
    if node.target is _aten.expand.default:
        before = node.args[0]
        return before if str(node.meta["val"].shape) == str(before.meta["val"].shape) else None
    order = list(range(node.meta["val"].dim()))
    while node.target is _aten.permute.default:
        node, dims = node.args
        order = [dims[dim] % len(order) for dim in order]
        sizes = node.meta["val"].shape
        moved = [dim for dim in order if not (isinstance(sizes[dim], int) and sizes[dim] == 1)]
        if moved == sorted(moved):
            return node
    return None


def _may_be_equal(size: Any, other: Any) -> bool:
    return not (isinstance(size, int) and isinstance(other, int)) or size == other


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
