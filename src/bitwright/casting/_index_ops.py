"""Operators that take tensors of indices, and what an index may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from ._arguments import restrided_views
from ._reachable import reachable

_aten = torch.ops.aten

#: Position of the index argument.
INDEX_ARGUMENT: Final = {
    _aten.embedding.default: 1,
    _aten.take_along_dim.default: 1,
    _aten.gather.default: 2,
    _aten.index_select.default: 2,
    _aten.scatter.src: 2,
    _aten.scatter.value: 2,
    _aten.scatter_add.default: 2,
    _aten.scatter_reduce.two: 2,
    _aten.index_copy.default: 2,
    _aten.index_add.default: 2,
    _aten.index_fill.int_Scalar: 2,
    _aten.index_fill.int_Tensor: 2,
    _aten.index.Tensor: 1,
    _aten.index_put.default: 1,
    _aten.index_put_.default: 1,
    _aten._unsafe_index.Tensor: 1,
    _aten._unsafe_index_put.default: 1,
}
_FROM_THE_END: Final = (_aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor)
"""Operators that take negative indices although they take no lists."""
_LISTS: Final = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._unsafe_index.Tensor,
        _aten._unsafe_index_put.default,
    }
)


def index_nodes(node: Node) -> list[Node]:
    """Return the tensors that ``node`` uses as indices."""
    position = INDEX_ARGUMENT.get(node.target)  # type: ignore[call-overload]
    if position is None or len(node.args) <= position:
        return []
    argument = node.args[position]
    entries = argument if isinstance(argument, list | tuple) else (argument,)
    return [entry for entry in entries if isinstance(entry, Node)]


def index_bounds(node: Node) -> Iterator[tuple[Node, int | None, Any]]:
    """Yield (index tensor, lowest value or None for minus the size, size of the axis) for every index of ``node``.

    Boolean masks are no indices.
    """
    for position, index in enumerate(index_nodes(node)):
        data, value = node.args[0], index.meta.get("val")
        shape = getattr(data.meta.get("val"), "shape", None) if isinstance(data, Node) else None
        if shape is None or not isinstance(value, torch.Tensor) or value.dtype in (torch.bool, torch.uint8):
            continue
        if node.target in _LISTS:
            listed = node.args[1]
            if isinstance(listed, list | tuple) and all(_is_integer_index(entry) for entry in listed):
                axes = [axis for axis, entry in enumerate(listed) if entry is not None]
                yield index, None, shape[axes[position]]
            continue
        axis = 0 if node.target == _aten.embedding.default else node.args[1] if len(node.args) > 2 else None
        if isinstance(axis, int) and len(shape) > 0:
            yield index, None if node.target in _FROM_THE_END else 0, shape[axis]


def _is_integer_index(entry: Any) -> bool:
    if entry is None:
        return True
    value = entry.meta.get("val") if isinstance(entry, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype not in (torch.bool, torch.uint8)


def build_unsafe_to_cast_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that keep their dtype.

    They are indices, every node that an index is computed from, and views whose memory ``as_strided`` reads.
    """
    indices = (index for node in graph.nodes for index in index_nodes(node))
    return reachable(indices, lambda node: node.all_input_nodes) | set(restrided_views(graph))
