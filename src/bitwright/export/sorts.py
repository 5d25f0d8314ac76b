"""Sorts of exported programs for converters and runtimes that have only the first few of sorted values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .graph_edits import argument, call, replace

__all__ = ["spell_out_dynamic_sorts", "spell_out_sorts"]

_aten = torch.ops.aten
_STABLE = (_aten.sort.stable, _aten.argsort.stable)
_ORDERS = (_aten.argsort.default, _aten.argsort.stable)
_SORTS = (*_STABLE, *_ORDERS, _aten.sort.default)


def spell_out_sorts(module: fx.GraphModule) -> None:
    """Write sorts as the largest or smallest values, all of them, in place.

    Those keep equal values in no order, so that stable sorts are written by ranks, as sorts of unknown sizes are.
    """
    for node in _sorts(module.graph):
        stable = node.target in _STABLE and bool(argument(node, "stable"))
        _spell_out(node, _by_ranks if stable or _size(node) is None else _by_largest)
    module.recompile()


def spell_out_dynamic_sorts(module: fx.GraphModule) -> None:
    """Write sorts along dimensions of unknown sizes by ranks, in place: how many values are to stand before each."""
    for node in _sorts(module.graph):
        if _size(node) is None:
            _spell_out(node, _by_ranks)
    module.recompile()


def _sorts(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in _SORTS and argument(node, "self").meta["val"].ndim]


def _spell_out(node: fx.Node, way: Callable[[fx.Graph, fx.Node, int, bool], list[fx.Node]]) -> None:
    x, dim, descending = (argument(node, name) for name in ("self", "dim", "descending"))
    with x.meta["val"].fake_mode, node.graph.inserting_before(node):
        parts = way(node.graph, x, dim, descending)
    if node.target in _ORDERS:
        replace(node, parts[1])
        return
    for user in list(node.users):
        number: Any = user.args[1]
        replace(user, parts[number])
    node.graph.erase_node(node)
    for part in parts:
        if not part.users:
            node.graph.erase_node(part)


def _size(node: fx.Node) -> int | None:
    """How many values are sorted; None if that is unknown."""
    size = argument(node, "self").meta["val"].shape[argument(node, "dim")]
    return size if isinstance(size, int) else None


def _by_largest(graph: fx.Graph, x: fx.Node, dim: int, descending: bool) -> list[fx.Node]:
    sort = call(graph, _aten.topk.default, x, x.meta["val"].shape[dim], dim, descending)
    return [call(graph, operator.getitem, sort, number) for number in (0, 1)]


def _by_ranks(graph: fx.Graph, x: fx.Node, dim: int, descending: bool) -> list[fx.Node]:
    """Sorted values and their places, by comparisons of every value with every other."""
    last = call(graph, _aten.transpose.int, x, dim, -1)
    place = call(graph, _aten.full_like.default, last, 1, dtype=torch.int64)
    place = call(graph, _aten.sub.Tensor, call(graph, _aten.cumsum.default, place, -1), 1)
    mine, other = (call(graph, _aten.unsqueeze.default, last, axis) for axis in (-1, -2))
    my_place, other_place = (call(graph, _aten.unsqueeze.default, place, axis) for axis in (-1, -2))
    before = call(graph, _aten.gt.Tensor if descending else _aten.lt.Tensor, other, mine)
    equal = call(graph, _aten.eq.Tensor, other, mine)
    if x.meta["val"].dtype.is_floating_point:
        before, equal = _with_nan(graph, before, equal, mine, other, descending)
    earlier = call(graph, _aten.lt.Tensor, other_place, my_place)
    before = call(graph, _aten.logical_or.default, before, call(graph, _aten.logical_and.default, equal, earlier))
    rank = call(graph, _aten.sum.dim_IntList, call(graph, _aten._to_copy.default, before, dtype=torch.int64), [-1])
    order = call(graph, _aten.scatter.src, call(graph, _aten.zeros_like.default, place), -1, rank, place)
    values = call(graph, _aten.gather.default, last, -1, order)
    return [call(graph, _aten.transpose.int, part, dim, -1) for part in (values, order)]


def _with_nan(
    graph: fx.Graph, before: fx.Node, equal: fx.Node, mine: fx.Node, other: fx.Node, descending: bool
) -> tuple[fx.Node, fx.Node]:
    """Comparisons that take NaN for the largest number, as PyTorch's sorts do."""
    nan = [call(graph, _aten.ne.Tensor, value, value) for value in (mine, other)]
    larger, smaller = (nan[1], nan[0]) if descending else nan
    one_is_nan = call(graph, _aten.logical_and.default, larger, call(graph, _aten.logical_not.default, smaller))
    both_are_nan = call(graph, _aten.logical_and.default, *nan)
    return (
        call(graph, _aten.logical_or.default, before, one_is_nan),
        call(graph, _aten.logical_or.default, equal, both_are_nan),
    )
