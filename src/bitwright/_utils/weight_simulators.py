"""Simulators on weights: one or several, one on top of the other, as torch parametrizations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from .parametrization import clear_parametrization

__all__ = ["SimulatorPlace", "remove_simulator", "simulator_places", "unique_simulators"]

_T = TypeVar("_T", bound=nn.Module)


@dataclass(frozen=True, slots=True, eq=False)
class SimulatorPlace(Generic[_T]):
    """One place where a simulator stands on a weight.

    Attributes:
        path: path of the module that owns the weight, ``""`` for the root.
        module: that module.
        attribute: local name of the weight.
        simulator: the simulator.
        below: the simulators that the weight passes through before it.
    """

    path: str
    module: nn.Module
    attribute: str
    simulator: _T
    below: tuple[nn.Module, ...]

    @property
    def name(self) -> str:
        """Dotted name of the weight."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute

    @property
    def parameter_name(self) -> str:
        """Name of the dense weight in the model's ``state_dict``."""
        prefix = f"{self.path}." if self.path else ""
        return f"{prefix}parametrizations.{self.attribute}.original"

    @property
    def chain(self) -> Any:
        """The ``ParametrizationList`` of the weight."""
        parametrizations: Any = self.module.parametrizations
        return parametrizations[self.attribute]

    @property
    def original(self) -> torch.Tensor:
        """The dense weight."""
        original: torch.Tensor = self.chain.original
        return original

    def entering(self) -> torch.Tensor:
        """Return what the simulator is given: the weight as the simulators below it leave it, without gradient."""
        with torch.no_grad():
            weight = self.original.detach()
            for simulator in self.below:
                weight = simulator(weight)
        return weight


def simulator_places(model: nn.Module, kind: type[Any]) -> Iterator[SimulatorPlace[Any]]:
    """Yield every place of ``model`` where a simulator of a kind stands; a shared one at each of its places."""
    for path, module in model.named_modules():
        if not parametrize.is_parametrized(module):
            continue
        for attribute, chain in module.parametrizations.items():
            simulators = tuple(chain)
            for position, simulator in enumerate(simulators):
                if isinstance(simulator, kind):
                    yield SimulatorPlace(path, module, attribute, simulator, simulators[:position])


def unique_simulators(model: nn.Module, kind: type[Any]) -> list[SimulatorPlace[Any]]:
    """Return the first place of each simulator of a kind."""
    return list({id(place.simulator): place for place in reversed(list(simulator_places(model, kind)))}.values())[::-1]


def remove_simulator(module: nn.Module, attribute: str, simulator: nn.Module) -> None:
    """Take one simulator off ``module.<attribute>``; the others stay."""
    parametrizations: Any = module.parametrizations
    chain = parametrizations[attribute]
    rest = [other for other in chain if other is not simulator]
    if not rest:
        clear_parametrization(module, attribute)
        return
    chain._modules.clear()
    chain._modules.update({str(position): other for position, other in enumerate(rest)})
