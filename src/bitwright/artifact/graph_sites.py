"""Where compression stands in a prepared graph: calls of simulators, on weights and on activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bitwright.config.spec import CompressionSimulatorBase, CompressionTargetTensor
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

__all__ = ["GraphSimulators", "GraphWeight", "simulator_of", "state_of"]


@dataclass(frozen=True, slots=True)
class GraphWeight:
    """A weight of a graph under simulators.

    Attributes:
        target: name of the parameter or buffer.
        nodes: the calls of the last simulator on it.
        simulators: the simulators, the innermost first.
    """

    target: str
    nodes: list[fx.Node]
    simulators: tuple[nn.Module, ...]


@dataclass(frozen=True, slots=True)
class GraphSimulators:
    """The calls of simulators in a graph."""

    weights: list[GraphWeight]
    activations: list[tuple[fx.Node, FakeQuantizeImplBase]]

    @classmethod
    def of(cls, module: fx.GraphModule) -> GraphSimulators:
        """Find them; a simulator of a parameter or buffer counts as a weight's."""
        weights: dict[tuple[Any, ...], GraphWeight] = {}
        activations = []
        for node in module.graph.nodes:
            target, simulators = _stack_of(module, node)
            if target and not any(_stack_of(module, user)[0] for user in node.users):
                key = (target, *map(id, simulators))
                weights.setdefault(key, GraphWeight(target, [], simulators)).nodes.append(node)
            elif not target and (simulator := simulator_of(module, node)) is not None:
                activations.append((node, simulator))
        return cls(list(weights.values()), activations)


def _stack_of(module: fx.GraphModule, node: fx.Node) -> tuple[str, tuple[nn.Module, ...]]:
    """Return the state that ``node`` simulates and the simulators on it up to there; nothing for other nodes."""
    found: list[nn.Module] = []
    source: Any = node
    while isinstance(source, fx.Node) and source.op == "call_module":
        simulator = module.get_submodule(str(source.target))
        target = getattr(simulator, "quantization_target", CompressionTargetTensor.WEIGHT)
        if not isinstance(simulator, CompressionSimulatorBase) or target == CompressionTargetTensor.ACTIVATION:
            return "", ()
        found.insert(0, simulator)
        source = source.args[0]
    on_state = bool(found) and isinstance(source, fx.Node) and source.op == "get_attr"
    return (str(source.target), tuple(found)) if on_state else ("", ())


def simulator_of(module: fx.GraphModule, node: fx.Node) -> FakeQuantizeImplBase | None:
    """Return the simulator that a node calls, or None."""
    if node.op != "call_module":
        return None
    found = module.get_submodule(str(node.target))
    return found if isinstance(found, FakeQuantizeImplBase) else None


def state_of(module: nn.Module, target: str) -> torch.Tensor:
    """Return a parameter or buffer by its dotted name."""
    path, _, name = target.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(path), name)
    return tensor
