"""Weights as int8 codes under a dequantize op, or dense."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from bitwright.artifact import CompressedTensor, QuantizedTensor

__all__ = ["dense_weight", "fits_int8", "int8_weight", "stays_int8"]

_LOW, _HIGH = -128, 127
_SIGNED = tuple(f"int{bits}" for bits in range(2, 9))


def stays_int8(tensor: CompressedTensor[Any]) -> TypeGuard[QuantizedTensor]:
    """Whether a weight is written as codes of a byte, which takes a model in float32."""
    return fits_int8(tensor) and tensor.dtype == torch.float32


def fits_int8(tensor: CompressedTensor[Any]) -> bool:
    """Whether a weight has codes of a byte in XNNPACK: symmetric signed integers, one scale, or one for each channel.

    Fewer than 8 bits only in matrices: XNNPACK convolves floats with dense weights, but not with codes.
    """
    if not isinstance(tensor, QuantizedTensor) or tensor.is_sparse:
        return False
    layout = tensor.layout
    axes = [dim for dim, count in enumerate(layout.counts) if count > 1]
    by_channel = len(axes) <= 1 and all(layout.block_size[dim] == 1 for dim in axes)
    formats = _SIGNED if len(tensor.shape) == 2 else ("int8",)
    return layout.format in formats and layout.formulation == "zp" and by_channel and layout.zero_point == 0


def int8_weight(name: str, tensor: CompressedTensor[Any]) -> nn.Module:
    """Return the stand-in of a weight: codes of a byte where :func:`stays_int8`, else dense."""
    if not stays_int8(tensor):
        return _Dense(tensor)
    axes = [dim for dim, count in enumerate(tensor.layout.counts) if count > 1]
    return _Weight(tensor, axes[0] if axes else None)


def dense_weight(name: str, tensor: CompressedTensor[Any]) -> nn.Module:
    """Return the stand-in of a weight with its decoded values."""
    return _Dense(tensor)


class _Weight(nn.Module):
    """Codes under ``dequantize_per_tensor`` or ``dequantize_per_channel``."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(self, tensor: QuantizedTensor, axis: int | None) -> None:
        super().__init__()
        zero_point = tensor.zero_point()
        assert zero_point is not None
        scale = tensor.scale().reshape(-1)
        if axis is None and len(tensor.shape) == 2:
            # XNNPACK multiplies dynamic activations with weights per channel only.
            axis, scale, zero_point = 0, scale.expand(tensor.shape[0]), zero_point.expand(tensor.shape[0], 1)
        self.axis = axis
        self.register_buffer("codes", tensor.codes())
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("zero_point", zero_point.reshape(-1).long())
        self.single = (float(self.scale[0]), int(self.zero_point[0]))

    def forward(self, _: torch.Tensor | None = None) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        if self.axis is None:
            weight: torch.Tensor = ops.dequantize_per_tensor(self.codes, *self.single, _LOW, _HIGH, torch.int8)
        else:
            weight = ops.dequantize_per_channel(
                self.codes, self.scale, self.zero_point, self.axis, _LOW, _HIGH, torch.int8
            )
        return weight


class _Dense(nn.Module):
    """A weight with its decoded values."""

    weight: torch.Tensor

    def __init__(self, tensor: CompressedTensor[Any]) -> None:
        super().__init__()
        self.register_buffer("weight", tensor.decode().contiguous())

    def forward(self, _: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight
