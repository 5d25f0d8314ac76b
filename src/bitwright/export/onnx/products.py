"""Layers between quantized activations as integer products whose bias is added in floating point.

ONNX Runtime's fused kernels (``QLinearConv``, ``QGemm``) hold a bias in 32-bit integers, in units of the input's scale
times the weight's. A sum close to a rounding bound then gets the code beside that of the prepared model: one code in
some thousands, but in a deep network every further layer sees more of them. Its ``MatMulIntegerToFloat`` has no bias.
So a bias that is no whole number of those units is subtracted, negated, behind the product: an addition would be
fused into it again. A convolution is written as the product it is, over patches of the codes with the channels last; a
patch is put together from slices, which is quick where they are long. Other convolutions stay in floating point, which
is as quick for narrow images as the kernels that round.

Where a channel has next to no weights, its scale is so small that its bias overflows, and ONNX Runtime drops it; such
layers never stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from .builder import NodeBuilder, drop_unread_initializers, drop_unread_nodes, replace_value
from .fusion import constant_behind, fits_integer_kernel, quantized_by

__all__ = ["use_exact_products"]

_SHORTEST_SLICES = {1: 48, 2: 48, 3: 16}
"""Channels of a convolution, by spatial dimensions, below which its patches take longer than a float convolution."""
_NARROW_INPUTS, _NARROW_OUTPUTS = 16, 32
"""Channels of a convolution below which an integer kernel gains nothing over a float one."""
_END = (1 << 31) - 1
_ON_GRID = 1e-3
"""How far from a whole number of units a bias may be: the codes are then those of a sum in another order."""
_FEW = 2_000_000
"""Multiplications for one input that take so little time that exact sums count for more."""
_LARGEST = 1 << 30
"""How many units a bias may be: sums of codes have to fit into 32 bits with it."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """A product of a quantized activation and a quantized weight.

    Attributes:
        node: the product.
        x: the ``DequantizeLinear`` of the activation.
        weight: the ``DequantizeLinear`` of the weight.
        bias: values of the bias, one for each output.
        result: the value that the bias has been added to.
    """

    node: Any
    x: Any
    weight: Any
    bias: np.ndarray[Any, Any]
    result: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(constant_behind(self.weight.inputs[0]).shape)

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the product."""
        return {name: attribute.value for name, attribute in self.node.attributes.items()}

    @property
    def bias_in_units(self) -> np.ndarray[Any, Any]:
        """The bias as integer kernels count it."""
        scale: np.ndarray[Any, Any] = self.weight.inputs[1].const_value.numpy()
        units: np.ndarray[Any, Any] = self.x.inputs[1].const_value.numpy().astype(float) * scale
        quotient: np.ndarray[Any, Any] = self.bias / units
        return quotient

    @property
    def overflows(self) -> bool:
        """Whether the bias is too large for integer kernels."""
        return bool((np.abs(self.bias_in_units) > _LARGEST).any())

    @property
    def rounds_bias(self) -> bool:
        """Whether integer kernels would add another bias."""
        units = self.bias_in_units
        return self.overflows or bool((np.abs(units - np.rint(units)) > _ON_GRID).any())

    @property
    def has_fast_form(self) -> bool:
        """Whether the product with a bias in floating point is quicker than one in floating point alone."""
        if self.node.op_type != "Conv":
            return True
        plain = self.attributes.get("group", 1) == 1 and self.attributes.get("auto_pad", "NOTSET") == "NOTSET"
        channels, *kernel = self.shape[1:]
        return bool(plain and channels >= (_SHORTEST_SLICES[len(kernel)] if max(kernel) > 1 else 16))

    @property
    def is_fast_in_float(self) -> bool:
        """Whether the product takes no longer in floating point than in a kernel that rounds its bias.

        Of convolutions of images that are narrow or have groups: their integer kernels copy more than they multiply.
        """
        outputs, channels, *kernel = self.shape
        if self.node.op_type != "Conv" or len(kernel) < 2 or max(kernel) == 1:
            return False
        return bool(channels < _NARROW_INPUTS or outputs < _NARROW_OUTPUTS or self.attributes.get("group", 1) > 1)

    @property
    def _places(self) -> list[Any]:
        """Along how many places a convolution moves its kernel in each dimension; what is no number is unknown."""
        if self.node.op_type != "Conv":
            return []
        shape = self.node.outputs[0].shape
        return [None] if shape is None else list(shape)[2:]

    @property
    def has_known_size(self) -> bool:
        """Whether ``multiplications`` is how many one input takes."""
        return all(isinstance(size, int) for size in self._places)

    @property
    def multiplications(self) -> int:
        """How many one input takes, for a dimension of unknown length with a length of one."""
        return math.prod(size for size in self._places if isinstance(size, int)) * math.prod(self.shape)


def use_exact_products(graph: Any, which: Literal["all", "quick", "overflowing"]) -> None:
    """Take the biases that integer kernels would round out of their reach.

    Args:
        graph: an ``onnx_ir.Graph``; changed in place.
        which: of all layers with such biases; of those whose exact form is as quick, and of the others, too, where
            they are at most a quarter of the work, or so few that any form takes a fraction of a millisecond; or of
            those only whose bias overflows. Convolutions without a bias that are as quick in floating point are kept
            there in the first two cases.
    """
    layers = _inexact_or_slow_layers(graph)
    if which == "quick":
        slow = [layer for layer in layers if not (layer.has_fast_form or layer.is_fast_in_float)]
        few = _FEW if all(layer.has_known_size for layer in slow) else 0
        most = max(few, sum(layer.multiplications for layer in layers) // 4)
        if sum(layer.multiplications for layer in slow) > most:
            layers = [layer for layer in layers if layer.overflows or layer not in slow]
    elif which == "overflowing":
        layers = [layer for layer in layers if layer.overflows]
    for number, layer in enumerate(layers):
        build = NodeBuilder(graph, layer.node, f"{layer.weight.inputs[0].name}_exact", number)
        if not layer.has_fast_form:
            _keep_float(build, layer)
            continue
        rows = _convolved(build, layer) if layer.node.op_type == "Conv" else _multiplied(build, layer)
        rank = len(layer.shape)
        bias = build.initializer(torch.from_numpy(-layer.bias), "negative_bias", shared=False)
        result = build("Sub", [rows, bias])
        if layer.node.op_type == "Conv":
            result = build("Transpose", [result], {"perm": [0, rank - 1, *range(1, rank - 1)]})
        replace_value(layer.result, result)
    drop_unread_nodes(graph)
    drop_unread_initializers(graph)


def _inexact_or_slow_layers(graph: Any) -> list[_Layer]:
    """Layers whose biases integer kernels would round, and convolutions that these would slow down."""
    found = (_layer(node) for node in graph if node.op_type in ("Gemm", "MatMul", "Conv"))
    layers = [layer for layer in found if layer is not None]
    return [layer for layer in layers if layer.rounds_bias or (layer.is_fast_in_float and not layer.has_fast_form)]


def _layer(node: Any) -> _Layer | None:
    """A product that ONNX Runtime would run in an integer kernel with its bias; None for others."""
    x, weight = quantized_by(node.inputs[0]), quantized_by(node.inputs[1])
    if x is None or weight is None or x.inputs[0].const_value is not None:
        return None
    if constant_behind(weight.inputs[0]) is None or not fits_integer_kernel(weight, node):
        return None
    bias, result = node.inputs[2] if len(node.inputs) > 2 else None, node.outputs[0]
    if node.op_type == "MatMul":
        bias, result = _added(node)
    elif node.op_type == "Gemm" and not _is_plain(node):
        return None
    if bias is None and node.op_type == "Conv":
        return _Layer(node, x, weight, np.zeros(len(constant_behind(weight.inputs[0]).numpy()), np.float32), result)
    if bias is None or bias.const_value is None:
        return None
    values: np.ndarray[Any, Any] = bias.const_value.numpy()
    is_vector = values.size == (values.shape[-1] if values.ndim else 1)
    return _Layer(node, x, weight, values.reshape(-1), result) if is_vector else None


def _is_plain(gemm: Any) -> bool:
    values = {name: attribute.value for name, attribute in gemm.attributes.items()}
    return values.get("alpha", 1.0) == 1.0 and values.get("beta", 1.0) == 1.0 and not values.get("transA", 0)


def _added(product: Any) -> tuple[Any, Any]:
    """The constant vector that is added to a product right behind it, and the sum."""
    readers = [use.node for use in product.outputs[0].uses()]
    if len(readers) != 1 or readers[0].op_type != "Add":
        return None, None
    (other,) = [value for value in readers[0].inputs if value is not product.outputs[0]] or [None]
    is_vector = other is not None and other.const_value is not None and len(other.const_value.shape) == 1
    return (other, readers[0].outputs[0]) if is_vector else (None, None)


def _multiplied(build: NodeBuilder, layer: _Layer) -> Any:
    if layer.node.op_type == "MatMul":
        return layer.node.outputs[0]
    weight = layer.node.inputs[1]
    if layer.attributes.get("transB", 0):
        weight = _dequantized_matrix(build, layer)
    return build("MatMul", [layer.node.inputs[0], weight], like=layer.node.outputs[0])


def _dequantized_matrix(build: NodeBuilder, layer: _Layer) -> Any:
    """The weight as a matrix (inputs, outputs), the channels of a place in a kernel beside each other."""
    codes, order, outputs = layer.weight.inputs[0], [*range(2, len(layer.shape)), 1, 0], layer.shape[0]
    if codes.const_value is None:  # ONNX Runtime computes them, and these too
        shape = build.initializer(torch.tensor([-1, outputs]), "matrix_shape")
        stored = build("Reshape", [build("Transpose", [codes], {"perm": order}), shape])
    else:
        matrix = np.ascontiguousarray(codes.const_value.numpy().transpose(order).reshape(-1, outputs))
        stored = build.initializer(torch.from_numpy(matrix), "matrix")
    axis = {"axis": 1} if len(layer.weight.inputs[1].shape) else {}
    return build("DequantizeLinear", [stored, *layer.weight.inputs[1:]], axis)


def _convolved(build: NodeBuilder, layer: _Layer) -> Any:
    """The product over patches, channels last."""
    rank = len(layer.shape) - 2
    axes = list(range(1, rank + 1))
    codes = build("Transpose", [layer.x.inputs[0]], {"perm": [0, *(axis + 1 for axis in axes), 1]})
    codes = _patches(build, layer, _padded(build, layer, codes, rank), axes)
    x = build("DequantizeLinear", [codes, *layer.x.inputs[1:]])
    return build("MatMul", [x, _dequantized_matrix(build, layer)])


def _padded(build: NodeBuilder, layer: _Layer, codes: Any, rank: int) -> Any:
    pads = layer.attributes.get("pads", [0] * (2 * rank))
    if not any(pads):
        return codes
    widths = build.initializer(torch.tensor([0, *pads[:rank], 0, 0, *pads[rank:], 0]), "pads", shared=False)
    return build("Pad", [codes, widths, layer.x.inputs[2]])


def _patches(build: NodeBuilder, layer: _Layer, codes: Any, axes: Sequence[int]) -> Any:
    """What the kernel sees at each place, one position of it after the other."""
    kernel = layer.shape[2:]
    strides = layer.attributes.get("strides", [1] * len(axes))
    dilations = layer.attributes.get("dilations", [1] * len(axes))

    def numbers(values: Sequence[int], name: str) -> Any:
        return build.initializer(torch.tensor(values), name, shared=False)

    parts = []
    for position in np.ndindex(*kernel):
        starts = [place * dilation for place, dilation in zip(position, dilations, strict=True)]
        behind = [(size - 1) * step - start for size, step, start in zip(kernel, dilations, starts, strict=True)]
        ends = [-rest if rest else _END for rest in behind]
        label = "_".join(map(str, position))
        limits = [numbers(starts, f"starts_{label}"), numbers(ends, f"ends_{label}")]
        parts.append(build("Slice", [codes, *limits, numbers(axes, "axes"), numbers(strides, "strides")]))
    if len(parts) == 1:
        return parts[0] if any(stride > 1 for stride in strides) else codes
    return build("Concat", parts, {"axis": len(axes) + 1})


def _keep_float(build: NodeBuilder, layer: _Layer) -> None:
    """Multiply in floating point, with a weight that ONNX Runtime can dequantize once and for all.

    Being none of codes, it is kept from the integer kernels (``keep_misfits_apart``).
    """
    codes, scale, *points = layer.weight.inputs
    shape = [-1] + [1] * (len(layer.shape) - 1)
    weight = build("Cast", [codes], {"to": 1})
    if points and points[0] is not None:
        zeros = points[0].const_value.numpy().astype(np.float32).reshape(shape)
        weight = build("Sub", [weight, build.initializer(torch.from_numpy(zeros), "float_zero_point")])
    factors = scale.const_value.numpy().reshape(shape)
    weight = build("Mul", [weight, build.initializer(torch.from_numpy(factors), "float_scale")])
    layer.node.replace_input_with(1, weight)
