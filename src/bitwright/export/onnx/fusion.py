"""Keeps ONNX Runtime's optimizer from fusing dequantized tensors into kernels that compute something else.

Its products fuse with the weights' ``DequantizeLinear``: beside quantized activations into integer kernels, which run
with 8-bit weights with one scale for each output only; beside float activations into ``MatMulNBits``, which rounds the
activations to 8 bits unless a session option forbids it. A maximum of one input does nothing but keep the two apart.

Its softmax on codes adds rounded exponentials, and is off by a code in one of eight places. Its average pool on codes
rounds ties, which averages often are, to other codes than PyTorch's sums of floats, and divides by the whole window
where one reaches beyond the border (``ceil_mode``).

Between quantized activations it rounds weights that are floats, or that it can compute beforehand (palettes, FP4), to 8
bits of its own choice. What is computed beforehand passes through a maximum, so there the activation gets one.

The integer kernels round biases; see ``products``. Where no operator shall compute on codes, nothing at all is fused.

Products of float16 matrices fuse with a transposition that moves the batch, and ONNX Runtime 1.31 ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.export.extras import require

__all__ = [
    "constant_behind",
    "fits_integer_kernel",
    "keep_all_apart",
    "keep_apart",
    "keep_misfits_apart",
    "keep_moved_batches_apart",
    "quantized_by",
]

# The product itself, and what fuses with it first.
_PRODUCT_OR_FACTOR = ("Cast", "Div", "MatMul", "Mul")
# What the optimizer moves a `DequantizeLinear` behind.
_MOVES = ("Flatten", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def keep_all_apart(graph: Any) -> None:
    """Put a barrier behind every ``DequantizeLinear``, so that all other operators compute in floating point.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place.
    """
    for node in list(graph):
        if node.op_type == "DequantizeLinear":
            _put_barrier(graph, node, [use for use in node.outputs[0].uses() if use.node.op_type != "Max"])


def keep_misfits_apart(graph: Any) -> None:
    """Put a barrier wherever a fused kernel would refuse weights, round what it multiplies them with, or be inexact.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place.
    """
    for node in list(graph):
        if node.op_type == "DequantizeLinear":
            misfits = [use for use in node.outputs[0].uses() if _misfit(node, use.node, use.idx)]
            _put_barrier(graph, node, [use for use in misfits if not _put_barrier_behind(graph, use)])


def keep_moved_batches_apart(graph: Any) -> None:
    """Put a barrier between products of float16 matrices and transpositions that move the batch behind the rows.

    Such come with recurrent layers and attention that take the batch first.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place.
    """
    for node in list(graph):
        value = node.outputs[0]
        if node.op_type == "Transpose" and str(value.dtype) == "FLOAT16" and _moves_batch(node):
            _put_barrier(graph, node, [use for use in value.uses() if use.node.op_type in _PRODUCT_OR_FACTOR])


def _moves_batch(transpose: Any) -> bool:
    """Whether the first dimension becomes the last but one or the last, and the others keep their order."""
    order = list(transpose.attributes["perm"].value) if "perm" in transpose.attributes else []
    rest = list(range(1, len(order)))
    return len(order) >= 3 and order in ([*rest[:-1], 0, rest[-1]], [*rest, 0])


def keep_apart(graph: Any, node: Any, user: Any) -> None:
    """Put a barrier between a ``DequantizeLinear`` and one reader of it.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place.
        node: the ``DequantizeLinear``.
        user: the reader.
    """
    _put_barrier(graph, node, [use for use in node.outputs[0].uses() if use.node is user])


def quantized_by(value: Any) -> Any:
    """Return the ``DequantizeLinear`` that a value comes from; None if it comes from something else."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def constant_behind(codes: Any) -> Any:
    """Return the constant that codes are, or that is quantized to them, which the optimizer does beforehand; or None.

    The second is a weight that a model computes from parameters, as with ``weight_norm``.
    """
    maker = codes.producer()
    return (maker.inputs[0] if maker is not None and maker.op_type == "QuantizeLinear" else codes).const_value


def _put_barrier(graph: Any, node: Any, uses: Sequence[Any]) -> None:
    """Let some uses of a node's output read it through a maximum of one input, which is one node for all of them."""
    if not uses:
        return
    output, name = node.outputs[0], f"{node.name}_apart"
    barrier = next((use.node for use in output.uses() if use.node.name == name), None)
    if barrier is None:
        ir = require("onnx_ir", "onnx", "Export to ONNX")
        barrier = ir.node("Max", [output], name=name)
        value = barrier.outputs[0]
        value.name, value.shape, value.type = f"{name}_output", output.shape, output.type
        graph.insert_after(node, barrier)
    value = barrier.outputs[0]
    for use in uses:
        use.node.replace_input_with(use.idx, value)


def _put_barrier_behind(graph: Any, use: Any) -> bool:
    """Part a float convolution of codes from what quantizes its result, if there is nothing else behind it.

    A leaky ReLU with a slope of one does nothing, and runs within the convolution, so that it takes no time.
    """
    conv, y = use.node, use.node.outputs[0]
    readers = [other.node.op_type for other in y.uses()]
    is_float = y.dtype is not None and y.dtype.name == "FLOAT" and y not in graph.outputs
    if conv.op_type != "Conv" or use.idx != 0 or not is_float or not {"MaxPool", "QuantizeLinear"}.issuperset(readers):
        return False
    ir = require("onnx_ir", "onnx", "Export to ONNX")
    barrier = ir.node("LeakyRelu", [y], {"alpha": 1.0}, name=f"{conv.name}_apart")
    value = barrier.outputs[0]
    value.name, value.shape, value.type = f"{conv.name}_apart_output", y.shape, y.type
    for other in list(y.uses()):
        if other.node is not barrier:
            other.node.replace_input_with(other.idx, value)
    graph.insert_after(conv, barrier)
    return True


def _misfit(node: Any, user: Any, position: int) -> bool:
    """Whether a use of a dequantized tensor must not be fused."""
    if user.op_type == "Cast":
        return True  # to half precision: the optimizer takes it out, and fuses what stands behind it
    if constant_behind(node.inputs[0]) is not None:
        return _misfit_of_weight(node, user, position)
    return _misfit_of_activation(user, position)


def _misfit_of_activation(user: Any, position: int) -> bool:
    """Whether there is no integer kernel for a reader of codes that gives the prepared model's result."""
    if user.op_type not in ("MatMul", "Gemm", "Conv") or position > 1:
        return _lacks_kernel(user)
    return quantized_by(user.inputs[1 - position]) is None


def _lacks_kernel(user: Any) -> bool:
    """Whether codes must not get into a reader, or into one behind it, since the optimizer moves a tensor's codes."""
    if user.op_type in _MOVES:
        return any(_lacks_kernel(use.node) for use in user.outputs[0].uses())
    return user.op_type in ("AveragePool", "ConvTranspose", "Softmax")


def _misfit_of_weight(weight: Any, user: Any, position: int) -> bool:
    if user.op_type == "Transpose":
        return True  # the optimizer moves it in front of the weight
    if user.op_type not in ("MatMul", "Gemm", "Conv"):
        return False
    if position != 1 or quantized_by(user.inputs[0]) is None:
        return bool(user.op_type != "Conv")
    return not fits_integer_kernel(weight, user)


def fits_integer_kernel(weight: Any, user: Any) -> bool:
    """Whether an integer kernel takes a weight: 8-bit codes with one scale, or a matrix with one for each output.

    Args:
        weight: the ``DequantizeLinear`` of the weight.
        user: the ``MatMul``, ``Gemm`` or ``Conv`` that reads it.
    """
    codes, scale = weight.inputs[0], weight.inputs[1]
    dtype = codes.dtype or codes.producer().inputs[-1].dtype  # computed codes have their zero point's
    if dtype.bitwidth != 8 or "FLOAT" in dtype.name or "block_size" in weight.attributes:
        return False
    if len(scale.shape) == 0:
        return True
    transposed = user.op_type == "Gemm" and "transB" in user.attributes and user.attributes["transB"].value
    rank = len(codes.shape)
    if user.op_type == "MatMul" and rank != 2:
        return False  # of a batch of matrices it takes one scale only
    outputs = 0 if user.op_type == "Conv" or transposed else rank - 1
    axis = weight.attributes["axis"].value if "axis" in weight.attributes else 1
    if axis % rank != outputs:
        return False
    return user.op_type != "Conv" or _same_zero_points(weight)


def _same_zero_points(weight: Any) -> bool:
    """The integer convolution takes one zero point for all channels."""
    if len(weight.inputs) < 3 or weight.inputs[2] is None:
        return True
    points: np.ndarray[Any, Any] = weight.inputs[2].const_value.numpy()
    return bool((points == points.reshape(-1)[0]).all()) if points.size else True
