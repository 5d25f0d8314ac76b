"""Finalize a prepared graph: check everything, then put the target's ops in the places of the simulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from bitwright._utils.kept_layouts import keep_layout, mark_finalized
from bitwright._utils.mapped_folder import mapped_folder
from bitwright.artifact import CompressedTensor, DenseTensor, QuantizedActivation, compress_tensor
from bitwright.artifact.graph_sites import GraphSimulators, GraphWeight, state_of
from bitwright.common import ExportBackend
from bitwright.config.spec import CompressionSimulatorBase
from bitwright.quantization._export_utils import (
    get_activation_export_handler,
    refuse_stateless,
    validate_activation_export_supported,
)
from bitwright.quantization.config import ExecutionMode
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .dense import fold_graph
from .graph_values import parameter_names, read_dense
from .mapped import MappedFiles

__all__ = [
    "UnsupportedActivationError",
    "UnsupportedWeightError",
    "clean_up",
    "compressed",
    "finalize_graph",
]


class UnsupportedActivationError(ValueError, RuntimeError):
    """The target cannot hold an activation of a graph."""


class UnsupportedWeightError(ValueError, RuntimeError):
    """The target cannot hold a weight."""


def finalize_graph(module: fx.GraphModule, backend: ExportBackend | str, mmap_dir: str | None = None) -> fx.GraphModule:
    """Turn a prepared graph into what ``backend`` converts.

    Args:
        module: a graph in eval mode, with batch norms folded, whose simulators are ``call_module`` nodes. Changed in
            place, and only after everything was checked; its tensors are not written to.
        backend: Core AI, Core ML, ``Torch``, or ``_TORCH``, which leaves the graph as it is.
        mmap_dir: Core AI only: folder for file-backed weights.

    Returns:
        ``module``.

    Raises:
        MissingExtraError: the backend's library is not installed.
        ValueError: no simulator is left in the graph, a tensor that the backend cannot hold (``CoreMLExportError`` for
            Core ML), or ``mmap_dir`` with another backend or device.
        NotImplementedError: activations whose parameters are computed at run time.
        ArtifactError: a weight cannot be stored so that it decodes to what the graph computes; names it.
    """
    backend = ExportBackend(backend)
    folder = mapped_folder(mmap_dir, backend)
    if backend == ExportBackend._TORCH:
        return module
    if backend == ExportBackend.Torch:
        fold_graph(module)
        clean_up(module)
        return module
    found = GraphSimulators.of(module)
    if not found.weights and not found.activations:
        raise ValueError(
            f"The graph has no fake quantization nodes, so there is nothing to export to {backend.value}. The "
            "configuration matched nothing, or left every tensor out; print quantizer.plan(example_inputs) to see why."
        )
    named = ((node.name, simulator) for node, simulator in found.activations)
    refuse_stateless(named, backend, ExecutionMode.GRAPH)
    if backend == ExportBackend.CoreAI:
        _finalize_coreai(module, found, folder)
    else:
        from .coreml_graph import finalize_graph_coreml

        finalize_graph_coreml(module, found)
    clean_up(module)
    mark_finalized(module, backend.value)
    return module


def compressed(module: fx.GraphModule, weight: GraphWeight) -> CompressedTensor[Any]:
    """Return the compressed form of a graph's weight."""
    tensor = compress_tensor(state_of(module, weight.target), weight.simulators, weight.target)
    keep_layout(module, weight.target, tensor.layout)
    return tensor


def _finalize_coreai(module: fx.GraphModule, found: GraphSimulators, mmap_dir: str | None) -> None:
    from .coreai_graph import emit_activation, emit_weight, weight_operands
    from .coreai_weights import coreai_layers, unsupported_weight

    coreai_layers()
    for node, simulator in found.activations:
        _check_coreai_activation(node, simulator)
    files = None if mmap_dir is None else MappedFiles(mmap_dir, module)
    buffers: list[DenseTensor | dict[str, Any]] = []
    names_of, read = parameter_names(module), [_parameter(module, weight.target) for weight in found.weights]
    taken: dict[str, int] = {}
    try:
        for weight in found.weights:
            tensor = compressed(module, weight)
            problem = unsupported_weight(tensor)
            if problem is not None:
                raise UnsupportedWeightError(f"Weight {weight.target!r} cannot be exported to Core AI: {problem}.")
            base = _unused(weight.target.replace(".", "_"), taken)
            if isinstance(tensor, DenseTensor) and not tensor.is_sparse:
                buffers.append(tensor)
            else:
                buffers.append(weight_operands(tensor, base, files, stacked=len(weight.simulators) > 1))
    except BaseException:
        if files is not None:
            files.discard()
        raise
    for weight, parameter, operands in zip(found.weights, read, buffers, strict=True):
        if isinstance(operands, DenseTensor):
            read_dense(module, weight, operands, names_of.get(id(parameter), []))
            continue
        for node in weight.nodes:
            emit_weight(module, node, operands)
    for parameter in read:  # what is read through a module of ops is gone under one of its names only
        for name in names_of.get(id(parameter), []):
            if _parameter(module, name) is parameter:
                _empty(module, name, names_of)
    for node, simulator in found.activations:
        handler: Callable[..., Any] | None = get_activation_export_handler(simulator.granularity, ExecutionMode.GRAPH)
        if simulator.is_disabled():
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        elif handler is not None:
            handler(module, node, simulator)
        else:
            emit_activation(module, node, simulator)


def _check_coreai_activation(node: fx.Node, simulator: FakeQuantizeImplBase) -> None:
    if simulator.is_disabled() or get_activation_export_handler(simulator.granularity, ExecutionMode.GRAPH):
        return
    try:
        validate_activation_export_supported(simulator)
    except ValueError as error:
        raise UnsupportedActivationError(f"{node.name}: {error}") from error
    QuantizedActivation.from_simulator(simulator, node.name)


def _unused(name: str, taken: dict[str, int]) -> str:
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name}_{taken[name] - 1}"


def clean_up(module: fx.GraphModule) -> None:
    """Remove what nobody calls any more; dense weights that nobody reads become empty placeholders."""
    graph = module.graph
    simulators = {name for name, child in module._modules.items() if isinstance(child, CompressionSimulatorBase)}
    names_of = parameter_names(module)
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.op == "get_attr" or node.target in simulators):
            if node.op == "get_attr":
                _empty(module, str(node.target), names_of)
            graph.erase_node(node)
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    for name in simulators - called:
        del module._modules[name]
    graph.lint()
    module.recompile()


def _parameter(module: fx.GraphModule, target: str) -> nn.Parameter | None:
    path, _, name = target.rpartition(".")
    return module.get_submodule(path)._parameters.get(name)


def _empty(module: fx.GraphModule, target: str, names_of: Mapping[int, list[str]]) -> None:
    """Put an empty tensor in the place of a parameter that no node reads, under all names that it still has."""
    parameter = _parameter(module, target)
    names = [name for name in names_of.get(id(parameter), []) if _parameter(module, name) is parameter]
    if parameter is None or any(
        node.users for name in names for node in module.graph.find_nodes(op="get_attr", target=name)
    ):
        return
    empty = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=parameter.device), requires_grad=False)
    for path, _, attribute in (name.rpartition(".") for name in names):
        module.get_submodule(path)._parameters[attribute] = empty
