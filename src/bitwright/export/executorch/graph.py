"""Rewriting exported programs so that XNNPACK's partitioner takes what XNNPACK runs, and nothing else."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from bitwright.export.constants import add_constant
from bitwright.export.graph_edits import argument, call, erase_with_what_it_reads, replace

__all__ = [
    "DEQUANTIZE",
    "DEQUANTIZE_CHANNELS",
    "FUSED",
    "QUANTIZE",
    "batches_for_products",
    "dequantize_for_each_reader",
    "dequantize_in_floats",
    "drop_assertions_of_values",
    "drop_identities",
    "drop_unread_addends",
    "has_scales_of_inputs",
    "op_name",
    "reshape_behind_attention",
    "spell_out_batch_norms",
    "spell_out_crops",
    "spell_out_gelu",
    "spell_out_prelu",
    "spell_out_remainders",
]

DEQUANTIZE, DEQUANTIZE_CHANNELS = (f"quantized_decomposed::dequantize_per_{what}" for what in ("tensor", "channel"))
QUANTIZE = "quantized_decomposed::quantize_per_tensor"
_LAYERS = ("aten::linear", "aten::conv", "aten::addmm", "aten::mm")
FUSED = ("aten::relu", "aten::hardtanh", "aten::batch_norm", "aten::_native_batch_norm")
"""Ops that XNNPACK does in the layer in front of them."""
_MOVES = tuple(
    f"aten::{name}"
    for name in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "slice")
)
_CASTS = ("aten::to", "aten::type_as", "aten::alias", "aten::detach")
_JOINS = ("aten::cat", "aten::concat", "aten::stack")
_PADS = ("aten::pad", "aten::constant_pad")


def drop_assertions_of_values(module: fx.GraphModule) -> None:
    """Leave out what ``torch._check_tensor_all`` asserts: ExecuTorch has no numbers made of a tensor's truth value."""
    for assertion in module.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        condition = assertion.args[0]
        numbers = condition.all_input_nodes if isinstance(condition, fx.Node) else []
        if any(number.target is torch.sym_ite for number in numbers):
            erase_with_what_it_reads(assertion)


def spell_out_gelu(module: fx.GraphModule) -> None:
    """Write the GELU with tanh as arithmetic: XNNPACK computes the one with erf for it, up to 0.0005 beside it."""
    aten = torch.ops.aten
    multiply, add = (partial(call, module.graph, op) for op in (aten.mul.Tensor, aten.add.Tensor))
    for node in module.graph.find_nodes(op="call_function", target=aten.gelu.default):
        if node.kwargs.get("approximate", "none") != "tanh":
            continue
        x = node.args[0]
        with module.graph.inserting_before(node):
            inner = add(x, multiply(multiply(multiply(x, x), x), 0.044715))
            side = call(module.graph, aten.tanh.default, multiply(inner, math.sqrt(2 / math.pi)))
            y = multiply(multiply(x, 0.5), add(side, 1.0))
        replace(node, y)
    module.recompile()


def _are_numbers(sizes: list[Any]) -> bool:
    return all(isinstance(size, int) for size in sizes)


def drop_identities(module: fx.GraphModule) -> None:
    """Remove casts to the type that is there already, which would hide how many readers a quantized tensor has."""
    for node in list(module.graph.nodes):
        if op_name(node).partition(".")[0] not in _CASTS or any(user.op == "output" for user in node.users):
            continue  # the program's signature calls outputs by their names
        before, after = node.args[0].meta["val"], node.meta["val"]
        if before.dtype == after.dtype and before.stride() == after.stride():
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def drop_unread_addends(module: fx.GraphModule) -> None:
    """Leave out what a ``beta`` of zero makes ``addmm`` not read: ExecuTorch's kernel multiplies NaN with it."""
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.addmm.default):
        if argument(node, "beta") != 0:
            continue
        alpha = argument(node, "alpha")
        with module.graph.inserting_before(node):
            y = call(module.graph, aten.mm.default, *node.args[1:3])
            y = y if alpha == 1 else call(module.graph, aten.mul.Tensor, y, alpha)
        replace(node, y)
    module.recompile()


def dequantize_for_each_reader(module: fx.GraphModule) -> None:
    """Give every reader of a dequantized tensor a node of its own.

    XNNPACK's partitioner joins ops that share one to a single sub-graph, through whatever other op stands between
    them, and then finds that it has made a cycle.
    """
    for node in list(module.graph.nodes):
        if op_name(node) not in (DEQUANTIZE, DEQUANTIZE_CHANNELS):
            continue
        for user in list(node.users)[1:]:
            with module.graph.inserting_before(user):
                user.replace_input_with(node, module.graph.node_copy(node))
    module.recompile()


def dequantize_in_floats(module: fx.GraphModule) -> None:
    """Dequantize by arithmetic what goes into a layer whose output is not quantized at once, or is only moved.

    XNNPACK has no product from int8 to floats. Its partitioner takes the reshapes around one all the same, as int8 on
    one side only, and its runtime then refuses the file; as it does where a reshape's sides have two scales, or what is
    joined has several. Nor has it a linear layer whose weight has a scale for each input, or a convolution with a
    quantized activation, which its partitioner takes for a weight that is not there.
    """
    aten = torch.ops.aten
    convolved = {
        node for node in module.graph.nodes if op_name(node).startswith("aten::conv") and _is_activation(node.args[1])
    }
    for node in list(module.graph.nodes):
        users = list(node.users)
        if op_name(node) != DEQUANTIZE or not users:
            continue
        layer = op_name(users[0]).startswith(_LAYERS)
        enters_floats = layer and (has_scales_of_inputs(users[0]) or not _is_quantized_at_once(users[0]))
        enters_floats = enters_floats or users[0] in convolved
        if not enters_floats and not _has_two_scales(users[0]):
            continue
        codes, scale, zero_point = node.args[:3]
        with module.graph.inserting_before(node):
            value = call(module.graph, aten._to_copy.default, codes, dtype=torch.float32)
            value = call(module.graph, aten.sub.Tensor, value, zero_point)
            value = call(module.graph, aten.mul.Tensor, value, scale)
        node.replace_all_uses_with(value)
        module.graph.erase_node(node)
    module.recompile()


def spell_out_prelu(module: fx.GraphModule) -> None:
    """Write PReLU as a sum of its two sides, one of which is zero: XNNPACK's own reads constant float weights only."""
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.prelu.default):
        x, weight = node.args
        shape = [-1, *[1] * (x.meta["val"].ndim - 2)] if x.meta["val"].ndim > 1 else [-1]
        with module.graph.inserting_before(node):
            above = call(module.graph, aten.relu.default, x)
            below = call(module.graph, aten.clamp.default, x, None, 0)
            factor = call(module.graph, aten.view.default, weight, shape)
            y = call(module.graph, aten.add.Tensor, above, call(module.graph, aten.mul.Tensor, below, factor))
        replace(node, y)
    module.recompile()


def spell_out_crops(module: fx.GraphModule) -> None:
    """Write padding by negative numbers as slices, which ExecuTorch's kernels refuse when they run.

    So does PyTorch's decomposition of ``fold`` with padding, which is folded without and cropped here.
    """
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.col2im.default):
        x, size, kernel, dilation, padding, stride = node.args
        if not any(padding):
            continue
        with module.graph.inserting_before(node):
            larger = [length + 2 * pad for length, pad in zip(size, padding, strict=True)]
            y = call(module.graph, aten.col2im.default, x, larger, kernel, dilation, [0, 0], stride)
            y = _cropped(module.graph, y, [number for pad in reversed(padding) for number in (-pad, -pad)])
        replace(node, y)
    for op in (aten.pad.default, aten.constant_pad_nd.default):
        for node in module.graph.find_nodes(op="call_function", target=op):
            sides = node.args[1]
            if not _are_numbers(sides) or min(sides, default=0) >= 0:
                continue
            with module.graph.inserting_before(node):
                y = _cropped(module.graph, node.args[0], sides)
                y = call(module.graph, op, y, [max(0, number) for number in sides], *node.args[2:])
            replace(node, y)
    module.recompile()


def spell_out_remainders(module: fx.GraphModule) -> None:
    """Write remainders of integers by their quotients: ExecuTorch's kernel is off where signs differ."""
    aten = torch.ops.aten
    for op in (aten.remainder.Scalar, aten.remainder.Tensor):
        for node in module.graph.find_nodes(op="call_function", target=op):
            if node.meta["val"].dtype.is_floating_point:
                continue
            x, divisor = node.args
            kind = op._overloadname
            with module.graph.inserting_before(node):
                times = call(module.graph, getattr(aten.div, f"{kind}_mode"), x, divisor, rounding_mode="floor")
                whole = call(module.graph, getattr(aten.mul, kind), times, divisor)
                y = call(module.graph, aten.sub.Tensor, x, whole)
            replace(node, y)
    module.recompile()


def batches_for_products(module: fx.GraphModule) -> None:
    """Write products of two matrices of which the right one is a quantized activation as batches of one.

    XNNPACK takes such a product for a linear layer, and reads the codes of a weight that is not there.
    """
    aten, graph = torch.ops.aten, module.graph
    places = {aten.mm.default: 0, aten.matmul.default: 0, aten.addmm.default: 1}
    for node in list(graph.nodes):
        if node.target not in places:
            continue
        left, right = node.args[places[node.target] :][:2]
        if not _is_activation(right) or left.meta["val"].ndim != 2 or right.meta["val"].ndim != 2:
            continue
        with graph.inserting_before(node):
            batches = (call(graph, aten.unsqueeze.default, matrix, 0) for matrix in (left, right))
            y = call(graph, aten.squeeze.dim, call(graph, aten.bmm.default, *batches), 0)
            if node.target is aten.addmm.default:
                beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
                y = y if alpha == 1 else call(graph, aten.mul.Scalar, y, alpha)
                added = node.args[0] if beta == 1 else call(graph, aten.mul.Scalar, node.args[0], beta)
                y = call(graph, aten.add.Tensor, y, added)
        replace(node, y)
    module.recompile()


def _cropped(graph: fx.Graph, x: fx.Node, sides: list[int]) -> fx.Node:
    """A tensor without what negative numbers of ``torch.nn.functional.pad`` cut off."""
    for place in range(0, len(sides), 2):
        dim = x.meta["val"].dim() - 1 - place // 2
        start, end = (max(0, -number) for number in sides[place : place + 2])
        if start or end:
            x = call(graph, torch.ops.aten.slice.Tensor, x, dim, start, x.meta["val"].shape[dim] - end)
    return x


def spell_out_batch_norms(program: ExportedProgram) -> None:
    """Write batch norms that follow no layer as a product and a sum.

    XNNPACK makes them layers with float weights, which it refuses behind codes where there is one dimension behind the
    channels, and computes wrong where the batch norm has no weight.
    """
    aten, signature = torch.ops.aten, program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    state = {**program.constants, **program.state_dict}  # buffers that are not persistent are constants
    for node in program.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        x, *read, training = node.args[:6]
        values = [state.get(names.get(getattr(one, "name", ""), "")) for one in read]
        weight, bias, mean, variance = (None if value is None else value.double() for value in values)
        known = all(value is not None or one is None for one, value in zip(read, values, strict=True))
        if training or not known or mean is None or variance is None or op_name(x).startswith(_LAYERS):
            continue
        factor = (variance + node.args[7]).rsqrt() * (1.0 if weight is None else weight)
        shift = (0.0 if bias is None else bias) - mean * factor
        shape = (-1, *[1] * (x.meta["val"].ndim - 2))
        with program.graph.inserting_before(node):
            y = x
            for op, value in ((aten.mul.Tensor, factor), (aten.add.Tensor, shift)):
                y = call(program.graph, op, y, add_constant(program, read[2], read[2].name, value.float().view(shape)))
            if y.meta["val"].dtype != x.meta["val"].dtype:  # x in half precision, the constants are not
                y = call(program.graph, aten._to_copy.default, y, dtype=x.meta["val"].dtype)
        replace(node, y)
    program.graph_module.recompile()


def reshape_behind_attention(module: fx.GraphModule) -> None:
    """Let views copy where they must: attention becomes products, whose result lies in another order than its own."""
    aten = torch.ops.aten
    attention = module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    for node in attention:
        with module.graph.inserting_after(node):
            ordered = call(module.graph, aten.clone.default, node, memory_format=torch.contiguous_format)
        node.replace_all_uses_with(ordered, delete_user_cb=lambda user, ordered=ordered: user is not ordered)
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default) if attention else []:
        node.target = aten.reshape.default
    module.recompile()


def has_scales_of_inputs(node: fx.Node) -> bool:
    """Whether a linear layer's weight has a scale for each of its inputs, not of its outputs."""
    if op_name(node) != "aten::linear":
        return False
    weight: Any = node.args[1]
    return op_name(weight) == DEQUANTIZE_CHANNELS and weight.args[3] == 1


def _is_activation(value: Any) -> bool:
    """Whether a value is a quantized activation, not a weight."""
    return op_name(value) == DEQUANTIZE and value.args[0].op != "placeholder"


def _is_quantized_at_once(node: fx.Node) -> bool:
    """Whether all readers of a layer quantize its output, behind what XNNPACK fuses with it."""
    readers = list(node.users)
    if len(readers) == 1 and op_name(readers[0]).startswith(FUSED):
        return _is_quantized_at_once(readers[0])
    return all(op_name(reader) == QUANTIZE for reader in readers)


def _has_two_scales(reader: fx.Node) -> bool:
    """Whether what an op moves is quantized by other parameters in front of it and behind it, or by none."""
    name, behind = op_name(reader), [_parameters(user, QUANTIZE) for user in reader.users]
    in_front = {_parameters(node, DEQUANTIZE) for node in reader.all_input_nodes}
    if name.startswith(_MOVES):
        behind = [parameters for parameters in behind if parameters is not None]
    elif not name.startswith((*_JOINS, *_PADS)):
        return False
    return len(in_front.union(behind)) > 1


def _parameters(node: fx.Node, kind: str) -> Any:
    """Scale and zero point of a node of this kind; None for others."""
    return node.args[1:3] if op_name(node) == kind else None


def op_name(node: fx.Node) -> str:
    """The name of an op, like ``aten::linear``; empty for other nodes."""
    return str(getattr(node.target, "name", str)()) if node.op == "call_function" else ""
