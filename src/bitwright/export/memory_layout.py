"""How the tensors of a captured program lie in memory, in the model that it was captured from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

__all__ = ["memory_orders"]

_Strides = Sequence[int | torch.SymInt]


def memory_orders(graph: fx.Graph, quantized_by: Callable[[fx.Node], fx.Node | None]) -> dict[fx.Node, tuple[int, ...]]:
    """Return the dimensions of each tensor of a program, from the outermost in memory to the innermost.

    What stands for a quantizer in a captured program gives a contiguous tensor; quantizers keep the layout of theirs.
    What follows them is computed again, without data.

    Args:
        graph: of ``torch.export``; every node has its value in ``meta["val"]``.
        quantized_by: the node whose layout a node keeps that stands for a quantizer; None for other nodes.
    """
    found: dict[fx.Node, torch.Tensor] = {}
    for node in graph.nodes:
        recorded = node.meta.get("val")
        if not isinstance(recorded, torch.Tensor):
            continue
        source = quantized_by(node)
        if source is not None and source in found and found[source].shape == recorded.shape:
            found[node] = _strided(recorded, found[source].stride())
        elif any(found[each].stride() != each.meta["val"].stride() for each in node.all_input_nodes if each in found):
            found[node] = _computed(node, found, recorded)
        else:
            found[node] = recorded
    return {node: _order(value.shape, value.stride()) for node, value in found.items()}


def _order(sizes: Sequence[Any], strides: _Strides) -> tuple[int, ...]:
    """The dimensions by their strides; as they are counted where a stride is unknown, and for repeated elements."""
    known = [_known(stride) for stride in strides]
    counted = tuple(range(len(known)))
    if any(stride is None or stride <= 0 for stride in known):
        return counted
    ordered = tuple(sorted(counted, key=lambda dim: -(known[dim] or 0)))
    moved = [dim for dim in ordered if type(sizes[dim]) is not int or sizes[dim] != 1]
    return counted if moved == sorted(moved) else ordered


def _known(stride: int | torch.SymInt) -> int | None:
    """A stride, or that of the example where it depends on a dynamic size."""
    return stride.node.hint if isinstance(stride, torch.SymInt) else stride


def _computed(node: fx.Node, found: dict[fx.Node, torch.Tensor], recorded: torch.Tensor) -> torch.Tensor:
    """The value of a call whose operands lie otherwise than was recorded; the recorded one where it cannot be run."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return recorded
    values = tree_map_only(fx.Node, lambda each: found.get(each, each.meta.get("val")), (node.args, node.kwargs))
    with contextlib.suppress(Exception), _computing(recorded):
        value = node.target(*values[0], **values[1])
        if isinstance(value, torch.Tensor) and value.dim() == recorded.dim():
            return value
    return recorded


def _strided(value: torch.Tensor, strides: _Strides) -> torch.Tensor:
    with _computing(value):
        return torch.empty_strided(value.shape, strides, dtype=value.dtype)


@contextlib.contextmanager
def _computing(value: Any) -> Iterator[None]:
    """Compute without data, in the mode of a value of a program, whose sizes get no new guards."""
    mode = value.fake_mode
    with contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards(), mode:
        yield
