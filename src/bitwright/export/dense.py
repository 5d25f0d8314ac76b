"""Compressed weights as plain tensors: what ``ExportBackend.Torch`` makes of a prepared model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from bitwright._utils.module_mode import module_mode
from bitwright._utils.parametrization import clear_parametrization, own_parametrizations
from bitwright.artifact.graph_sites import GraphSimulators, state_of
from bitwright.config.spec import CompressionSimulatorBase
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .graph_values import parameter_names, read_values

__all__ = ["fold_eager", "fold_graph"]


def fold_eager(model: nn.Module) -> None:
    """Put the values of simulated weights in their places, in place; simulators of activations stay, not observing.

    Other parametrizations of such a weight go as well. A weight that modules share is one afterwards, too.
    """
    places = [
        (module, name)
        for module in model.modules()
        for name, chain in own_parametrizations(module).items()
        if any(isinstance(one, CompressionSimulatorBase) for one in chain)
    ]
    _stop_observing(model.modules())
    values: dict[Any, torch.Tensor] = {}
    computed: list[tuple[nn.Module, str, torch.Tensor]] = []
    for module, name in places:
        chain: Any = own_parametrizations(module)[name]
        key = (*map(id, chain.parameters(recurse=False)), *map(id, chain.buffers(recurse=False)), *map(id, chain))
        if key not in values:
            with module_mode(chain, training=False), torch.no_grad():
                values[key] = getattr(module, name).detach()
        computed.append((module, name, values[key]))
    folded: dict[int, torch.Tensor] = {}
    for module, name, value in computed:
        _place(module, name, value, folded)


def _place(module: nn.Module, name: str, value: torch.Tensor, folded: dict[int, torch.Tensor]) -> None:
    chain: Any = own_parametrizations(module)[name]
    if not chain.is_tensor:  # several tensors, of which torch makes one
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)
        return
    original = chain.original
    clear_parametrization(module, name)
    before = folded.setdefault(id(original), value)
    if before is value:
        original.data = value
    else:  # other simulators stand on the same tensor elsewhere
        slots: Any = module._parameters if isinstance(original, nn.Parameter) else module._buffers
        slots[name] = nn.Parameter(value, original.requires_grad) if slots is module._parameters else value


def fold_graph(module: fx.GraphModule) -> None:
    """Let the readers of simulated weights read their values, in place; simulators of activations stay, not observing.

    Args:
        module: a graph in eval mode with batch norms folded. Its tensors are not written to, and simulators that nobody
            calls any more are left in it.
    """
    found, names_of = GraphSimulators.of(module), parameter_names(module)
    _stop_observing(module.modules())
    values = []
    with torch.no_grad():
        for weight in found.weights:
            value = state_of(module, weight.target).detach()
            for simulator in weight.simulators:
                value = simulator(value)
            values.append(value)
    read: list[Any] = [names_of.get(id(state_of(module, weight.target)), []) for weight in found.weights]
    for weight, value, names in zip(found.weights, values, read, strict=True):
        read_values(module, weight, value, names)


def _stop_observing(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, FakeQuantizeImplBase):
            module.disable_observer()
