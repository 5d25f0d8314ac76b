"""Sub-graphs that ``torch.export`` makes of scopes, such as ``with torch.enable_grad():``, put back into the graph.

What runs inside is then seen like everything else.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx, nn

from .aten_names import aten_name

__all__ = ["graph_called", "inline_scopes"]

_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"


def inline_scopes(graph: fx.Graph, root: nn.Module) -> None:
    """Replace calls of sub-graphs that compute the same without their scope by what they call; changes ``graph``.

    These are scopes that enable gradients, and those that switch autocast off around weights; scopes without weights
    keep their precision where the whole model runs under autocast.

    Args:
        graph: the graph.
        root: the module that its sub-graphs and tensors are attributes of.
    """
    inlined = False
    for node in list(graph.nodes):
        if _is_transparent(node, root):
            body = next(found for argument in node.args if (found := graph_called(argument, root)) is not None)
            inline_scopes(body.graph, body)
            _drop_tracepoints(body.graph)
            _inline(graph, root, node, body)
            inlined = True
    if inlined:
        _drop_unused(graph, root)


def graph_called(node: Any, root: nn.Module) -> fx.GraphModule | None:
    """Return the sub-graph that a node reads from ``root``, None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found = _attribute(root, str(node.target))
    return found if isinstance(found, fx.GraphModule) else None


def _attribute(root: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    try:
        return getattr(root.get_submodule(path), attribute, None)
    except AttributeError:
        return None


def _is_transparent(node: fx.Node, root: nn.Module) -> bool:
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    name = aten_name(node.target)
    if name == _GRAD:
        return node.args[0] is True
    return name == _AUTOCAST and node.args[2] is False and any(_is_weight(one, root) for one in node.args)


def _is_weight(argument: Any, root: nn.Module) -> bool:
    is_read = isinstance(argument, fx.Node) and argument.op == "get_attr"
    value = _attribute(root, str(argument.target)) if is_read else None
    return isinstance(value, nn.Parameter) and sum(size > 1 for size in value.shape) >= 2


def _inline(graph: fx.Graph, root: nn.Module, call: fx.Node, body: fx.GraphModule) -> None:
    """Put the nodes of ``body`` in the place of ``call``; they keep their names as far as these are free."""
    given = [node for node in body.graph.nodes if node.op == "placeholder"]
    inner = [node for node in body.graph.nodes if node.op not in ("placeholder", "output")]
    twins: dict[fx.Node, Any] = dict(zip(given, call.args[len(call.args) - len(given) :], strict=True))
    with graph.inserting_before(call):
        for node in inner:
            twins[node] = graph.node_copy(node, twins.__getitem__)
            if node.op == "get_attr":
                twins[node].target = _moved(root, body, str(node.target))
    results: Any = body.graph.output_node().args[0]
    for item in list(call.users):
        result = results[item.args[1]]
        if result in inner:
            twins[result].meta.setdefault("exported_name", item.name)
        item.replace_all_uses_with(twins[result])
        graph.erase_node(item)
    graph.erase_node(call)
    taken = {node.name for node in graph.nodes}
    for node in inner:
        if node.name not in taken:
            twins[node].name = node.name


def _drop_tracepoints(graph: fx.Graph) -> None:
    """Take out what marks the boundaries of modules, which ``torch.export`` only reads outside of sub-graphs."""
    for node in reversed(list(graph.nodes)):
        if node.target is torch.ops.higher_order._export_tracepoint:
            for item in list(node.users):
                item.replace_all_uses_with(node.args[item.args[1]])
                graph.erase_node(item)
            graph.erase_node(node)


def _moved(root: nn.Module, body: nn.Module, name: str) -> str:
    """Make what ``body`` has under ``name`` an attribute of ``root`` and return its name there."""
    value = _attribute(body, name)
    plain = name.replace(".", "_")
    free = next(one for n in itertools.count() if not hasattr(root, one := f"{plain}_{n}"))
    if isinstance(value, nn.Module):
        root.add_module(free, value)
    else:
        root.register_buffer(free, value, persistent=False)
    return free


def _drop_unused(graph: fx.Graph, root: nn.Module) -> None:
    """Remove sub-graphs that nothing calls."""
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr" and node.users}
    for name, child in list(root.named_children()):
        if isinstance(child, fx.GraphModule) and name not in read:
            del root._modules[name]
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
