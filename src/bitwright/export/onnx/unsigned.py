"""Weights of integer products as codes that no processor adds up in too few bits.

ONNX Runtime multiplies unsigned codes of activations by signed ones of weights, and x86 processors that have no VNNI
add two such products in 16 bits, where 255 times 127 twice does not fit: the sum stays at its bound, and the result is
wrong by any amount. A session option (``session.x64quantprecision``) prevents that, but a file cannot set it.

With unsigned weights the kernels widen both factors first; that is right everywhere, and as slow as floating point:
such kernels do without VNNI and AMX. Codes up to 64 always fit. So a large matrix is multiplied as two halves,
rounded down and up, beside each other, with every input twice: the sums are the same whole numbers. The file holds the
codes once; ONNX Runtime halves them when it opens the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .builder import NodeBuilder, drop_unread_initializers, drop_unread_nodes
from .fusion import fits_integer_kernel, quantized_by

__all__ = ["use_fitting_weights"]

_SMALL = 64
"""Codes of weights up to which two products with a byte fit into 16 bits."""
_FEWEST_OUTPUTS = 32
"""Outputs below which repeating the inputs takes as long as the quicker kernel saves."""


def use_fitting_weights(graph: Any, *, halved: bool) -> None:
    """Write weights that integer kernels multiply with unsigned activations so that sums fit on every processor.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place.
        halved: large ones as two halves that stay signed; False to move all of them up by 128, and zero points too.
    """
    for number, node in enumerate(list(graph)):
        if node.op_type not in ("MatMul", "Gemm", "Conv"):
            continue
        x, weight = quantized_by(node.inputs[0]), quantized_by(node.inputs[1])
        if x is None or weight is None or not _may_overflow(x, weight, node):
            continue
        axes = _summed_axes(node, weight) if halved else None
        if axes is None:
            _make_unsigned(graph, weight)
        else:
            _multiply_halves(graph, node, axes, number)
    drop_unread_nodes(graph)
    drop_unread_initializers(graph)


def _may_overflow(x: Any, weight: Any, product: Any) -> bool:
    """Whether a kernel for unsigned and signed codes runs the product, and two products may not fit into 16 bits."""
    codes = weight.inputs[0].const_value
    if x.inputs[0].const_value is not None or x.inputs[2].dtype.name != "UINT8":
        return False
    if codes is None or codes.dtype.name != "INT8":
        return False
    return fits_integer_kernel(weight, product) and bool((np.abs(codes.numpy().astype(np.int16)) > _SMALL).any())


def _summed_axes(product: Any, weight: Any) -> tuple[int, int] | None:
    """The axes of activation and weight that a product sums over; None where halves are not worth it, or impossible."""
    attributes = {name: attribute.value for name, attribute in product.attributes.items()}
    shape, point = weight.inputs[0].const_value.shape, weight.inputs[2] if len(weight.inputs) > 2 else None
    if point is not None and point.const_value.numpy().any():
        return None
    if product.op_type == "Conv":
        axes, outputs = (1, 1), 0
    elif product.op_type == "Gemm":
        transposed = attributes.get("transB", 0)
        axes, outputs = (1, 1 if transposed else 0), 0 if transposed else 1
    else:
        axes, outputs = (-1, 0), 1
    if attributes.get("group", 1) != 1 or attributes.get("transA", 0) or (axes[0] == -1 and len(shape) != 2):
        return None
    return axes if shape[outputs] >= _FEWEST_OUTPUTS else None


def _multiply_halves(graph: Any, product: Any, axes: tuple[int, int], number: int) -> None:
    """Let a product read its activation twice, and the weight's halves beside each other."""
    x, weight = (quantized_by(value) for value in product.inputs[:2])
    codes = weight.inputs[0]
    build = NodeBuilder(graph, product, f"{codes.name}_halves", number)
    whole = build("Cast", [codes], {"to": 1})
    lower = build("Floor", [build("Mul", [whole, build.initializer(torch.tensor(0.5, dtype=torch.float32), "half")])])
    halves = [build("Cast", [half], {"to": 3}) for half in (lower, build("Sub", [whole, lower]))]
    stored = build("Concat", halves, {"axis": axes[1]})
    per_output = {name: attribute.value for name, attribute in weight.attributes.items()}
    product.replace_input_with(1, build("DequantizeLinear", [stored, *weight.inputs[1:]], per_output))
    twice = build("Concat", [x.inputs[0]] * 2, {"axis": axes[0]})
    product.replace_input_with(0, build("DequantizeLinear", [twice, *x.inputs[1:]]))


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
