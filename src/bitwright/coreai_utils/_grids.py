"""Scales, zero points and codes of weights in the number formats of Core AI."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bitwright.formats import format_of
from bitwright.kernels import Grid, choose_qparams, min_max, quantize

from ._ir import ELEMENT_TYPES, FLOAT_TYPES, FORMATS, Builder
from .common import DType, QScheme


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor.

    Attributes:
        codes: whole numbers, or values that the float format represents; float32, the shape of the tensor.
        scale: float32, one entry per block, each of which ``scale_type`` holds.
        zero_point: float32, the shape of ``scale``.
        dtype: format of the codes.
        scale_type: MLIR element type of the scale.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    dtype: DType
    scale_type: str


def quantize_tensor(
    values: torch.Tensor,
    block_size: tuple[int, ...],
    dtype: DType,
    element_type: str,
    qscheme: QScheme = QScheme.SYMMETRIC,
    scale_dtype: DType | None = None,
) -> Quantized:
    """Quantize a tensor by blocks.

    Symmetric ranges leave the lowest (signed) or highest (unsigned) code out, so that zero lies in the middle. The
    runtime wants scales in the element type of the weight. They are rounded to it, upwards so that no value is
    clipped, before values are divided by them; so are powers of two, which follow the floor rule of the OCP
    Microscaling formats specification 1.0, section 6.3.

    Args:
        values: float32 tensor.
        block_size: shape of a block; divides the shape of ``values``.
        dtype: format of the codes.
        element_type: MLIR element type of the weight.
        qscheme: integers only.
        scale_dtype: ``DType.FP8_E8M0FNU`` or None; float formats only.
    """
    grid = _grid(dtype, qscheme)
    scheme = "asymmetric" if qscheme is QScheme.ASYMMETRIC else "symmetric"
    low, high = min_max(values, block_size)
    if scale_dtype is not None:
        scale, zero_point, _ = choose_qparams(low, high, grid=grid, scheme=scheme, scale_dtype=torch.float8_e8m0fnu)
    else:
        # Scales have a smallest value, made for blocks of ordinary size; a power of two moves any block there exactly.
        unit = torch.exp2(torch.frexp(torch.maximum(-low, high)).exponent.clamp(max=127).float())
        scale, zero_point, _ = choose_qparams(low / unit, high / unit, grid=grid, scheme=scheme)
        scale = _rounded_up(scale * unit, FLOAT_TYPES[element_type])
    codes = quantize(values, scale, zero_point, None, block_size=block_size, grid=grid)
    offset = torch.zeros_like(scale) if zero_point is None else zero_point.float()
    return Quantized(codes, scale, offset, dtype, element_type if scale_dtype is None else ELEMENT_TYPES[scale_dtype])


def _rounded_up(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the smallest values of ``dtype`` that are at least ``scale``, as float32."""
    nearest = scale.to(dtype)
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    return torch.where(nearest.float() < scale, above, nearest).float()


def emit_scaled(builder: Builder, quantized: Quantized, data: object, element_type: str) -> object:
    """Write ``scale * (data - zero_point)`` in ``element_type`` for codes that ``data`` holds already."""
    return builder.shift_scale(
        data,
        builder.constant(quantized.scale, quantized.scale_type),
        builder.constant(quantized.zero_point, ELEMENT_TYPES[quantized.dtype]),
        builder.constant(torch.zeros_like(quantized.scale), element_type),
    )


def emit_quantized(builder: Builder, quantized: Quantized, element_type: str) -> object:
    """Write a quantized tensor, decoded to ``element_type``."""
    data = builder.constant(quantized.codes, ELEMENT_TYPES[quantized.dtype])
    return emit_scaled(builder, quantized, data, element_type)


def _grid(dtype: DType, qscheme: QScheme) -> Grid:
    fmt = format_of(FORMATS[ELEMENT_TYPES[dtype]])
    low, high = fmt.minimum, fmt.maximum
    if fmt.kind == "int" and qscheme is QScheme.SYMMETRIC:
        low, high = (low + 1, high) if fmt.signed else (low, high - 1)
    return Grid(fmt.dtype, low, high)
