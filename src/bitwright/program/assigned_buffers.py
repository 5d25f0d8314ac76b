"""Buffers to which a model assigns new tensors when it is called, as in ``self.state = 0.9 * self.state + x``.

Of the buffers of the model itself ``torch.export`` makes states that the program writes to. Those of its submodules it
forgets without a word: the program would begin every call with the state of the first one.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._pytree import tree_map_only

from bitwright.errors import BitwrightWarning

__all__ = ["assignments_written", "read_before_writing"]

_COPY: Any = torch.ops.aten.copy_.default


@contextmanager
def assignments_written(model: nn.Module) -> Iterator[None]:
    """Have calls of a model end with writing to its submodules' buffers what was assigned to them.

    Args:
        model: for a capture, within the block, by ``torch.export``.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    modules = {id(module): module for module in model.modules()}
    assigned, other = dict[tuple[int, str], torch.Tensor](), dict[str, None]()

    def note(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        before = module._buffers.get(name)
        if id(module) in paths and before is not None and buffer is not before:
            assigned.setdefault((id(module), name), before)

    def begin(*_: Any) -> None:
        assigned.clear()  # a call that failed, as one capture may before another is tried, leaves its tensors there

    def finish(_: nn.Module, args: Any, result: Any) -> Any:
        for (owner, name), before in assigned.items():
            buffers = modules[owner]._buffers
            value = buffers.get(name)
            if value is None or value is before:
                continue
            result = tree_map_only(torch.Tensor, partial(_apart, state=before), result)
            if modules[owner] is model:
                continue  # torch.export writes it
            if _is_alike(value, before):
                with torch.no_grad():
                    before.copy_(value)
                buffers[name] = before
            elif name not in modules[owner]._non_persistent_buffers_set:
                other[f"{paths[owner]}.{name}"] = None
        assigned.clear()
        return result

    handles = (
        register_module_buffer_registration_hook(note),
        model.register_forward_pre_hook(begin),
        model.register_forward_hook(finish),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if other:
        warnings.warn(
            f"The model assigns to its state {', '.join(map(repr, other))} tensors of another shape or dtype when it "
            "is called. Captured programs have no such states: each call begins with the values that are there now. "
            "Keep them in tensors of one size that the model writes to, or take them as inputs and return them.",
            BitwrightWarning,
            stacklevel=2,
        )


def _apart(tensor: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A copy of what shares the memory of a state that will be written to."""
    return tensor.clone() if tensor is state or tensor._base is state else tensor


def _is_alike(value: torch.Tensor, state: torch.Tensor) -> bool:
    return (
        value.dtype == state.dtype
        and value.device == state.device
        and value.dim() == state.dim()
        and all(statically_known_true(one == other) for one, other in zip(value.shape, state.shape, strict=True))
    )


def read_before_writing(graph: fx.Graph) -> None:
    """Have a graph compute with copies of the states to which it writes at its end, in place.

    Autograd may keep what was read of a state for the backward pass, which a write to it would spoil. In the model
    itself, whose new state is another tensor, nothing is written to.
    """
    for state in graph.find_nodes(op="get_attr"):
        value = state.meta.get("val")
        copies = [user for user in state.users if user.target is _COPY and user.args[0] is state]
        others = [user for user in state.users if user not in copies]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or len(copies) != 1 or not others:
            continue
        if copies[0].users or any(copies[0] < user for user in others) or any(_may_write(user) for user in others):
            continue
        with graph.inserting_after(state):
            read = graph.call_function(torch.ops.aten.clone.default, (state,))
        read.meta = dict(state.meta)
        for user in others:
            user.replace_input_with(state, read)


def _may_write(node: fx.Node) -> bool:
    """Whether an operator writes to its inputs, or others to what it returns of them; operators of graphs might."""
    if node.op == "output":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem or any(map(_may_write, node.users))
    schema = node.target._schema
    returns_view = any(value.alias_info is not None for value in schema.returns)
    return bool(schema.is_mutable) or (returns_view and any(map(_may_write, node.users)))
