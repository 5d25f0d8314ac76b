"""What checkpoints are made of: the compressed weights of a model, and which of them belong to linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from bitwright.artifact import Artifact
from bitwright.export.conversion import is_prepared_graph

__all__ = ["artifact_of_weights", "linear_weights"]

_LINEAR, _EMBEDDING = torch.ops.aten.linear.default, torch.ops.aten.embedding.default


def artifact_of_weights(model: nn.Module) -> Artifact:
    """Return the compressed weights of a prepared model, eager or graph; compressed one by one where that is possible.

    Raises:
        ArtifactError: an activation was not calibrated, or a weight of a graph cannot be stored.
    """
    if not is_prepared_graph(model):
        return Artifact.from_model(model, lazy=True)
    return Artifact.from_model(model)


def linear_weights(model: nn.Module, aliases: Mapping[str, str]) -> set[str]:
    """Return the names of the weights that linear layers multiply with; in a graph, that ``linear`` ops alone do.

    A graph reads one name of a tied weight; ``aliases`` has the others, to that one. Loaders of checkpoints look for
    what belongs to a layer's ``weight``, so that parameters of other names, such as the ``in_proj_weight`` of
    ``nn.MultiheadAttention``, are none of them.
    """
    if not (is_prepared_graph(model) and isinstance(model, fx.GraphModule)):
        paths = (path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear))
        return {f"{path}.weight" if path else "weight" for path in paths}
    linear = {_source(node.args[1]) for node in model.graph.find_nodes(op="call_function", target=_LINEAR)}
    looked_up = {_source(node.args[0]) for node in model.graph.find_nodes(op="call_function", target=_EMBEDDING)}
    names = linear - looked_up
    names |= {alias for alias, name in aliases.items() if name in names}
    return {name for name in names if name.rpartition(".")[2] == "weight"}


def _source(node: Any) -> str:
    """Name of the parameter that a weight is made of."""
    while node.op == "call_module":  # a simulator, or a fold of a batch norm into the weight
        node = node.args[0]
    return str(node.target)
