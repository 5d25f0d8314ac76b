"""Simulators on weights: one or several, one on top of the other, as torch parametrizations or as calls in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn

from bitwright._utils.sharded import whole
from bitwright.config.spec import CompressionSimulatorBase, CompressionTargetTensor

from .parametrization import own_parametrizations

__all__ = ["SimulatorPlace", "graph_stack", "simulator_places", "unique_simulators"]

_T = TypeVar("_T", bound=nn.Module)


@dataclass(frozen=True, slots=True, eq=False)
class SimulatorPlace(Generic[_T]):
    """One place where a simulator stands on a weight.

    Attributes:
        path: path of the module that owns the weight, ``""`` for the root.
        module: that module.
        attribute: local name of the weight.
        simulator: the simulator.
        stack: all simulators that the weight passes through, it among them.
    """

    path: str
    module: nn.Module
    attribute: str
    simulator: _T
    stack: tuple[nn.Module, ...]

    @property
    def below(self) -> tuple[nn.Module, ...]:
        """The simulators that the weight passes through before this one."""
        return self.stack[: [id(simulator) for simulator in self.stack].index(id(self.simulator))]

    @property
    def name(self) -> str:
        """Dotted name of the weight."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute

    @property
    def parameter_name(self) -> str:
        """Name of the dense weight in the model's ``state_dict``."""
        if not self.in_module:
            return self.name
        prefix = f"{self.path}." if self.path else ""
        return f"{prefix}parametrizations.{self.attribute}.original"

    @property
    def in_module(self) -> bool:
        """Whether the simulators parametrize the weight; else a graph calls them."""
        return self.attribute in own_parametrizations(self.module)

    @property
    def chain(self) -> Any:
        """What returns the weight when it is called: its ``ParametrizationList``, in a graph the last simulator."""
        return own_parametrizations(self.module).get(self.attribute, self.stack[-1])

    @property
    def original(self) -> torch.Tensor:
        """The dense weight."""
        original: torch.Tensor = self.chain.original if self.in_module else getattr(self.module, self.attribute)
        return original

    def entering(self) -> torch.Tensor:
        """Return what the simulator is given: the weight as the simulators below it leave it, without gradient.

        Processes that hold parts of the weight must all ask; each gets the whole.
        """
        with torch.no_grad():
            weight = whole(self.original.detach())
            for simulator in self.below:
                weight = simulator(weight)
        return weight


def simulator_places(model: nn.Module, kind: type[Any]) -> Iterator[SimulatorPlace[Any]]:
    """Yield every place of ``model`` where a simulator of a kind stands; a shared one at each of its places."""
    for path, module in model.named_modules():
        if isinstance(module, fx.GraphModule):
            yield from _places_in_graph(path, module, kind)
        for attribute, chain in own_parametrizations(module).items():
            simulators = tuple(chain)
            for simulator in simulators:
                if isinstance(simulator, kind):
                    yield SimulatorPlace(path, module, attribute, simulator, simulators)


def _places_in_graph(path: str, graph: fx.GraphModule, kind: type[Any]) -> Iterator[SimulatorPlace[Any]]:
    for node in graph.graph.nodes:
        target, stack = graph_stack(graph, node)
        if not target or any(graph_stack(graph, user)[0] for user in node.users):
            continue
        owner, _, attribute = target.rpartition(".")
        for simulator in stack:
            if isinstance(simulator, kind):
                place = ".".join(part for part in (path, owner) if part)
                yield SimulatorPlace(place, graph.get_submodule(owner), attribute, simulator, stack)


def graph_stack(graph: fx.GraphModule, node: fx.Node) -> tuple[str, tuple[nn.Module, ...]]:
    """Return the parameter or buffer that ``node`` simulates, and the simulators on it up to there.

    An empty name and no simulators for nodes that do something else.
    """
    found: list[nn.Module] = []
    source: Any = node
    while isinstance(source, fx.Node) and source.op == "call_module":
        simulator = graph.get_submodule(str(source.target))
        target = getattr(simulator, "quantization_target", CompressionTargetTensor.WEIGHT)
        if not isinstance(simulator, CompressionSimulatorBase) or target == CompressionTargetTensor.ACTIVATION:
            return "", ()
        found.insert(0, simulator)
        source = source.args[0]
    on_state = bool(found) and isinstance(source, fx.Node) and source.op == "get_attr"
    return (str(source.target), tuple(found)) if on_state else ("", ())


def unique_simulators(model: nn.Module, kind: type[Any]) -> list[SimulatorPlace[Any]]:
    """Return the first place of each simulator of a kind."""
    return list({id(place.simulator): place for place in reversed(list(simulator_places(model, kind)))}.values())[::-1]
