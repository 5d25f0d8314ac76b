"""ONNX Runtime's ``MatMulNBits``: a matrix product with 4-bit weights in blocks, dequantized inside the kernel."""

from __future__ import annotations

from typing import Any

import torch

from bitwright.artifact import QuantizedTensor
from bitwright.formats import pack

from .builder import NodeBuilder, replace_value

__all__ = ["fits_matmul_nbits", "nbits_operands", "use_matmul_nbits"]

_BLOCKS = (16, 32, 64, 128, 256)
_DOMAIN = "com.microsoft"


def fits_matmul_nbits(tensor: Any) -> bool:
    """Whether a weight of shape (outputs, inputs) can be held: 4 bits, blocks along the inputs."""
    if not isinstance(tensor, QuantizedTensor) or len(tensor.shape) != 2 or tensor.is_sparse:
        return False
    layout = tensor.layout
    return (
        layout.format in ("int4", "uint4")
        and layout.formulation == "zp"
        and layout.block_size[0] == 1
        and layout.block_size[1] in _BLOCKS
        and tensor.dtype in (torch.float32, torch.float16)
    )


def nbits_operands(tensor: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return packed codes, scales and packed zero points.

    Codes are unsigned; signed ones are moved up by 8. Shapes: (outputs, blocks, block / 2), (outputs * blocks) and
    (outputs * ceil(blocks / 2)); no zero points where all are 8, the operator's default.
    """
    layout = tensor.layout
    outputs, blocks = layout.counts
    shift = 8 if layout.number_format.signed else 0
    codes = (tensor.codes().to(torch.int16) + shift).to(torch.uint8)
    packed = pack(codes, 4).reshape(outputs, blocks, layout.block_size[1] // 2)
    scale = tensor.scale().to(tensor.dtype).reshape(-1)
    points = tensor.zero_point()
    assert points is not None
    points = points + shift
    if bool((points == 8).all()):
        return packed, scale, None
    rows = torch.nn.functional.pad(points.to(torch.uint8), (0, blocks % 2))
    return packed, scale, pack(rows, 4)


def use_matmul_nbits(graph: Any, node: Any, name: str, tensor: Any) -> None:
    """Replace the matrix products that read a weight by ``MatMulNBits`` where it fits; leave the others."""
    if not fits_matmul_nbits(tensor):
        return
    for user in [use.node for use in node.outputs[0].uses()]:
        if user.op_type == "Transpose" and tuple(user.attributes["perm"].value) == (1, 0):
            turned = user.outputs[0]
            readers = [use.node for use in turned.uses()]
            if turned not in graph.outputs and all(_multiplies_by(reader, turned) for reader in readers):
                for reader in readers:
                    _replace_product(graph, reader, name, tensor, bias=None)
                graph.remove(user, safe=True)
        elif user.op_type == "Gemm" and _is_linear(user, node.outputs[0]):
            bias = user.inputs[2] if len(user.inputs) > 2 else None
            _replace_product(graph, user, name, tensor, bias=bias)


def _multiplies_by(node: Any, weight: Any) -> bool:
    return node.op_type == "MatMul" and node.inputs[1] is weight


def _is_linear(node: Any, weight: Any) -> bool:
    values = {key: attribute.value for key, attribute in node.attributes.items()}
    plain = values.get("alpha", 1.0) == 1.0 and values.get("beta", 1.0) == 1.0 and not values.get("transA", 0)
    return bool(plain and values.get("transB", 0) == 1 and node.inputs[1] is weight)


def _replace_product(graph: Any, node: Any, name: str, tensor: QuantizedTensor, bias: Any) -> None:
    build = NodeBuilder(graph, node, name, node.name)
    codes, scale, points = nbits_operands(tensor)
    inputs = [node.inputs[0], build.initializer(codes, "nbits_codes"), build.initializer(scale, "nbits_scale")]
    if points is not None:
        inputs.append(build.initializer(points, "nbits_zero_point"))
    outputs, features = tensor.shape
    attributes = {"K": features, "N": outputs, "bits": 4, "block_size": tensor.layout.block_size[1]}
    value = build("MatMulNBits", inputs, attributes, like=node.outputs[0], domain=_DOMAIN)
    if bias is not None:
        value = build("Add", [value, bias], like=node.outputs[0])
    replace_value(node.outputs[0], value)
    graph.remove(node, safe=True)
