"""Arguments of operators: what they are given, what they write to, and what their results share memory with."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ._reachable import reachable


def bound_arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """Yield (schema argument, value) for the arguments that ``node`` gives to its operator."""
    if not isinstance(node.target, OpOverload):
        return
    arguments = node.target._schema.arguments
    for argument, value in zip(arguments, node.args, strict=False):
        yield argument, value
    for argument in arguments:
        if argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def written_arguments(node: Node) -> list[Node]:
    """Return the tensors that an operator writes to in place."""
    return [
        value
        for argument, value in bound_arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node)
    ]


def shared_arguments(node: Node) -> list[Node]:
    """Return the tensors whose memory the result of ``node`` may have."""
    if node.target is operator.getitem or isinstance(node.target, HigherOrderOperator):
        return list(node.all_input_nodes)
    if not isinstance(node.target, OpOverload):
        return []
    declared = [value for argument, value in bound_arguments(node) if argument.alias_info is not None]
    if not declared and _may_share_undeclared(node.target):
        declared = list(node.args[:1])
    return [leaf for leaf in pytree.tree_leaves(declared) if isinstance(leaf, Node)]


def _may_share_undeclared(target: OpOverload[..., Any]) -> bool:
    """Tell whether an operator may return a view although its schema has none, as ``dropout`` returns its argument."""
    name = target.name()  # type: ignore[no-untyped-call]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return composite or str(target.overloadpacket.__name__).startswith(("unsafe_", "_unsafe_"))


def written_in_place(graph: Graph) -> set[Node]:
    """Return the tensors that are written to in a graph that is not functional, and all that may share their memory."""
    writers = (node for node in graph.nodes if node.target != torch.ops.aten.detach_.default)
    return sharing_memory(argument for node in writers for argument in written_arguments(node))


def restrided_views(graph: Graph) -> list[Node]:
    """Return what ``as_strided`` reads where that is a view of more, and the views that it is made of.

    ``as_strided`` may read what lies beside the view, which a copy, as a cast makes one, does not have.
    """
    read = [node.args[0] for node in graph.nodes if node.target == torch.ops.aten.as_strided.default]
    memory = reachable((node for node in read if isinstance(node, Node)), shared_arguments)
    return [node for node in graph.nodes if node in memory and shared_arguments(node)]


def sharing_memory(tensors: Iterable[Node]) -> set[Node]:
    """Return tensors, and all of their graph that may share the memory of one."""

    def sharing(node: Node) -> list[Node]:
        return [*shared_arguments(node), *(user for user in node.users if node in shared_arguments(user))]

    return reachable(tensors, sharing)
