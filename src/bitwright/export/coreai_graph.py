"""Nodes of Core AI's ops in the places of a graph's simulators."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from bitwright._utils.parametrization import own_parametrizations
from bitwright.artifact import CompressedTensor, QuantizedTensor
from bitwright.artifact.packed import replace_weight
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .coreai_activations import ActivationOperands, activation_operands, narrowed
from .coreai_weights import coreai_weight, quantized_operands
from .extras import require
from .mapped import MappedFiles

__all__ = ["emit_activation", "emit_weight", "weight_operands"]


def weight_operands(
    tensor: CompressedTensor[Any], base: str, files: MappedFiles | None, *, stacked: bool
) -> dict[str, Any]:
    """Return what takes a simulator's place: operands of an op, or a module of ops for masks and palettes.

    Args:
        tensor: a weight that is not left dense.
        base: start of the names of buffers, name of the module and of the file.
        files: where to store buffers, None to keep them in memory.
        stacked: whether several simulators stand on the weight.
    """
    if isinstance(tensor, QuantizedTensor) and not stacked:
        return weight_buffers(tensor, base, files)
    layer = coreai_weight(tensor)
    if files is not None:
        files.store(layer, base)
    return {"layer": layer, "dtype": tensor.dtype}


def weight_buffers(tensor: CompressedTensor[Any], base: str, files: MappedFiles | None) -> dict[str, Any]:
    """Return the operands of a weight's op; tensors among them under the names of the buffers that they become.

    Args:
        tensor: a quantized weight.
        base: start of the buffers' names, and name of the file.
        files: where to store the buffers, None to keep them in memory.
    """
    assert isinstance(tensor, QuantizedTensor)
    operands = quantized_operands(tensor)
    names = {"input": "quantized", "scale": "scale", "zero_point": "zero_point", "minval": "minval"}
    buffers = {f"{base}_{names[key]}": operands[key] for key in names if operands.get(key) is not None}
    if files is not None:
        buffers = files.store_tensors(buffers, base)
    if tensor.layout.format == "float4_e2m1fn_x2":
        floats = require("coreai_torch._compression._floatx", "coreai", "Export to Core AI")
        buffers[f"{base}_quantized"] = floats.Float4Tensor(buffers[f"{base}_quantized"])
    produced = operands.get("output_dtype") or operands["scale"].dtype
    parameters = [f"{base}_{role}" for role in ("scale", "minval") if f"{base}_{role}" in buffers]
    wide = [name for name in parameters if buffers[name].dtype == torch.float32]
    return {
        "buffers": buffers | {name: narrowed(buffers[name], tensor.dtype) for name in wide},
        "wide": wide,
        "base": base,
        "input_dtype": operands.get("input_dtype"),
        "output_dtype": operands.get("output_dtype"),
        "round_to": None if produced == tensor.dtype else tensor.dtype,
    }


def emit_weight(module: fx.GraphModule, node: fx.Node, operands: dict[str, Any]) -> None:
    """Replace a simulator's call on a weight by ``coreai.constexpr_blockwise_shift_scale``."""
    if "layer" in operands:
        _read_through_layer(module, node, operands)
        return
    graph, base = module.graph, operands["base"]
    read: dict[str, fx.Node] = {}
    with graph.inserting_before(node):
        for name, tensor in operands["buffers"].items():
            stored = _read_buffer(module, name, tensor)
            narrow = name in operands["wide"] and tensor.dtype != torch.float32
            read[name.removeprefix(f"{base}_")] = _cast(graph, stored, torch.float32) if narrow else stored
        arguments = (
            read["quantized"], read["scale"], read.get("zero_point"), read.get("minval"), operands["input_dtype"],
        )  # fmt: skip
        options = {} if operands["output_dtype"] is None else {"output_dtype": operands["output_dtype"]}
        new = graph.call_function(torch.ops.coreai.constexpr_blockwise_shift_scale, arguments, options)
        if operands["round_to"] is not None:
            new = _cast(graph, new, operands["round_to"])
    _take_place(node, new)


def emit_activation(module: fx.GraphModule, node: fx.Node, simulator: FakeQuantizeImplBase) -> None:
    """Replace a simulator's call on an activation by ``coreai.quantize`` and ``coreai.dequantize``.

    As in eager mode the ops work in float32 and what saturates early is clamped before. Half-precision activations need
    no cast for that: ``quantize`` divides them by a float32 scale in float32, and a code times a scale in half
    precision is rounded once. With a limit or a minval there would be a second rounding, so there they are cast.
    """
    graph, operands = module.graph, activation_operands(simulator)
    half = operands.compute_dtype != torch.float32
    cast = half and any(one is not None for one in (operands.low, operands.high, operands.minval))
    name = node.name
    with graph.inserting_before(node):
        x: Any = node.args[0]
        is_number = _value_of(node) is not None and _rank(node) == 0
        if is_number:  # the ops look for a dimension along which the scale lies
            x = _with_shape_changed(graph, torch.ops.aten.unsqueeze.default, x)
        if cast:
            x = _cast(graph, x, torch.float32)
        x = _clamp(module, x, operands, name, max(_rank(node), 1))
        scale = _read_parameter(module, f"{name}_scale", operands.scale, operands.compute_dtype)
        options: dict[str, Any] = {}
        for kind in ("zero_point", "minval"):
            parameter = getattr(operands, kind)
            if parameter is not None:
                options[kind] = _read_parameter(module, f"{name}_{kind}", parameter, operands.compute_dtype)
        options["axis"] = operands.axis
        quantized = graph.call_function(torch.ops.coreai.quantize, (x, scale, operands.dtype), options)
        if operands.is_integer:
            options = {**options, "input_dtype": operands.dtype}
        if half and not cast and scale.op == "call_function":  # the cast of one that is stored in half precision
            options = {**options, "output_dtype": operands.compute_dtype}
            new = graph.call_function(torch.ops.coreai.dequantize, (quantized, scale.args[0]), options)
        else:
            options = {**options, "output_dtype": torch.float32}
            new = graph.call_function(torch.ops.coreai.dequantize, (quantized, scale), options)
            new = _cast(graph, new, operands.compute_dtype) if half else new
        if is_number:
            new = _with_shape_changed(graph, torch.ops.aten.squeeze.dim, new)
    _take_place(node, new)


def _with_shape_changed(graph: fx.Graph, op: Any, x: fx.Node) -> fx.Node:
    """Call ``unsqueeze`` or ``squeeze`` on the first dimension."""
    new = graph.call_function(op, (x, 0))
    value = x.meta.get("val")
    if value is not None:
        new.meta["val"] = op(value, 0)
    return new


def _read_through_layer(module: fx.GraphModule, node: fx.Node, operands: dict[str, Any]) -> None:
    """Make the weight itself read as what a module of Core AI's ops computes, as in eager mode."""
    source: Any = node
    while source.op == "call_module":
        source = source.args[0]
    path, _, attribute = str(source.target).rpartition(".")
    owner = module.get_submodule(path)
    if attribute not in own_parametrizations(owner):
        replace_weight(owner, attribute, operands["layer"], operands["dtype"])
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def _clamp(module: fx.GraphModule, x: fx.Node, operands: ActivationOperands, name: str, rank: int) -> fx.Node:
    graph = module.graph
    for kind, function in (("low", torch.ops.aten.maximum.default), ("high", torch.ops.aten.minimum.default)):
        limit = getattr(operands, kind)
        if limit is not None:
            if limit.ndim:
                limit = limit.reshape([-1 if dim == operands.axis else 1 for dim in range(rank)])
            x = graph.call_function(function, (x, _read_buffer(module, f"{name}_{kind}", limit)))
    return x


def _value_of(node: fx.Node) -> Any:
    value = node.meta.get("val")
    source: Any = node.args[0]
    return source.meta.get("val") if value is None else value


def _rank(node: fx.Node) -> int:
    """Number of dimensions, 0 where it is not known."""
    value = _value_of(node)
    return len(value.shape) if value is not None else 0


def _read_buffer(module: fx.GraphModule, name: str, tensor: torch.Tensor) -> fx.Node:
    """Read a tensor from the buffer that holds it; a new one gets a number behind its name where the model has that."""
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    names = itertools.chain([name], numbered)
    free = next(one for one in names if module._buffers.get(one) is tensor or not hasattr(module, one))
    module.register_buffer(free, tensor)
    node = module.graph.get_attr(free)
    node.meta["val"] = tensor
    return node


def _read_parameter(module: fx.GraphModule, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> fx.Node:
    """Read a parameter in float32, from a buffer that is narrower where it can be."""
    stored = narrowed(tensor, dtype)
    read = _read_buffer(module, name, stored)
    return read if stored.dtype == tensor.dtype else _cast(module.graph, read, torch.float32)


def _cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return graph.call_function(torch.ops.aten.to.dtype, (x, dtype))


def _take_place(node: fx.Node, new: fx.Node) -> None:
    new.meta.update({key: node.meta[key] for key in ("val", "nn_module_stack") if key in node.meta})
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
