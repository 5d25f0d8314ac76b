"""Compressed weights as ONNX nodes that compute the dense weight from packed initializers."""

from __future__ import annotations

from typing import Any

import torch

from bitwright.artifact import CompressedTensor, DenseTensor, PalettizedTensor, QuantizedTensor, quantized_tensor
from bitwright.formats import decode, encode, format_of

from .builder import NodeBuilder, onnx_type

__all__ = ["build_weight", "container_bits", "permuted", "weight_opset"]

_INT64 = 7
_FP4 = "float4_e2m1fn_x2"


def container_bits(tensor: QuantizedTensor) -> int:
    """Return 4 or 8: the width of the ONNX integer type that holds the codes."""
    return 4 if tensor.layout.number_format.bits <= 4 else 8


def weight_opset(tensor: CompressedTensor[Any]) -> int:
    """Return the smallest opset whose operators hold a weight."""
    if isinstance(tensor, PalettizedTensor):
        return 21 if tensor.layout.entries + tensor.is_sparse <= 16 else 18
    if not isinstance(tensor, QuantizedTensor):
        return 18
    layout = tensor.layout
    if container_bits(tensor) == 4 or len(_blocked_axes(tensor)) > 1 or _block_length(tensor) > 1:
        return 21
    return 19 if layout.number_format.kind == "float" else 18


def permuted(tensor: QuantizedTensor, order: tuple[int, ...]) -> QuantizedTensor:
    """Return a quantized tensor with its dimensions in another order.

    Entries that a mask drops get the code that stands for zero, and the mask is left out; so sparse tensors must be in
    the ``zp`` formulation or of a float format.
    """
    layout, codes, mask, points = tensor.layout, tensor.codes(), tensor.mask(), tensor.zero_point()
    if mask is not None and points is not None:
        codes = torch.where(mask, codes, _repeated(points, tensor, keep=None).to(codes.dtype))

    def moved(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return None if parameter is None else parameter.permute(order).contiguous()

    scale = moved(tensor.scale())
    assert scale is not None
    return quantized_tensor(
        codes.permute(order).contiguous(),
        scale,
        moved(points),
        moved(tensor.minval()),
        block_size=tuple(layout.block_size[dim] for dim in order),
        grid=layout.grid,
        dtype=tensor.dtype,
        power_of_two=layout.scale_dtype == "float8_e8m0fnu",
    )


def build_weight(build: NodeBuilder, tensor: CompressedTensor[Any]) -> Any:
    """Add nodes that compute a weight; return the value of it.

    Quantized weights become ``DequantizeLinear`` on INT4, UINT4, INT8, UINT8 or FP8 initializers, per tensor, per
    channel or blocked along one axis; scales of blocks in further dimensions are repeated. Palettes, and FP4, become
    ``Gather`` from a table. Kept entries of sparse weights are stored in their places, for ONNX Runtime has no sparse
    initializers.
    """
    if isinstance(tensor, PalettizedTensor):
        return _palettized(build, tensor)
    if isinstance(tensor, DenseTensor):
        return build.initializer(tensor.decode(), "dense")
    assert isinstance(tensor, QuantizedTensor)
    if tensor.layout.format == _FP4:
        return _fp4(build, tensor)
    return _quantized(build, tensor)


def _blocked_axes(tensor: QuantizedTensor) -> list[int]:
    """Dimensions along which there is more than one block."""
    return [dim for dim, count in enumerate(tensor.layout.counts) if count > 1]


def _block_length(tensor: QuantizedTensor) -> int:
    """Length of a block along the only blocked dimension."""
    axes = _blocked_axes(tensor)
    return tensor.layout.block_size[axes[0]] if len(axes) == 1 else 1


def _quantized(build: NodeBuilder, tensor: QuantizedTensor) -> Any:
    fmt, minval, mask = tensor.layout.number_format, tensor.minval(), tensor.mask()
    if mask is not None and minval is not None:
        return build.initializer(tensor.decode(), "dense")
    narrow = f"{'' if fmt.signed else 'u'}int4" if fmt.kind == "int" and container_bits(tensor) == 4 else None
    codes, offset = tensor.codes(), tensor.zero_point()
    if minval is not None:
        offset = torch.full(tensor.layout.counts, int(tensor.layout.quant_min), dtype=torch.int32)
    elif mask is not None and offset is not None:
        codes = torch.where(mask, codes, _repeated(offset, tensor, keep=None).to(codes.dtype))
    axes = _blocked_axes(tensor)
    blocked = len(axes) > 1 or _block_length(tensor) > 1
    axis = max(range(len(tensor.shape)), key=lambda dim: tensor.layout.block_size[dim]) if len(axes) > 1 else None
    axis = axes[0] if len(axes) == 1 else axis
    scale = _arranged(tensor.scale(), tensor, axis, blocked)
    inputs = [build.initializer(codes, "quantized", narrow), build.initializer(scale, "scale")]
    if offset is not None:
        points = _arranged(offset, tensor, axis, blocked).to(fmt.storage)
        inputs.append(build.initializer(points, "zero_point", narrow))
    attributes: dict[str, int] = {} if axis is None else {"axis": axis}
    if blocked and axis is not None:
        attributes["block_size"] = tensor.layout.block_size[axis]
    value = build("DequantizeLinear", inputs, attributes)
    if minval is not None:
        value = _add_by_block(build, value, minval, tensor)
    return _in_dtype(build, value, tensor.dtype)


def _arranged(parameter: torch.Tensor, tensor: QuantizedTensor, axis: int | None, blocked: bool) -> torch.Tensor:
    """A parameter of every block in the shape that ``DequantizeLinear`` takes."""
    if axis is None:
        return parameter.reshape(())
    if not blocked:
        return parameter.reshape(-1)
    return _repeated(parameter, tensor, keep=axis)


def _repeated(parameter: torch.Tensor, tensor: QuantizedTensor, keep: int | None) -> torch.Tensor:
    """A parameter of every block, repeated for every element along all dimensions but ``keep``."""
    for dim, size in enumerate(tensor.layout.block_size):
        if dim != keep and size > 1:
            parameter = parameter.repeat_interleave(size, dim)
    return parameter


def _add_by_block(build: NodeBuilder, value: Any, minval: torch.Tensor, tensor: QuantizedTensor) -> Any:
    """Add the minval of its block to every element."""
    layout = tensor.layout
    if len(_blocked_axes(tensor)) <= 1 and _block_length(tensor) == 1:
        return build("Add", [value, build.initializer(minval, "minval")])
    split = [n for count, size in zip(layout.counts, layout.block_size, strict=True) for n in (count, size)]
    origin = minval.reshape([n for count in layout.counts for n in (count, 1)])
    value = build("Reshape", [value, build.initializer(torch.tensor(split), "blocks")])
    value = build("Add", [value, build.initializer(origin, "minval")])
    return build("Reshape", [value, build.initializer(torch.tensor(tensor.shape), "shape")])


def _fp4(build: NodeBuilder, tensor: QuantizedTensor) -> Any:
    """FP4 codes as indices into the sixteen values, times the scale of their block."""
    layout, fmt = tensor.layout, format_of(_FP4)
    codes = encode(tensor.codes(), fmt)
    table = build.initializer(_fp4_values(), "fp4_values")
    indices = build("Cast", [build.initializer(codes, "quantized", "uint4")], {"to": _INT64})
    value = build("Gather", [table, indices])
    if all(count == 1 for count in layout.counts):
        scale = tensor.scale().reshape(())
        return _in_dtype(build, build("Mul", [value, build.initializer(scale, "scale")]), tensor.dtype)
    split = [n for count, size in zip(layout.counts, layout.block_size, strict=True) for n in (count, size)]
    scale = tensor.scale().reshape([n for count in layout.counts for n in (count, 1)])
    value = build("Reshape", [value, build.initializer(torch.tensor(split), "blocks")])
    value = build("Mul", [value, build.initializer(scale, "scale")])
    value = build("Reshape", [value, build.initializer(torch.tensor(tensor.shape), "shape")])
    return _in_dtype(build, value, tensor.dtype)


def _fp4_values() -> torch.Tensor:
    return decode(torch.arange(16, dtype=torch.uint8), _FP4)


def _palettized(build: NodeBuilder, tensor: PalettizedTensor) -> Any:
    """Indices of all groups, made indices into one long table."""
    layout = tensor.layout
    lut, indices, entries = tensor.lut.decode(), tensor.indices(), layout.entries
    mask = tensor.mask()
    if mask is not None:
        if entries == 256:
            return build.initializer(tensor.decode(), "dense")
        lut = torch.cat([lut, torch.zeros_like(lut[..., :1, :])], -2)  # dropped entries look up a zero
        indices = torch.where(mask, indices, torch.full_like(indices, entries))
        entries += 1
    table = lut.reshape(-1, layout.vector_size)
    stored = build.initializer(indices, "indices", "uint4" if entries <= 16 else None)
    indices = build("Cast", [stored], {"to": _INT64})
    offsets = _group_offsets(tensor, entries)
    if offsets is not None:
        indices = build("Add", [indices, build.initializer(offsets, "table_starts")])
    if layout.vector_size == 1:
        table = table.reshape(-1)
    value = build("Gather", [build.initializer(table, "lut"), indices])
    if layout.vector_size > 1:
        rank, axis = len(layout.index_shape), layout.vector_axis
        order = [*range(axis + 1), rank, *range(axis + 1, rank)]
        value = build("Transpose", [value], {"perm": order})
        value = build("Reshape", [value, build.initializer(torch.tensor(layout.shape), "shape")])
    factors = tensor.channel_scale()
    if factors is not None:
        value = build("Mul", [value, build.initializer(factors, "channel_scale")])
    return value


def _group_offsets(tensor: PalettizedTensor, entries: int) -> torch.Tensor | None:
    """Where the table of every index begins, broadcastable to the indices; None if there is but one table."""
    layout = tensor.layout
    if all(count == 1 for count in layout.groups):
        return None
    number = torch.zeros([1] * len(layout.index_shape), dtype=torch.long)
    for dim, (size, count) in enumerate(zip(layout.index_shape, layout.groups, strict=True)):
        if count > 1:
            along = torch.arange(size) // (size // count)
            number = number * count + along.view([-1 if d == dim else 1 for d in range(len(layout.index_shape))])
    return number * entries


def _in_dtype(build: NodeBuilder, value: Any, dtype: torch.dtype) -> Any:
    return value if dtype == torch.float32 else build("Cast", [value], {"to": onnx_type(dtype)})
