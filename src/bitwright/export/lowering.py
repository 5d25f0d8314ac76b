"""A prepared model with stand-ins where compression stood: the form in which exporters trace it.

Works for eager and graph models alike. The copy shares every tensor that compression does not touch, so lowering a
large model costs little memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from bitwright._utils.kept_layouts import keep_layout, mark_activation
from bitwright._utils.parametrization import clear_parametrization
from bitwright.artifact import CompressedTensor, DenseTensor, QuantizedActivation, compress_tensor
from bitwright.artifact.graph_sites import GraphSimulators, state_of
from bitwright.artifact.packed import replace_weight
from bitwright.artifact.sites import activation_simulators, simulators_in, weight_sites
from bitwright.program.free_batch import write_batch_in_graph
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .conversion import is_prepared_graph, refuse_finalized, refuse_inner_graphs
from .devices import on_device_of
from .eager import replace_modules
from .graph import clean_up, compressed
from .graph_values import parameter_names, read_dense

__all__ = ["LoweredModel", "lower", "shared_copy"]

MakeWeight = Callable[[str, CompressedTensor[Any]], nn.Module]
"""``make(name, tensor)`` returns the module whose output stands for a weight; it is called with a placeholder."""

MakeActivation = Callable[[str, FakeQuantizeImplBase], "nn.Module | None"]
"""``make(name, simulator)`` returns the module that takes an activation simulator's place; None keeps the simulator."""


@dataclass
class LoweredModel:
    """A copy of a prepared model with stand-ins.

    Attributes:
        model: the copy, in eval mode.
        weights: compressed weights by name.
        activations: simulators of activations by name.
    """

    model: nn.Module
    weights: dict[str, CompressedTensor[Any]] = field(default_factory=dict)
    activations: dict[str, FakeQuantizeImplBase] = field(default_factory=dict)


def lower(model: nn.Module, make_weight: MakeWeight, make_activation: MakeActivation) -> LoweredModel:
    """Return a copy of a prepared model in which stand-ins take the places of simulators.

    Args:
        model: prepared in eager or graph mode, or a float model. Not changed.
        make_weight: makes the stand-in of a weight.
        make_activation: makes the stand-in of an activation's simulator; only asked about those that are enabled.

    Raises:
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes, or an activation was
            not calibrated.
        ConversionError: the model was finalized for a backend, or a prepared graph stands inside it.
    """
    refuse_finalized(model)
    refuse_inner_graphs(model)
    if isinstance(model, fx.GraphModule) and is_prepared_graph(model):
        return _lower_graph(model, make_weight, make_activation)
    return _lower_eager(shared_copy(model).eval(), make_weight, make_activation)


def _lower_eager(twin: nn.Module, make_weight: MakeWeight, make_activation: MakeActivation) -> LoweredModel:
    lowered = LoweredModel(twin)
    for site in weight_sites(twin):
        tensor = compress_tensor(site.tensor, site.simulators, site.name)
        dense = isinstance(tensor, DenseTensor) and not tensor.is_sparse
        module = None if dense else make_weight(site.name, tensor)
        if module is not None:
            lowered.weights[site.name] = tensor
        plain: torch.Tensor = tensor.decode().to(site.tensor.device) if module is None else site.tensor
        if module is None and isinstance(site.tensor, nn.Parameter):
            plain = nn.Parameter(plain, requires_grad=False)  # the old one is the user's
        for path, attribute in site.owners:
            owner = twin.get_submodule(path)
            if module is None:
                keep_layout(owner, attribute, tensor.layout)
                clear_parametrization(owner, attribute)
                setattr(owner, attribute, plain)
            else:
                replace_weight(owner, attribute, module, tensor.dtype)
    replacements: dict[Any, nn.Module] = {}
    for path, simulator in activation_simulators(twin).items():
        if simulator not in replacements:
            stand_in = _activation_stand_in(path, simulator, make_activation)
            if stand_in is not None:
                replacements[simulator] = stand_in
                lowered.activations[path] = simulator
    replace_modules(twin, replacements)
    return lowered


def _lower_graph(model: fx.GraphModule, make_weight: MakeWeight, make_activation: MakeActivation) -> LoweredModel:
    from bitwright.quantization._graph.finalize import folded_copy

    twin: fx.GraphModule = folded_copy(model)
    write_batch_in_graph(twin)
    lowered = LoweredModel(twin)
    found = GraphSimulators.of(twin)
    names_of = parameter_names(twin)
    for number, weight in enumerate(found.weights):
        tensor = compressed(twin, weight)
        if isinstance(tensor, DenseTensor) and not tensor.is_sparse:
            read_dense(twin, weight, tensor, names_of.get(id(state_of(twin, weight.target)), []))
            continue
        name = weight.target if weight.target not in lowered.weights else f"{weight.target}_{number}"
        lowered.weights[name] = tensor
        module = on_device_of(make_weight(name, tensor), state_of(twin, weight.target))
        twin.add_module(f"bitwright_weight_{number}", module)
        for node in weight.nodes:
            _call_instead(twin, node, f"bitwright_weight_{number}")
    for node, simulator in found.activations:
        stand_in = _activation_stand_in(node.name, simulator, make_activation)
        if stand_in is not None:
            lowered.activations[node.name] = simulator
            twin.add_module(f"bitwright_{node.name}", stand_in)
            _call_instead(twin, node, f"bitwright_{node.name}")
    clean_up(twin)
    return lowered


def _activation_stand_in(name: str, simulator: FakeQuantizeImplBase, make: MakeActivation) -> nn.Module | None:
    if simulator.is_disabled():
        return nn.Identity()
    if not simulator.is_stateless:
        QuantizedActivation.from_simulator(simulator, name)  # raises where it was not calibrated
    stand_in = make(name, simulator)
    if stand_in is None:
        return None
    buffer = next(simulator.buffers(), None)
    return mark_activation(stand_in if buffer is None else on_device_of(stand_in, buffer))


def _call_instead(module: fx.GraphModule, node: fx.Node, target: str) -> None:
    arguments = node.args if "weight" not in target else ()
    with module.graph.inserting_before(node):
        new = module.graph.call_module(target, arguments)
    new.meta.update({key: node.meta[key] for key in ("val", "nn_module_stack") if key in node.meta})
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy that shares the tensors outside simulators."""
    inside = {id(t) for simulator in simulators_in(model) for t in (*simulator.parameters(), *simulator.buffers())}
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors if id(tensor) not in inside})
