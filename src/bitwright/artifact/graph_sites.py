"""Where compression stands in a prepared graph: calls of simulators, on weights and on activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bitwright._utils.weight_simulators import graph_stack
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

__all__ = ["GraphSimulators", "GraphWeight", "inner_graph_words", "simulator_of", "state_of"]


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
            target, simulators = graph_stack(module, node)
            if target and not any(graph_stack(module, user)[0] for user in node.users):
                key = (target, *map(id, simulators))
                weights.setdefault(key, GraphWeight(target, [], simulators)).nodes.append(node)
            elif not target and (simulator := simulator_of(module, node)) is not None:
                activations.append((node, simulator))
        return cls(list(weights.values()), activations)

    def __bool__(self) -> bool:
        return bool(self.weights or self.activations)


def inner_graph_words(model: nn.Module) -> str:
    """Return the first sentence of an error about prepared graphs that stand inside a model; empty if there are none.

    Nothing reads the simulators there but the graph itself. Bodies of control-flow ops hold no simulators.
    """
    paths = [
        path
        for path, module in model.named_modules()
        if path and isinstance(module, fx.GraphModule) and GraphSimulators.of(module)
    ]
    if not paths:
        return ""
    verb = "is a prepared graph" if len(paths) == 1 else "are prepared graphs"
    return f"{', '.join(map(repr, paths[:10]))} {verb} inside this model, which was not prepared as a whole."


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
