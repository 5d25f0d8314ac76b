"""Mixtures of experts in exported programs, in operators that every converter knows.

transformers sorts tokens by expert, counts them with a histogram, and multiplies each group of rows with its expert's
matrix in one operator, whose sizes are numbers of the data. Converters have neither. JetMoE splits the rows at such
numbers, for which some converters have no form.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .graph_edits import argument, call, replace

__all__ = ["spell_out_experts", "spell_out_split_experts"]

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


def spell_out_split_experts(module: fx.GraphModule) -> None:
    """Write products of rows that are split at numbers of the data, each with a matrix, with ordinary operators.

    All rows are multiplied with all matrices, as in `spell_out_experts`. What is split for anything else stays.

    Args:
        module: of an exported program, before it is decomposed.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.cat.default):
        found = _split_and_multiplied(node)
        if found is None:
            continue
        x, sizes, matrices = found
        with node.meta["val"].fake_mode, graph.inserting_before(node):
            ends = call(graph, _aten.cumsum.default, call(graph, _aten.stack.default, sizes), 0)
            weight = call(graph, _aten.transpose.int, _stacked(graph, matrices), 1, 2)
            result = _by_choice(graph, x, weight, ends, _numbers(graph, x))
        replace(node, result)
        graph.eliminate_dead_code()
        _drop_assertions(graph, [user for size in sizes for user in size.users if user.target is _aten.item.default])
    module.recompile()


def _drop_assertions(graph: fx.Graph, numbers: list[fx.Node]) -> None:
    """Erase what is asserted of numbers of the data, and the numbers, unless anything else reads them."""
    reached = set(numbers)
    for node in list(graph.nodes):
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            if node.target is _aten._assert_scalar.default:
                graph.erase_node(node)
    graph.eliminate_dead_code()


def _split_and_multiplied(node: fx.Node) -> tuple[fx.Node, list[fx.Node], list[fx.Node]] | None:
    """What is split, the tensors of its sizes, and the matrices, if parts are multiplied and put together again."""
    pieces = argument(node, "tensors")
    if argument(node, "dim") != 0 or any(piece.target is not _aten.linear.default for piece in pieces):
        return None
    parts, matrices = [piece.args[0] for piece in pieces], [piece.args[1] for piece in pieces]
    if any(
        part.target is not operator.getitem or argument(piece, "bias")
        for part, piece in zip(parts, pieces, strict=True)
    ):
        return None
    split = parts[0].args[0]
    if split.target is not _aten.split_with_sizes.default or argument(split, "dim") != 0:
        return None
    sizes = argument(split, "split_sizes")
    if [part.args for part in parts] != [(split, number) for number in range(len(sizes))]:
        return None
    if not all(isinstance(size, fx.Node) and size.target is _aten.item.default for size in sizes):
        return None
    same = all(matrix.meta["val"].shape == matrices[0].meta["val"].shape for matrix in matrices)
    whole = argument(split, "self")
    if not same or whole.meta["val"].ndim != 2 or matrices[0].meta["val"].ndim != 2:
        return None
    return whole, [size.args[0] for size in sizes], matrices


def _stacked(graph: fx.Graph, matrices: list[fx.Node]) -> fx.Node:
    """The matrices in one tensor: that which they are taken from, if they are all of it."""
    source = matrices[0].args[0] if matrices[0].args else None
    each = [(source, 0, number) for number in range(len(matrices))]
    if all(matrix.target is _aten.select.int for matrix in matrices) and [one.args for one in matrices] == each:
        assert isinstance(source, fx.Node)
        if source.meta["val"].shape[0] == len(matrices):
            return source
    return call(graph, _aten.stack.default, matrices)


def _numbers(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """The number of each row."""
    ones = call(graph, _aten.full_like.default, call(graph, _aten.select.int, x, 1, 0), 1, dtype=torch.int64)
    return call(graph, _aten.sub.Tensor, call(graph, _aten.cumsum.default, ones, 0), 1)


def _product(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Rows of shape (rows, inputs), matrices of (experts, inputs, outputs), ends of the groups of (experts,)."""
    x, weight, ends, *others = (argument(node, one.name) for one in _schema(node))
    rows, matrices = x.meta["val"], weight.meta["val"]
    if rows.ndim != 2 or matrices.ndim != 3 or ends is None or any(other is not None for other in others):
        return None
    number = _numbers(graph, x)
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
