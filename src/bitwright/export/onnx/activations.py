"""Activation quantizers as ONNX nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bitwright.export.coreai_activations import ActivationOperands, activation_operands, along
from bitwright.quantization.spec import PerTensorGranularity
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .builder import NodeBuilder, onnx_type

__all__ = ["activation_opset", "build_activation", "comes_from_codes", "has_nodes"]

_FLOAT = 1
_TRANSPARENT = {
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather", "Expand", "Identity", "Relu", "Clip",
    "MaxPool", "Resize", "Concat", "Split", "Pad", "DepthToSpace", "SpaceToDepth", "Tile",
}  # fmt: skip


def has_nodes(simulator: FakeQuantizeImplBase) -> bool:
    """Whether an activation becomes quantize and dequantize nodes.

    Others (dynamic, per channel, per block, per token, FP4) are exported as the arithmetic of their simulation. ONNX
    has nodes for scales per channel, but ONNX Runtime fuses them into operators that take one scale only.
    """
    plain = isinstance(simulator.granularity, PerTensorGranularity)
    return plain and not simulator.is_stateless and simulator.dtype != torch.float4_e2m1fn_x2


def activation_opset(simulator: FakeQuantizeImplBase) -> int:
    """Return the smallest opset whose operators hold an activation."""
    return 19 if simulator.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else 18


def build_activation(build: NodeBuilder, x: Any, simulator: FakeQuantizeImplBase, unsigned: bool) -> Any:
    """Add nodes that quantize and dequantize ``x`` in float32; return the value that takes its place.

    Args:
        build: adds the nodes.
        x: the activation.
        simulator: gives the parameters.
        unsigned: write signed codes as unsigned ones, 128 higher, which stand for the same values.
    """
    operands = activation_operands(simulator)
    if unsigned and operands.dtype == torch.int8:
        operands = _unsigned(operands)
    original = x
    rectify = False
    if comes_from_codes(x):
        # ONNX Runtime merges a dequantize with a quantize behind it into one with a scale of its own making. A maximum
        # of one input does nothing but keep the two apart.
        x = build("Max", [x], like=x)
    elif _rectifies_in_codes(x, operands):
        # The layer in front is fused with the quantize node only if nothing stands between them.
        rectify = True
        x = x.producer().inputs[0]
    cast = operands.compute_dtype != torch.float32
    if cast:
        x = build("Cast", [x], {"to": _FLOAT}, like=x, dtype=_FLOAT)
    x = _integer(build, x, operands, rectify) if operands.is_integer else _float8(build, x, operands)
    return build("Cast", [x], {"to": onnx_type(operands.compute_dtype)}, like=original) if cast else x


def _unsigned(operands: ActivationOperands) -> ActivationOperands:
    points = operands.zero_point
    moved = None if points is None else (points.to(torch.int16) + 128).to(torch.uint8)
    return replace(operands, dtype=torch.uint8, zero_point=moved)


def comes_from_codes(x: Any) -> bool:
    """Whether a value was dequantized before, with nothing since but what ONNX Runtime moves quantization across.

    Args:
        x: an ``onnx_ir.Value``.
    """
    waiting, seen = [x], set()
    while waiting:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type == "DequantizeLinear":
            return True
        if node.op_type in _TRANSPARENT:
            waiting += node.inputs
    return False


def _rectifies_in_codes(x: Any, operands: ActivationOperands) -> bool:
    """Whether a ReLU in front can be done on the codes instead: they are whole, and one of them stands for zero."""
    node = x.producer()
    plain = operands.is_integer and operands.minval is None and operands.low is None and operands.high is None
    return plain and operands.scale.ndim == 0 and node is not None and node.op_type == "Relu"


def _integer(build: NodeBuilder, x: Any, operands: ActivationOperands, rectify: bool) -> Any:
    rank = len(x.shape) if x.shape is not None else 0
    for kind, op in (("low", "Max"), ("high", "Min")):
        limit = getattr(operands, kind)
        if limit is not None:
            x = build(op, [x, build.initializer(along(limit, operands.axis, rank), kind)], like=x)
    scale = build.initializer(operands.scale, "scale")
    attributes = {"axis": operands.axis} if operands.scale.ndim else {}
    origin = None
    if operands.minval is not None:
        origin = build.initializer(along(operands.minval, operands.axis, rank), "minval")
        x = build("Sub", [x, origin], like=x)
        lowest = torch.iinfo(operands.dtype).min
        points = torch.full(operands.scale.shape, lowest, dtype=operands.dtype)
    else:
        assert operands.zero_point is not None
        points = operands.zero_point
    zero_point = build.initializer(points, "zero_point")
    codes = build("QuantizeLinear", [x, scale, zero_point], attributes)
    if rectify and bool((points > torch.iinfo(operands.dtype).min).any()):
        codes = build("Max", [codes, zero_point])
    y = build("DequantizeLinear", [codes, scale, zero_point], attributes, like=x)
    return y if origin is None else build("Add", [y, origin], like=x)


def _float8(build: NodeBuilder, x: Any, operands: ActivationOperands) -> Any:
    """FP8 by casts: optimizers of ONNX Runtime take ``QuantizeLinear`` to FP8 for one to integers and break it."""
    rank = len(x.shape) if x.shape is not None else 0
    scale = build.initializer(along(operands.scale, operands.axis, rank), "scale")
    largest = torch.finfo(operands.dtype).max
    y = build("Div", [x, scale], like=x)
    bounds = torch.tensor([-largest, largest], dtype=torch.float32)
    limits = [build.initializer(limit, name) for limit, name in zip(bounds, ("low", "high"), strict=True)]
    y = build("Clip", [y, *limits], like=x)
    y = build("Cast", [y], {"to": onnx_type(operands.dtype)}, like=x, dtype=onnx_type(operands.dtype))
    y = build("Cast", [y], {"to": _FLOAT}, like=x, dtype=_FLOAT)
    return build("Mul", [y, scale], like=x)
