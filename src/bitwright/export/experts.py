"""Mixtures of experts in exported programs, in operators that every converter knows.

transformers sorts tokens by expert, counts them with a histogram, and multiplies each group of rows with its expert's
matrix in one operator, whose sizes are numbers of the data. Converters have neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .graph_edits import argument, call, replace

__all__ = ["spell_out_experts"]

_aten = torch.ops.aten


def spell_out_experts(module: fx.GraphModule) -> bool:
    """Write products of groups of rows, and what belongs to them, with ordinary operators, in place.

    Fewer rows than experts, as in a decoder that makes one token after the other, are multiplied each with a copy of
    its expert's matrix; more rows with the matrices of all experts, of which one is chosen. Histograms between given
    bounds and uninitialised memory are written out as well.

    Args:
        module: of an exported program, before it is decomposed.

    Returns:
        Whether there was anything to write out.
    """
    graph, changed = module.graph, False
    for node in list(graph.nodes):
        form = _FORMS.get(str(node.target))
        if form is None:
            continue
        with node.meta["val"].fake_mode, graph.inserting_before(node):
            result = form(graph, node)
        if result is not None:
            changed = True
            replace(node, result)
    module.recompile()
    return changed


def _product(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Rows of shape (rows, inputs), matrices of (experts, inputs, outputs), ends of the groups of (experts,)."""
    x, weight, ends, *others = (argument(node, one.name) for one in _schema(node))
    rows, matrices = x.meta["val"], weight.meta["val"]
    if rows.ndim != 2 or matrices.ndim != 3 or ends is None or any(other is not None for other in others):
        return None
    ones = call(graph, _aten.full_like.default, call(graph, _aten.select.int, x, 1, 0), 1, dtype=torch.int64)
    number = call(graph, _aten.sub.Tensor, call(graph, _aten.cumsum.default, ones, 0), 1)
    experts = matrices.shape[0]
    if isinstance(rows.shape[0], int) and rows.shape[0] <= experts:
        return _by_copies(graph, x, weight, ends, number, experts)
    return _by_choice(graph, x, weight, ends, number)


def _schema(node: fx.Node) -> Any:
    target: Any = node.target
    return target._schema.arguments


def _by_copies(graph: fx.Graph, x: Any, weight: Any, ends: Any, number: fx.Node, experts: int) -> fx.Node:
    """The product of every row with a copy of its expert's matrix."""
    ended = call(graph, _aten.ge.Tensor, call(graph, _aten.unsqueeze.default, number, 1), ends)
    expert = call(graph, _aten.sum.dim_IntList, call(graph, _aten._to_copy.default, ended, dtype=torch.int64), [1])
    expert = call(graph, _aten.clamp.default, expert, 0, experts - 1)
    matrices = call(graph, _aten.index_select.default, weight, 0, expert)
    product = call(graph, _aten.bmm.default, call(graph, _aten.unsqueeze.default, x, 1), matrices)
    return call(graph, _aten.squeeze.dims, product, [1])


def _by_choice(graph: fx.Graph, x: Any, weight: Any, ends: Any, number: fx.Node) -> fx.Node:
    """The products of all rows with all matrices; of each row that of its expert."""
    products = call(graph, _aten.matmul.default, call(graph, _aten.unsqueeze.default, x, 0), weight)
    column = call(graph, _aten.unsqueeze.default, ends, 1)
    before_end = call(graph, _aten.lt.Tensor, number, column)
    starts = call(graph, _aten.slice.Tensor, column, 0, 0, -1)
    starts = call(graph, _aten.cat.default, [call(graph, _aten.full_like.default, _first(graph, column), 0), starts])
    mine = call(graph, _aten.logical_and.default, call(graph, _aten.ge.Tensor, number, starts), before_end)
    mine = call(graph, _aten.unsqueeze.default, mine, 2)
    zero = call(graph, _aten.zeros_like.default, products)
    return call(graph, _aten.sum.dim_IntList, call(graph, _aten.where.self, mine, products, zero), [0])


def _first(graph: fx.Graph, column: fx.Node) -> fx.Node:
    return call(graph, _aten.slice.Tensor, column, 0, 0, 1)


def _histogram(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Counts of numbers by bin, with PyTorch's arithmetic for the bin of a number."""
    x, bins, low, high = (argument(node, one.name) for one in _schema(node))
    if low >= high:
        return None  # the bounds are numbers of the data
    dtype = node.meta["val"].dtype
    flat = call(graph, _aten.reshape.default, x, [-1])
    flat = call(graph, _aten._to_copy.default, flat, dtype=torch.float32)
    place = call(graph, _aten.mul.Tensor, call(graph, _aten.sub.Tensor, flat, low), bins)
    place = call(graph, _aten.trunc.default, call(graph, _aten.div.Tensor, place, high - low))
    place = call(graph, _aten.clamp.default, place, None, bins - 1)
    inside = [call(graph, op, flat, bound) for op, bound in ((_aten.ge.Scalar, low), (_aten.le.Scalar, high))]
    numbers = call(graph, _aten.arange.default, bins, dtype=torch.float32, device=x.meta["val"].device)
    hit = call(graph, _aten.eq.Tensor, call(graph, _aten.unsqueeze.default, place, 1), numbers)
    both = call(graph, _aten.logical_and.default, *inside)
    hit = call(graph, _aten.logical_and.default, hit, call(graph, _aten.unsqueeze.default, both, 1))
    return call(graph, _aten.sum.dim_IntList, call(graph, _aten._to_copy.default, hit, dtype=dtype), [0])


def _zeros(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Memory that is written to later."""
    return call(graph, _aten.zeros_like.default, *node.args, **node.kwargs)


_FORMS: dict[str, Callable[[fx.Graph, fx.Node], fx.Node | None]] = {
    "aten._grouped_mm.default": _product,
    "aten.empty_like.default": _zeros,
    "aten.histc.default": _histogram,
    "transformers.grouped_mm_fallback.default": _product,
}
