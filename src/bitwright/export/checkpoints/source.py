"""What checkpoints are made of: the compressed weights of a model, and which of them belong to linear layers."""

from __future__ import annotations

import torch
from torch import fx, nn

from bitwright.artifact import Artifact
from bitwright.export.conversion import is_prepared_graph

__all__ = ["artifact_of_weights", "linear_weights"]


def artifact_of_weights(model: nn.Module) -> Artifact:
    """Return the compressed weights of a prepared model, eager or graph; compressed one by one where that is possible.

    Raises:
        ArtifactError: an activation was not calibrated, or a weight of a graph cannot be stored.
    """
    if not is_prepared_graph(model):
        return Artifact.from_model(model, lazy=True)
    return Artifact.from_model(model)


def linear_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights that linear layers multiply with; in a graph, that ``linear`` ops do."""
    if not (is_prepared_graph(model) and isinstance(model, fx.GraphModule)):
        linear = (path for path, module in model.named_modules() if isinstance(module, nn.Linear))
        return {f"{path}.weight" if path else "weight" for path in linear}
    found = set()
    for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        source = node.args[1]
        while source.op == "call_module":  # a simulator, or a fold of a batch norm into the weight
            source = source.args[0]
        found.add(str(source.target))
    return found
