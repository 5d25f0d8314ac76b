"""Models and inputs that lie on an accelerator, brought to where files are written."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["all_on_cpu", "copy_to", "on_device_of"]

_HERE = ("cpu", "meta")


def all_on_cpu(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return a model and its inputs on the CPU, where converters compute and runtimes are asked.

    Args:
        model: any module; not changed. It is copied where a part of it is elsewhere.
        args: positional inputs.
        kwargs: keyword inputs.
    """
    away = any(tensor.device.type not in _HERE for tensor in _tensors(model))
    model = copy_to(model, torch.device("cpu")) if away else model
    return model, *tree_map_only(torch.Tensor, _on_cpu, (args, dict(kwargs or {})))


def copy_to(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a deep copy of a model on a device; what asks for a device in captured graphs asks for this one."""
    memo: dict[int, Any] = {}
    for tensor in _tensors(model):
        if id(tensor) not in memo:
            moved = tensor.detach().to(device, copy=True)
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, tensor.requires_grad)
            memo[id(tensor)] = moved
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        if isinstance(module, fx.GraphModule):
            _ask_for(module, device)
    return twin


def on_device_of(module: nn.Module, tensor: torch.Tensor) -> nn.Module:
    """Move a module that was made on the CPU to where a tensor lies."""
    return module if tensor.device.type in _HERE else module.to(tensor.device)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type in _HERE else tensor.cpu()


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers, and tensors that modules keep as plain attributes."""
    found: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, (torch.Tensor, list, dict))}
        found += [leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor)]
    return found


def _ask_for(module: fx.GraphModule, device: torch.device) -> None:
    """Let every node that names a device name this one."""

    def replaced(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type != "meta" else value

    for node in module.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, replaced)
        node.kwargs = fx.node.map_aggregate(node.kwargs, replaced)
    module.recompile()
