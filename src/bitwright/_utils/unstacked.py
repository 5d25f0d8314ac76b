"""A model without the simulators on its weights, for a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from bitwright.config.spec import CompressionSimulatorBase

from .parametrization import own_parametrizations

__all__ = ["unstacked"]


@contextmanager
def unstacked(model: nn.Module) -> Iterator[Mapping[str, tuple[nn.Module, ...]]]:
    """Let weights under simulators read as the dense tensors below, as if nothing stood on them.

    Modules that have parametrizations of other kinds as well keep all of theirs.

    Yields:
        The simulators of each weight, the innermost first, by every dotted name of the weight.
    """
    stacks: dict[str, tuple[nn.Module, ...]] = {}
    bare: dict[int, tuple[nn.Module, type[nn.Module], Any, dict[str, Any], dict[str, Any]]] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        chains = _simulated(module)
        if id(module) in bare:
            chains = bare[id(module)][2]
        if not chains:
            continue
        for attribute, chain in chains.items():
            stacks[f"{path}.{attribute}" if path else attribute] = tuple(chain)
        bare.setdefault(id(module), (module, type(module), chains, module._modules, module._parameters))
    try:
        for module, cls, chains, children, parameters in bare.values():
            module._modules = children.copy()
            del module._modules["parametrizations"]
            module.__class__ = cls.__bases__[0]
            module._parameters = {**parameters, **{attribute: chain.original for attribute, chain in chains.items()}}
        yield stacks
    finally:
        for module, cls, _, children, parameters in bare.values():
            module.__class__ = cls
            module._modules = children
            module._parameters = parameters


def _simulated(module: nn.Module) -> Any:
    """Return the parametrizations of a module if simulators on parameters are all there is, else none."""
    chains = own_parametrizations(module)
    plain = all(
        isinstance(getattr(chain, "original", None), nn.Parameter)
        and chain.original.numel() > 0
        and all(isinstance(entry, CompressionSimulatorBase) for entry in chain)
        for chain in chains.values()
    )
    return chains if plain else {}
