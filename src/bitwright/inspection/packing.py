"""The packed artifact of a model of either mode."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from bitwright.artifact import Artifact, CompressedTensor, DenseTensor, QuantizedActivation, compress_tensor
from bitwright.artifact.sites import weight_sites

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
        tensors.setdefault(weight.target, compress_tensor(state, [weight.simulator], weight.target).to("cpu"))
    for name, tensor in graph.state_dict().items():
        read = any(node.users for node in graph.graph.find_nodes(op="get_attr", target=name))
        if read and name not in tensors:
            tensors[name] = DenseTensor.from_tensor(tensor.detach().clone()).to("cpu")
    activations = {
        node.name: QuantizedActivation.from_simulator(simulator, node.name) for node, simulator in found.activations
    }
    source = Artifact.from_model(nn.Module(), config=config, plan=plan)
    return Artifact(tensors, activations=activations, config=source.config, plan=source.plan)
