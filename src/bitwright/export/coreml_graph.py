"""Core ML's metadata and quantize calls in the places of a graph's simulators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from bitwright.artifact.graph_sites import GraphSimulators, state_of

from .coreml import check_activation, coreml_activation
from .coreml_weights import check_weight, mark_root, mark_weight, stays_dense
from .graph import compressed, parameter_names

__all__ = ["ACTIVATION_PREFIX", "finalize_graph_coreml"]

ACTIVATION_PREFIX = "_mil_act_quant_"
"""Modules that quantize an activation and dequantize it at once are named by this and the simulator."""


def finalize_graph_coreml(module: fx.GraphModule, found: GraphSimulators) -> None:
    """Put rounded weights with metadata, and torch's quantize calls, in the places of simulators.

    Raises:
        CoreMLExportError: Core ML cannot hold a weight or an activation. The graph is unchanged.
    """
    for node, simulator in found.activations:
        if not simulator.is_disabled():
            check_activation(simulator, node.name)
    tensors = [compressed(module, weight) for weight in found.weights]
    for weight, tensor in zip(found.weights, tensors, strict=True):
        check_weight(tensor, weight.target)
    rounded: set[str] = set()
    names_of, originals = parameter_names(module), [state_of(module, weight.target) for weight in found.weights]
    for weight, tensor, dense in zip(found.weights, tensors, originals, strict=True):
        path, _, name = weight.target.rpartition(".")
        owner = module.get_submodule(path)
        everywhere = all(
            user in weight.nodes
            for source in module.graph.find_nodes(op="get_attr", target=weight.target)
            for user in source.users
        )
        target = weight.target
        if not everywhere or target in rounded:
            name = _free_name(owner, name)
            target = f"{path}.{name}" if path else name
        rounded.add(target)
        _store(owner, name, tensor.decode())
        tied = _tie(module, target, names_of.get(id(dense), []))
        if any(_is_recurrent(module, user) for node in weight.nodes for user in node.users):
            stays_dense(weight.target)
        else:
            for path, _, name in (one.rpartition(".") for one in dict.fromkeys([target, *tied])):
                mark_weight(module.get_submodule(path), name, tensor)  # coremltools reads any of the names
        for node in weight.nodes:
            _read_instead(node, target)
    for node, simulator in found.activations:
        if simulator.is_disabled():
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            continue
        name = f"{ACTIVATION_PREFIX}{node.name}"
        module.add_module(name, coreml_activation(simulator))
        source, value = node.args[0], node.meta.get("val")
        with module.graph.inserting_before(node):
            if isinstance(value, torch.Tensor) and not value.ndim:
                # Where a number is constant, coremltools folds its quantization into an op for tensors with dimensions.
                row = module.graph.call_function(torch.ops.aten.unsqueeze.default, (source, 0))
                row = module.graph.call_module(name, (row,))
                new = module.graph.call_function(torch.ops.aten.squeeze.dim, (row, 0))
            else:
                new = module.graph.call_module(name, (source,))
        new.meta.update({key: node.meta[key] for key in ("val", "nn_module_stack") if key in node.meta})
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    mark_root(module)


def _is_recurrent(module: nn.Module, node: fx.Node) -> bool:
    op = node.target if node.op == "call_function" else None
    if node.op == "call_module":
        op = getattr(module.get_submodule(str(node.target)), "op", None)
    recurrent = (torch.ops.aten.lstm, torch.ops.aten.gru, torch.ops.aten.rnn_tanh, torch.ops.aten.rnn_relu)
    return getattr(op, "overloadpacket", None) in recurrent


def _store(owner: nn.Module, name: str, value: torch.Tensor) -> None:
    if name in owner._buffers:
        owner._buffers[name] = value
    else:
        owner._parameters[name] = nn.Parameter(value, requires_grad=False)


def _tie(module: fx.GraphModule, target: str, names: Sequence[str]) -> list[str]:
    """Give a rounded weight to the other names of the dense one: those that nobody reads, or that hold the same.

    Returns:
        The names that have it now.
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
