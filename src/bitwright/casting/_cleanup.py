"""Removal of casts that do nothing: chains, round trips, no-ops and duplicates.

A cast may be removed only when that cannot change a number: it was inserted by a pass of this package, or it is
an original cast that widens. An original narrowing cast is the author's rounding, and a cast with ``copy`` is the
author's copy: both stay. So do casts of, and to, what is written in place: each is a copy of its moment. Casts between
dtype categories (float, signed integer, ...) are never merged.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import torch
from torch.fx import Graph, Node

from ._arguments import written_in_place

_aten = torch.ops.aten
CAST_OPS: Final = frozenset(
    {
        _aten._to_copy.default,
        _aten.to.dtype,
        _aten.to.dtype_layout,
        torch.ops.prims.convert_element_type.default,
    }
)
_PLAIN_KWARGS: Final = frozenset({"dtype"})
_DEFAULT_VALUES: Final = (None, False, torch.strided, torch.preserve_format)


def dtype_of(node: Node) -> torch.dtype | None:
    """Return the dtype of the tensor that ``node`` computes; None when it computes something else."""
    dtype = getattr(node.meta.get("val"), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def category(dtype: torch.dtype) -> str:
    """Return the family within which casts of ``dtype`` may be merged."""
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    if dtype == torch.bool:
        return "bool"
    return "signed" if dtype.is_signed else "unsigned"


def cleanup_casts(graph: Graph, pass_inserted: Container[Node]) -> None:
    """Remove needless casts until nothing changes; dead nodes are left to ``eliminate_dead_code``.

    Args:
        graph: graph whose nodes carry ``meta["val"]``; changed in place.
        pass_inserted: casts that a pass inserted or took over.
    """
    changed, written = True, written_in_place(graph)
    while changed:
        changed = False
        for node in list(graph.nodes):
            if node.users and _removable(node, pass_inserted, written):
                changed |= _shorten(node, pass_inserted, written)
        changed |= _merge_duplicates(graph, pass_inserted, written)


def is_plain_cast(node: Node) -> bool:
    """Tell whether ``node`` changes the dtype and nothing else (no copy, device, layout or memory format)."""
    if node.op != "call_function" or node.target not in CAST_OPS or not isinstance(node.args[0], Node):
        return False
    if dtype_of(node) is None or dtype_of(node.args[0]) is None:
        return False
    extra = [value for key, value in node.kwargs.items() if key not in _PLAIN_KWARGS]
    extra += [value for value in node.args[1:] if not isinstance(value, torch.dtype)]
    source = node.args[0].meta["val"]
    return all(value in _DEFAULT_VALUES or value == source.device for value in extra)


def _removable(node: Node, pass_inserted: Container[Node], written: Container[Node]) -> bool:
    if not is_plain_cast(node) or node in written or node.args[0] in written:
        return False
    if node in pass_inserted:
        return True
    source, target = _ends(node)
    return category(source) == category(target) and _widens(source, target)


def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    return source != target and torch.promote_types(source, target) == target


def _ends(node: Node) -> tuple[torch.dtype, torch.dtype]:
    source, target = dtype_of(node.all_input_nodes[0]), dtype_of(node)
    if source is None or target is None:
        raise AssertionError(f"{node.name} is no cast")
    return source, target


def _shorten(node: Node, pass_inserted: Container[Node], written: Container[Node]) -> bool:
    """Bypass ``node`` when it is a no-op, or let it read from before a chain of removable casts."""
    source, target = _ends(node)
    origin = node.all_input_nodes[0]
    while _removable(origin, pass_inserted, written):
        if not category(_ends(origin)[0]) == category(source) == category(target):
            break
        origin = origin.all_input_nodes[0]
        if dtype_of(origin) == target:
            break
    if dtype_of(origin) == target:
        node.replace_all_uses_with(origin)
        return True
    if origin is not node.all_input_nodes[0] and node in pass_inserted:
        node.replace_input_with(node.all_input_nodes[0], origin)
        return True
    return False


def _merge_duplicates(graph: Graph, pass_inserted: Container[Node], written: Container[Node]) -> bool:
    seen: dict[tuple[Node, torch.dtype], Node] = {}
    changed = False
    for node in graph.nodes:
        if not node.users or not _removable(node, pass_inserted, written):
            continue
        key = (node.all_input_nodes[0], _ends(node)[1])
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            changed = True
    return changed
