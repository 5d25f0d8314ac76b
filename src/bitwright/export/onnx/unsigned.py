"""Weights of integer products as unsigned codes, which no processor adds up in too few bits.

ONNX Runtime multiplies unsigned codes of activations by signed ones of weights, and x86 processors that have no VNNI
add two such products in 16 bits, where 255 times 127 twice does not fit: the sum stays at its bound, and the result is
wrong by any amount. With unsigned weights the kernels widen both factors first. Where there is VNNI, matrices of
unsigned codes go through the kernels of signed ones, by another sign bit. A session option
(``session.x64quantprecision``) would have the same effect, but a file cannot set it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .builder import NodeBuilder, drop_unread_initializers
from .fusion import fits_integer_kernel, quantized_by

__all__ = ["use_unsigned_weights"]

_SMALL = 64
"""Codes of weights up to which two products with a byte fit into 16 bits."""


def use_unsigned_weights(graph: Any) -> None:
    """Move the codes of weights that integer kernels multiply with unsigned activations up by 128, and zero points too.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place.
    """
    for node in list(graph):
        if node.op_type in ("MatMul", "Gemm", "Conv"):
            x, weight = quantized_by(node.inputs[0]), quantized_by(node.inputs[1])
            if x is not None and weight is not None and _may_overflow(x, weight, node):
                _make_unsigned(graph, weight)
    drop_unread_initializers(graph)


def _may_overflow(x: Any, weight: Any, product: Any) -> bool:
    """Whether a kernel for unsigned and signed codes runs the product, and two products may not fit into 16 bits."""
    codes = weight.inputs[0].const_value
    if x.inputs[0].const_value is not None or x.inputs[2].dtype.name != "UINT8":
        return False
    if codes is None or codes.dtype.name != "INT8":
        return False
    return fits_integer_kernel(weight, product) and bool((np.abs(codes.numpy().astype(np.int16)) > _SMALL).any())


def _make_unsigned(graph: Any, weight: Any) -> None:
    codes, scale = weight.inputs[:2]
    point = weight.inputs[2] if len(weight.inputs) > 2 else None
    points = np.zeros(list(scale.shape), np.int8) if point is None else point.const_value.numpy()
    build = NodeBuilder(graph, weight, f"{codes.name}_unsigned", "w")
    weight.resize_inputs(3)
    weight.replace_input_with(0, build.initializer(_moved(codes.const_value.numpy()), "codes"))
    weight.replace_input_with(2, build.initializer(_moved(points), "zero_point"))


def _moved(codes: np.ndarray[Any, Any]) -> torch.Tensor:
    """Signed codes as unsigned ones that are 128 higher, in a ``torch.uint8`` tensor."""
    return (torch.from_numpy(np.array(codes)).to(torch.int16) + 128).to(torch.uint8)
