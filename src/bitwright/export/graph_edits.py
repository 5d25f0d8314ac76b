"""Edits of exported programs: calls, arguments, replacements, and float32 between casts for half precision."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

__all__ = ["argument", "call", "erase_with_what_it_reads", "half_result", "replace", "widen"]

_HALVES = (torch.float16, torch.bfloat16)


def half_result(node: fx.Node) -> torch.Tensor | None:
    """Return the first result in half precision; None where there is none."""
    value = node.meta.get("val")
    results = value if isinstance(value, tuple | list) else (value,)
    return next((one for one in results if isinstance(one, torch.Tensor) and one.dtype in _HALVES), None)


def widen(graph: fx.Graph, node: fx.Node) -> None:
    """Let an operator compute in float32, and round each of its results once."""
    before = node.meta["val"]

    def wide(operand: fx.Node) -> fx.Node:
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in _HALVES:
            return operand
        return _cast(graph, operand, torch.float32)

    target: Any = node.target
    with graph.inserting_before(node):
        arguments = fx.map_arg((node.args, node.kwargs), wide)
        widened = call(graph, target, *arguments[0], **arguments[1])
        widened.meta = {**node.meta, "val": widened.meta["val"]}
    if isinstance(before, torch.Tensor):
        _narrow(graph, widened, node, before.dtype)
    else:
        for part in list(node.users):
            with graph.inserting_before(node):
                piece = call(graph, operator.getitem, widened, part.args[1])
            _narrow(graph, piece, part, part.meta["val"].dtype)
    graph.erase_node(node)


def _narrow(graph: fx.Graph, wide: fx.Node, node: fx.Node, dtype: torch.dtype) -> None:
    """Let all that reads a node read this one, rounded to the node's type."""
    with graph.inserting_after(wide):
        rounded = wide if wide.meta["val"].dtype == dtype else _cast(graph, wide, dtype)
    node.replace_all_uses_with(rounded)
    if node.target is operator.getitem:
        graph.erase_node(node)
    rounded._rename(node.name)  # the program's signature calls outputs by it


def _cast(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a cast."""
    return call(graph, torch.ops.aten._to_copy.default, value, dtype=dtype)


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call, with the shape that it gives."""
    node = graph.call_function(target, args, kwargs)
    shapes: Any = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    node.meta["val"] = target(*shapes[0], **shapes[1])
    return node


def replace(node: fx.Node, by: fx.Node) -> None:
    """Let another node take a node's place, and its name, by which the program's signature calls outputs."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
    by._rename(node.name)


def erase_with_what_it_reads(node: fx.Node) -> None:
    """Erase a node that nothing reads, and what nothing else reads of that which it was made of."""
    made_of = node.all_input_nodes
    node.graph.erase_node(node)
    for one in made_of:
        if not one.users and one.op == "call_function":
            erase_with_what_it_reads(one)


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument of a call of an operator, or the operator's default for it.

    Raises:
        KeyError: the operator has none of that name.
    """
    target: Any = node.target
    for number, one in enumerate(target._schema.arguments):
        if one.name == name:
            given = node.args[number] if number < len(node.args) else one.default_value
            return node.kwargs.get(name, given)
    raise KeyError(name)
