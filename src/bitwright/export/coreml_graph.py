"""Core ML's metadata and quantize calls in the places of a graph's simulators."""

from __future__ import annotations

import torch
from torch import fx, nn

from bitwright.artifact.graph_sites import GraphSimulators, state_of

from .coreml import check_activation, coreml_activation
from .coreml_weights import check_weight, mark_root, mark_weight, stays_dense
from .graph import compressed
from .graph_values import parameter_names, read_values

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
    names_of, originals = parameter_names(module), [state_of(module, weight.target) for weight in found.weights]
    for weight, tensor, dense in zip(found.weights, tensors, originals, strict=True):
        recurrent = any(_is_recurrent(module, user) for node in weight.nodes for user in node.users)
        names = read_values(module, weight, tensor.decode(), names_of.get(id(dense), []))
        if recurrent:
            stays_dense(weight.target)
        else:
            for path, _, name in (one.rpartition(".") for one in names):
                mark_weight(module.get_submodule(path), name, tensor)  # coremltools reads any of the names
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
