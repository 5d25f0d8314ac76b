"""Simulators as they were before a call that may be another than the planned one ran through them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

__all__ = ["BeforeGuess"]

_PLAIN = (bool, int, float, str, tuple, type(None))
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


class BeforeGuess:
    """What simulators hold, to be given back to them where a call turns out to be none of theirs.

    Args:
        simulators: those of a planned call; others than fake quantizers remember nothing of a call.
    """

    def __init__(self, simulators: Iterable[nn.Module]) -> None:
        self._simulators = [simulator for simulator in simulators if isinstance(simulator, FakeQuantizeImplBase)]
        self._held = [_Held(simulator, _PLAIN) for simulator in self._simulators]
        for simulator in self._simulators:
            self._held += [_Held(module, (object,)) for module in simulator.qparams_calculator.modules()]

    def give_back(self) -> None:
        """Undo what the simulators learned from the call."""
        for held in self._held:
            held.give_back()
        for simulator in self._simulators:
            simulator._forget_shortcut()


class _Held:
    """Tensors and attributes of one module.

    Args:
        module: the module, not its children.
        kinds: classes of the attributes that are kept; of objects, a shallow copy.
    """

    def __init__(self, module: nn.Module, kinds: tuple[type, ...]) -> None:
        self._module = module
        groups: list[dict[str, Any]] = [module._buffers, module._parameters]
        self._tensors = [
            (group, name, tensor, None if tensor is None else tensor.detach().clone())
            for group in groups
            for name, tensor in group.items()
        ]
        self._attributes: dict[str, Any] = {
            name: copy.copy(value)
            for name, value in vars(module).items()
            if name not in _OF_MODULES and isinstance(value, kinds) and not isinstance(value, torch.Tensor)
        }

    def give_back(self) -> None:
        with torch.no_grad():
            for group, name, tensor, elements in self._tensors:
                if tensor is not None:
                    tensor.copy_(elements)
                group[name] = tensor
        vars(self._module).update(self._attributes)
