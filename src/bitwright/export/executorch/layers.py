"""Linear layers on activations that are quantized at run time or not at all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from bitwright.export.constants import add_constant
from bitwright.export.graph_edits import call, replace

from .activations import DynamicActivation
from .graph import DEQUANTIZE, DEQUANTIZE_CHANNELS, has_scales_of_inputs, op_name

__all__ = ["lower_dynamic_activations", "multiply_by_codes", "products_as_layers"]

_ops = torch.ops.quantized_decomposed
_MARKER = "bitwright::dynamic_activation"
_DEQUANTIZES = "quantized_decomposed::dequantize"
_INTEGERS = (DEQUANTIZE, "quantized_decomposed::dequantize_per_token")
_PRODUCTS = (
    *(f"aten::{name}" for name in ("linear", "conv", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum")),
    "aten::scaled_dot_product",
)
_WEIGHT_AT = {"aten::addmm": 2, "aten::mm": 1, "aten::matmul": 1}
"""Where products with a constant matrix on the right have it among their arguments."""
_RANGE = (-128, 127, torch.int8)
_INT4 = (-8, 7)


def products_as_layers(program: ExportedProgram) -> None:
    """Write products with a constant int8 matrix on the right as linear layers, with its codes transposed.

    Linear layers have a row of codes for each output, and a scale for each row, in XNNPACK. A matrix that something
    else reads too stays; products of it with calibrated activations, which XNNPACK's partitioner takes and its runtime
    refuses, get a copy.

    Args:
        program: changed in place; each reader of a dequantized tensor has a node of its own.
    """
    by_codes: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if op_name(node) == DEQUANTIZE_CHANNELS and node.args[0].op == "placeholder" and node.meta["val"].ndim == 2:
            by_codes.setdefault(node.args[0], []).append(node)
    for codes, weights in by_codes.items():
        products = [weight for weight in weights if all(_is_product(user, weight) for user in weight.users)]
        if len(products) == len(codes.users):
            _transpose(program, codes, products)
            continue
        calibrated = [weight for weight in products if any(op_name(_left(user)) == DEQUANTIZE for user in weight.users)]
        if calibrated:
            _transpose(program, _copied(program, calibrated), calibrated)
    program.graph_module.recompile()


def _is_product(node: fx.Node, weight: fx.Node) -> bool:
    """Whether a node multiplies with a matrix on the right, and adds a vector with a number for each column."""
    place = _WEIGHT_AT.get(op_name(node).partition(".")[0])
    if place is None or node.kwargs or node.args[place] is not weight or node.args.count(weight) > 1:
        return False
    bias: Any = node.args[0] if place == 2 else None
    return bias is None or tuple(bias.meta["val"].shape) == (weight.meta["val"].shape[1],)


def _left(product: fx.Node) -> Any:
    """What a product multiplies with the matrix."""
    return product.args[_WEIGHT_AT[op_name(product).partition(".")[0]] - 1]


def _copied(program: ExportedProgram, weights: Sequence[fx.Node]) -> fx.Node:
    """Let these nodes of one weight read copies of its codes, scales and zero points; returns the codes."""
    buffers: Any = weights[0].args[:3]
    names = program.graph_signature.inputs_to_buffers
    copies = [
        add_constant(program, buffer, buffer.name, program.state_dict[names[buffer.name]].clone()) for buffer in buffers
    ]
    for weight in weights:
        weight.args = (*copies, *weight.args[3:])
    return copies[0]


def _transpose(program: ExportedProgram, codes: fx.Node, weights: list[fx.Node]) -> None:
    _change(program, codes, lambda values: values.t().contiguous())
    parameters: Any = weights[0].args
    scale, zero_point, axis = parameters[1:4]
    values = program.state_dict[program.graph_signature.inputs_to_buffers[scale.name]]
    by_output = axis == 1 or bool((values == values[0]).all())
    if axis == 0 and by_output:  # one scale for the whole matrix
        for buffer in (scale, zero_point):
            _change(program, buffer, lambda values: values[:1].repeat(len(codes.meta["val"])))
    for weight in weights:
        weight.args = (*weight.args[:3], 0 if by_output else 1, *weight.args[4:])
        weight.meta["val"] = torch.empty_like(codes.meta["val"], dtype=torch.float32)
        for node in list(weight.users):
            bias = node.args[:1] if op_name(node).startswith("aten::addmm") else ()
            with program.graph.inserting_before(node):
                layer = call(program.graph, torch.ops.aten.linear.default, _left(node), weight, *bias)
            replace(node, layer)


def lower_dynamic_activations(program: ExportedProgram, activations: Mapping[str, DynamicActivation]) -> None:
    """Write activations that are quantized at run time in the form of each reader.

    A linear layer with a constant weight of one scale for each output quantizes row by row in XNNPACK; see
    :meth:`DynamicActivation.with_range`. Other readers get plain arithmetic. Where XNNPACK finds the simulator's range
    by itself it reads the values as they are, unless they are multiples of another scale: many of those lie half-way
    between two codes, and XNNPACK does not round such values as the simulator does.

    Args:
        program: changed in place.
        activations: by the name in their op.
    """
    markers = [node for node in program.graph.nodes if op_name(node) == _MARKER]
    found = {node: activations[str(node.args[1])] for node in markers}
    as_they_are = {
        node
        for node, activation in found.items()
        if activation.is_found_by_xnnpack(node.meta["val"].shape) and not _is_on_a_grid(program, node)
    }
    layers = _layers(program, found, as_they_are)
    for codes in {_codes(layer): None for layer in layers}:
        _set_weight(program, codes, as_they_are)
    for node, activation in found.items():
        x: Any = node.args[0]
        rows = [user for user in node.users if user in layers]
        with program.graph.inserting_before(node):
            if rows:
                wide = x if node in as_they_are else _inlined(program.graph, activation.with_range, x)
            if len(rows) < len(node.users):
                plain = _inlined(program.graph, activation.arithmetic, x)
        for user in list(node.users):
            with program.graph.inserting_before(user):
                user.replace_input_with(node, _by_rows(program.graph, wide) if user in layers else plain)
        program.graph.erase_node(node)
    program.graph_module.recompile()


def multiply_by_codes(program: ExportedProgram) -> bool:
    """Scale the outputs of linear layers, not their weight, where int8 weights meet float activations.

    XNNPACK has no product of floats with int8 weights that its partitioner takes. It does convert codes to floats, one
    scale for all of them, and it multiplies with a weight that is computed. Where the weight has a scale for each
    input, that is what is scaled.

    Args:
        program: changed in place.

    Returns:
        Whether there is such a layer.
    """
    graph, aten = program.graph, torch.ops.aten
    found = False
    for node in list(graph.nodes):
        weight = _weight(node)
        if weight is None or op_name(node.args[0]) in _INTEGERS:
            continue
        found = True
        with graph.inserting_before(node):
            codes = call(graph, _ops.dequantize_per_tensor.default, weight.args[0], 1.0, 0, *_RANGE)
            scale = weight.args[1]
            by_input, x = has_scales_of_inputs(node), node.args[0]
            product = call(graph, aten.linear.default, call(graph, aten.mul.Tensor, x, scale) if by_input else x, codes)
            product = product if by_input else call(graph, aten.mul.Tensor, product, scale)
            if len(node.args) > 2 and node.args[2] is not None:
                product = call(graph, aten.add.Tensor, product, node.args[2])
        replace(node, product)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return found


def _weight(node: fx.Node) -> fx.Node | None:
    """The dequantized weight of a linear layer, where each output or each input has a scale."""
    if op_name(node) != "aten::linear":
        return None
    weight: Any = node.args[1]
    return weight if op_name(weight) == DEQUANTIZE_CHANNELS and weight.args[0].op == "placeholder" else None


def _codes(layer: fx.Node) -> fx.Node:
    codes: fx.Node = layer.args[1].args[0]  # type: ignore[union-attr, assignment]
    return codes


def _is_on_a_grid(program: ExportedProgram, marker: fx.Node) -> bool:
    """Whether values may be multiples of a scale: they come from a quantized tensor, with no product between."""
    stack, seen = list(marker.all_input_nodes), set()
    while stack:
        node = stack.pop()
        name = op_name(node)
        if name == _MARKER or name.startswith((_DEQUANTIZES, "aten::round")) or _is_dense_table(program, node):
            return True
        if node not in seen and not name.startswith(_PRODUCTS):
            seen.add(node)
            stack += node.all_input_nodes
    return False


def _is_dense_table(program: ExportedProgram, node: fx.Node) -> bool:
    """Whether an embedding reads decoded values; those are a buffer, where others are parameters."""
    return (
        op_name(node) == "aten::embedding" and node.all_input_nodes[0].name in program.graph_signature.inputs_to_buffers
    )


def _layers(
    program: ExportedProgram, found: Mapping[fx.Node, DynamicActivation], as_they_are: set[fx.Node]
) -> set[fx.Node]:
    """The linear layers that can quantize what they read; all readers of a weight, or none of them."""
    layers: set[fx.Node] = set()
    by_codes: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if _weight(node) is not None and not has_scales_of_inputs(node):
            by_codes.setdefault(_codes(node), []).append(node)
    for codes, readers in by_codes.items():
        alone = len(codes.users) == len(readers) and all(len(user.users) == 1 for user in codes.users)
        read = [_read(node) for node in readers]
        whole = all(node in found for node in read) and all(_fits(program, node) for node in readers)
        if alone and whole and len({node in as_they_are for node in read}) == 1:
            layers.update(readers)
    return layers


def _read(layer: fx.Node) -> fx.Node:
    x: fx.Node = layer.args[0]  # type: ignore[assignment]
    return x


def _fits(program: ExportedProgram, layer: fx.Node) -> bool:
    """Whether a layer reads floats, and has a constant bias or none."""
    x = _read(layer)
    bias: Any = layer.args[2] if len(layer.args) > 2 else None
    constants = program.graph_signature.inputs_to_parameters | program.graph_signature.inputs_to_buffers
    if x.meta["val"].dtype != torch.float32 or layer.args.count(x) > 1:
        return False
    return bias is None or (isinstance(bias, fx.Node) and bias.name in constants)


def _set_weight(program: ExportedProgram, codes: fx.Node, as_they_are: set[fx.Node]) -> None:
    """Give a weight the columns of zeros that its activation's range is multiplied with, and its range of codes."""
    values = program.state_dict[program.graph_signature.inputs_to_buffers[codes.name]]
    small = bool(((values >= _INT4[0]) & (values <= _INT4[1])).all())
    readers = [reader for user in codes.users for reader in user.users]
    if _read(readers[0]) not in as_they_are:
        _change(program, codes, lambda values: torch.nn.functional.pad(values, (0, 2)))
    for weight in list(codes.users):
        lowest, highest = _INT4 if small else _RANGE[:2]
        weight.args = (*weight.args[:4], lowest, highest, *weight.args[6:])
        weight.meta["val"] = torch.empty_like(codes.meta["val"], dtype=torch.float32)


def _change(program: ExportedProgram, buffer: fx.Node, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    name = program.graph_signature.inputs_to_buffers[buffer.name]
    program.state_dict[name] = function(program.state_dict[name])
    buffer.meta["val"] = function(buffer.meta["val"])


def _by_rows(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Quantize and dequantize by what XNNPACK takes for its own rows."""
    chosen = call(graph, _ops.choose_qparams_per_token_asymmetric.default, x, torch.int8)
    scale, zero_point = (call(graph, operator.getitem, chosen, index) for index in (0, 1))
    codes = call(graph, _ops.quantize_per_token.default, x, scale, zero_point, *_RANGE)
    return call(graph, _ops.dequantize_per_token.default, codes, scale, zero_point, *_RANGE, torch.float32)


def _inlined(graph: fx.Graph, function: Callable[[torch.Tensor], torch.Tensor], x: fx.Node) -> fx.Node:
    traced = make_fx(lambda value: function(value))(x.meta["val"])  # it cannot count the arguments of a method
    (argument,) = traced.graph.find_nodes(op="placeholder")
    value = graph.graph_copy(traced.graph, {argument: x})
    assert isinstance(value, fx.Node)
    return value
