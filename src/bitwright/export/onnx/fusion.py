"""Keeps ONNX Runtime's optimizer from fusing weights into kernels that compute something else.

Its products fuse with the weights' ``DequantizeLinear``: beside quantized activations into integer kernels, which run
with 8-bit weights with one scale for each output only; beside float activations into ``MatMulNBits``, which rounds the
activations to 8 bits unless a session option forbids it. A maximum of one input does nothing but keep the two apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.export.extras import require

__all__ = ["keep_weights_apart"]


def keep_weights_apart(graph: Any) -> None:
    """Put a barrier behind weights wherever a fused kernel would refuse them or round what it multiplies them with.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place.
    """
    ir = require("onnx_ir", "onnx", "Export to ONNX")
    for node in list(graph):
        if node.op_type != "DequantizeLinear" or node.inputs[0].const_value is None:
            continue
        output = node.outputs[0]
        apart = [use for use in output.uses() if _misfit(node, use.node, use.idx)]
        if not apart:
            continue
        barrier = ir.node("Max", [output], name=f"{node.name}_apart")
        value = barrier.outputs[0]
        value.name, value.shape, value.type = f"{node.name}_apart_output", output.shape, output.type
        graph.insert_after(node, barrier)
        for use in apart:
            use.node.replace_input_with(use.idx, value)


def _misfit(weight: Any, user: Any, position: int) -> bool:
    """Whether a use of a weight must not be fused."""
    if user.op_type == "Transpose":
        return True  # the optimizer moves it in front of the weight
    if user.op_type not in ("MatMul", "Gemm", "Conv"):
        return False
    other = user.inputs[0].producer()
    if position != 1 or other is None or other.op_type != "DequantizeLinear":
        return bool(user.op_type != "Conv")
    return not _fits_integer_kernel(weight, user)


def _fits_integer_kernel(weight: Any, user: Any) -> bool:
    """Whether 8-bit codes have one scale, or one for each output of the kernel."""
    codes, scale = weight.inputs[0], weight.inputs[1]
    if codes.dtype.bitwidth != 8 or "FLOAT" in codes.dtype.name or "block_size" in weight.attributes:
        return False
    if len(scale.shape) == 0:
        return True
    transposed = user.op_type == "Gemm" and "transB" in user.attributes and user.attributes["transB"].value
    rank = len(codes.shape)
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
