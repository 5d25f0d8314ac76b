"""Values that take the place of a graph's weights: what is left dense, or rounded, without simulators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from bitwright.artifact import DenseTensor
from bitwright.artifact.graph_sites import GraphWeight, state_of

__all__ = ["parameter_names", "read_dense", "read_values"]


def parameter_names(module: nn.Module) -> dict[int, list[str]]:
    """Return all names of every parameter, by its id."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return names_of


def read_dense(module: fx.GraphModule, weight: GraphWeight, tensor: DenseTensor, names: Sequence[str]) -> None:
    """Let the readers of a simulated weight read what is stored of it: under a mask, that is not its parameter.

    Args:
        module: the graph; the calls of the weight's last simulator are removed from it.
        weight: a weight under simulators.
        tensor: the form in which it is stored.
        names: of the weight's parameter, before any weight was replaced.
    """
    stored = state_of(module, weight.target)
    values = tensor.decode().to(stored.device)
    if torch.equal(values, stored):
        for node in weight.nodes:
            _read_instead(node, weight.target)
    else:
        read_values(module, weight, values, names)


def read_values(module: fx.GraphModule, weight: GraphWeight, values: torch.Tensor, names: Sequence[str]) -> list[str]:
    """Let the readers of a simulated weight read these values.

    They are stored under the weight's name, unless somebody reads the weight without these simulators. No tensor is
    written to.

    Args:
        module: the graph; the calls of the weight's last simulator are removed from it.
        weight: a weight under simulators.
        values: what these compute of it.
        names: of the weight's parameter, before any weight was replaced.

    Returns:
        The names that hold the values now: that which is read, and those of tied parameters.
    """
    path, _, name = weight.target.rpartition(".")
    owner, target = module.get_submodule(path), weight.target
    if not _has_only_these_readers(module, weight):
        name = _free_name(owner, name)
        target = f"{path}.{name}" if path else name
    if name in owner._buffers:
        owner._buffers[name] = values
    else:
        owner._parameters[name] = nn.Parameter(values, requires_grad=False)
    tied = _tie(module, target, names)
    for node in weight.nodes:
        _read_instead(node, target)
    return list(dict.fromkeys([target, *tied]))


def _has_only_these_readers(module: fx.GraphModule, weight: GraphWeight) -> bool:
    last, inner = set(weight.nodes), set()
    for node in weight.nodes:
        source: Any = node.args[0]
        while source.op != "get_attr":
            inner.add(source)
            source = source.args[0]
    read = [*module.graph.find_nodes(op="get_attr", target=weight.target), *inner]
    return all(user in last or user in inner for node in read for user in node.users)


def _tie(module: fx.GraphModule, target: str, names: Sequence[str]) -> list[str]:
    """Give values to the other names of the weight: those that nobody reads, or that hold the same.

    Returns:
        The names that have them now.
    """
    value, tied = state_of(module, target), []
    for name in names:
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        held = owner._parameters[attribute]
        read = any(node.users for node in module.graph.find_nodes(op="get_attr", target=name))
        if not read or (held is not None and held.shape == value.shape and torch.equal(held, value)):
            owner._parameters[attribute] = value  # type: ignore[assignment]
            tied.append(name)
    return tied


def _free_name(owner: nn.Module, name: str) -> str:
    number = 1
    while f"{name}_{number}" in owner._parameters:
        number += 1
    return f"{name}_{number}"


def _read_instead(node: fx.Node, target: str) -> None:
    with node.graph.inserting_before(node):
        read = node.graph.get_attr(target)
    read.meta.update({key: node.meta[key] for key in ("val", "nn_module_stack") if key in node.meta})
    node.replace_all_uses_with(read)
    node.graph.erase_node(node)
