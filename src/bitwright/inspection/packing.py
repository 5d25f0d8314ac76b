"""The packed artifact of a model of either mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from bitwright.artifact import Artifact, CompressedTensor, DenseTensor, QuantizedActivation, compress_tensor
from bitwright.artifact.sites import weight_sites
from bitwright.config.spec import CompressionSimulatorBase

from ._sizes import folded

__all__ = ["artifact_of"]


def artifact_of(model: nn.Module, *, config: Any = None, plan: Any = None) -> Artifact:
    """Pack the weights of a prepared model, eager or graph.

    In a graph, names are those of the float model, and batch norms that were folded are part of the weights.

    Args:
        model: a model that a compressor prepared. It is not changed.
        config: the configuration, kept for the record.
        plan: the plan, likewise.

    Raises:
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes, or an activation was
            not calibrated.
    """
    if not isinstance(model, fx.GraphModule) or any(weight_sites(model)):
        return Artifact.from_model(model, config=config, plan=plan)
    from bitwright.export.graph import GraphSimulators, state_of

    graph = folded(model)
    assert isinstance(graph, fx.GraphModule)
    found = GraphSimulators.of(graph)
    tensors: dict[str, CompressedTensor[Any]] = {}
    for weight in found.weights:
        state = state_of(graph, weight.target)
        tensors.setdefault(weight.target, compress_tensor(state, weight.simulators, weight.target).to("cpu"))
    first: dict[int, str] = {id(state_of(graph, target)): target for target in reversed(tensors)}
    aliases: dict[str, str] = {}
    for name, tensor in _own_state(graph):
        read = any(node.users for node in graph.graph.find_nodes(op="get_attr", target=name))
        if name in tensors:
            continue
        if id(tensor) in first:  # of tied weights the graph reads one name
            aliases[name] = first[id(tensor)]
        elif read or not _is_folded(graph, name):
            first[id(tensor)] = name
            tensors[name] = DenseTensor.from_tensor(tensor.detach().clone()).to("cpu")
    activations = {
        node.name: QuantizedActivation.from_simulator(simulator, node.name) for node, simulator in found.activations
    }
    source = Artifact.from_model(nn.Module(), config=config, plan=plan)
    return Artifact(tensors, aliases=aliases, activations=activations, config=source.config, plan=source.plan)


def _own_state(graph: fx.GraphModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers under all their names, those of simulators apart."""
    for path, module in graph.named_modules(remove_duplicate=False):
        if any(isinstance(owner, CompressionSimulatorBase) for owner in _chain(graph, path)):
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, tensor


def _chain(graph: fx.GraphModule, path: str) -> Iterator[nn.Module]:
    parts = path.split(".") if path else []
    for length in range(1, len(parts) + 1):
        yield graph.get_submodule(".".join(parts[:length]))


def _is_folded(graph: fx.GraphModule, name: str) -> bool:
    """Whether a tensor that nothing reads is what folding left of a batch norm."""
    return "running_mean" in graph.get_submodule(name.rpartition(".")[0])._buffers
