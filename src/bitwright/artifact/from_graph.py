"""The artifact of a prepared graph, whose simulators are nodes and whose batch norms may be folded."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from .activations import QuantizedActivation
from .compress import compress_tensor
from .graph_sites import GraphSimulators, state_of
from .sites import dense_state, weight_sites
from .tensors import CompressedTensor, DenseTensor

__all__ = ["folded", "graph_tensors"]

GraphTensors = tuple[dict[str, CompressedTensor[Any]], dict[str, str], dict[str, QuantizedActivation], list[str]]


def folded(model: nn.Module) -> nn.Module:
    """Return a prepared graph with its batch norms folded, so that its weights are states; other models as they are."""
    from bitwright.quantization._graph.finalize import folded_copy
    from bitwright.quantization._graph.fold_insert import FOLDS

    if isinstance(model, fx.GraphModule) and FOLDS in model._modules:
        return folded_copy(model)
    return model


def graph_tensors(model: fx.GraphModule) -> GraphTensors:
    """Return tensors, aliases, activations and folded batch norms of a prepared graph, as an artifact takes them.

    Names are those of the float model, and batch norms that were folded are part of the weights.

    Raises:
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes, or an activation was
            not calibrated.
    """
    from bitwright.quantization._graph.finalize import folded_norms

    graph, norms = folded(model), folded_norms(model)
    assert isinstance(graph, fx.GraphModule)
    found = GraphSimulators.of(graph)
    # A technique that came after the capture stands on the parameter itself.
    sites = {name: site for site in weight_sites(graph) for name in site.names}
    tensors: dict[str, CompressedTensor[Any]] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for weight in found.weights:
        site = sites.pop(weight.target, None)
        state = state_of(graph, weight.target) if site is None else site.tensor
        simulators = weight.simulators if site is None else (*site.simulators, *weight.simulators)
        if weight.target not in tensors:
            tensors[weight.target] = compress_tensor(state, simulators, weight.target).copied()
            first.setdefault(id(state), weight.target)
    for name, site in sites.items():
        if name == site.name:
            tensors[name] = compress_tensor(site.tensor, site.simulators, name).copied()
        else:
            aliases[name] = site.name
    for name, tensor in dense_state(graph):
        read = any(node.users for node in graph.graph.find_nodes(op="get_attr", target=name))
        if name in tensors:
            continue
        if id(tensor) in first:  # of tied weights the graph reads one name
            aliases[name] = first[id(tensor)]
        elif read or name.rpartition(".")[0] not in norms:
            first[id(tensor)] = name
            tensors[name] = DenseTensor.from_tensor(tensor.detach().clone()).to("cpu")
    activations = {
        node.name: QuantizedActivation.from_simulator(simulator, node.name) for node, simulator in found.activations
    }
    return tensors, aliases, activations, norms
