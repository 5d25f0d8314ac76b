"""Numbers to compressed tensors: pack codes, choose how scales are stored, drop what a mask drops."""

from __future__ import annotations

from typing import cast

import torch

from bitwright.formats import NumberFormat, e8m0_codes, e8m0_values, encode, format_of, pack
from bitwright.kernels import Grid, block_counts

from .errors import ArtifactError
from .layouts import DenseLayout, FloatName, PalettizedLayout, QuantizedLayout, ScaleName, dtype_name
from .tensors import DenseTensor, PalettizedTensor, QuantizedTensor

__all__ = ["check_storable", "dense_tensor", "palettized_tensor", "quantized_tensor"]


def dense_tensor(values: torch.Tensor, mask: torch.Tensor | None = None) -> DenseTensor:
    """Store values as they are; with a mask, only the entries that it keeps, if that is smaller.

    Args:
        values: tensor of any storable dtype; zero wherever the mask drops.
        mask: bool tensor of the same shape, True where an entry is kept.
    """
    dense = DenseTensor.from_tensor(values)
    if mask is None:
        return dense
    layout = DenseLayout(shape=tuple(values.shape), dtype=dense.layout.dtype, kept=int(mask.sum()))
    if layout.nbytes >= dense.nbytes:
        return dense
    return DenseTensor(layout, {"values": values.detach()[mask], "mask": pack(mask.to(torch.uint8), 1)})


def check_storable(fmt: NumberFormat) -> None:
    """Refuse formats that are simulated only.

    Raises:
        ArtifactError: its codes have more than eight bits.
    """
    if fmt.bits > 8:
        raise ArtifactError(f"Codes of {fmt.name} are simulated only. Formats of at most 8 bits can be exported.")


def quantized_tensor(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    dtype: torch.dtype,
    power_of_two: bool = False,
    zero_point_per_block: bool = False,
    mask: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Pack codes and their parameters.

    Scales and minvals are stored in ``dtype`` where that holds them exactly, else in float32, or as exponents when
    they are powers of two. One zero point for all blocks is kept in the layout; others take the bits of a code each.

    Args:
        codes: one code (integers) or value (float formats) per element, in any dtype that holds it.
        scale: one entry per block, float32 or convertible.
        zero_point: like ``scale``; None for 0.
        minval: like ``scale``; for the ``"minval"`` formulation.
        block_size: shape of one block.
        grid: the codes.
        dtype: floating-point dtype of the decoded tensor.
        power_of_two: store scales as ``float8_e8m0fnu``.
        zero_point_per_block: store a zero point for each block even if they happen to be equal.
        mask: bool tensor of the shape of ``codes``; entries that it drops decode to zero. It is used if that is
            smaller, or if not all dropped entries have a code that stands for zero, and ignored otherwise.

    Raises:
        ArtifactError: a scale or a code that the layout cannot hold.
    """
    fmt = format_of(grid.dtype)
    check_storable(fmt)
    counts = block_counts(tuple(codes.shape), block_size)
    scale = scale.detach().float().expand(counts) if scale.numel() == 1 else scale.detach().float().reshape(counts)
    uses_minval = grid.is_integer and grid.formulation == "minval"
    uses_zero_point = grid.is_integer and not uses_minval
    points = _whole(zero_point, counts, codes.device) if uses_zero_point else None
    minval = minval.detach().float().reshape(counts) if uses_minval and minval is not None else None
    stored = "float8_e8m0fnu" if power_of_two else _scale_dtype(dtype, scale, minval)
    uniform = None if zero_point_per_block else _uniform(points)

    def layout(kept: int | None) -> QuantizedLayout:
        return QuantizedLayout(
            shape=tuple(codes.shape), dtype=cast(FloatName, dtype_name(dtype)), format=fmt.name,
            quant_min=grid.quant_min, quant_max=grid.quant_max,
            formulation="minval" if grid.formulation == "minval" else "zp",
            block_size=block_size, scale_dtype=cast(ScaleName, stored), zero_point=uniform, kept=kept,
        )  # fmt: skip

    parameters = {"scale": _stored_scale(scale, stored)}
    if points is not None and uniform is None:
        parameters["zero_point"] = pack(points, fmt.bits)
    if minval is not None:
        parameters["minval"] = minval.to(parameters["scale"].dtype).contiguous()

    def form(mask: torch.Tensor | None) -> QuantizedTensor:
        parts = {"codes": _packed_codes(codes if mask is None else codes[mask], grid), **parameters}
        if mask is None:
            return QuantizedTensor(layout(None), parts)
        return QuantizedTensor(layout(int(mask.sum())), {**parts, "mask": pack(mask.to(torch.uint8), 1)})

    if mask is not None and layout(int(mask.sum())).nbytes < layout(None).nbytes:
        return form(mask)
    whole = form(None)
    return whole if mask is None or not whole.decode()[~mask].any() else form(mask)


def palettized_tensor(
    indices: torch.Tensor,
    lut: DenseTensor | QuantizedTensor,
    *,
    n_bits: int,
    vector_axis: int = 0,
    channel_scale: torch.Tensor | None = None,
    channel_axis: int = 0,
    mask: torch.Tensor | None = None,
    mask_needed: bool = False,
) -> PalettizedTensor:
    """Pack indices into look-up tables.

    Args:
        indices: integers below the number of table entries.
        lut: the tables, shape ``(*groups, entries, vector_size)`` with one group count per dimension of ``indices``.
        n_bits: bits of an index.
        vector_axis: the dimension that vectors run along.
        channel_scale: one factor for each index of ``channel_axis``, of the tables' dtype.
        channel_axis: the dimension of channels.
        mask: bool tensor of the decoded shape; as in ``quantized_tensor``. Not for vectors.
        mask_needed: use the mask even if that is larger, because no table entry stands for zero.
    """
    vector_size = lut.shape[-1]
    shape = list(indices.shape)
    if vector_size > 1:
        shape[vector_axis] *= vector_size

    def layout(kept: int | None) -> PalettizedLayout:
        return PalettizedLayout(
            shape=tuple(shape), n_bits=n_bits, vector_size=vector_size, vector_axis=vector_axis,
            groups=lut.shape[:-2], lut=lut.layout, kept=kept,
            channel_axis=None if channel_scale is None else channel_axis,
        )  # fmt: skip

    chosen = layout(None)
    usable = mask is not None and vector_size == 1 and not mask.all()
    if mask is not None and usable and ((sparse := layout(int(mask.sum()))).nbytes < chosen.nbytes or mask_needed):
        chosen = sparse
    else:
        mask = None
    kept = (indices if mask is None else indices[mask]).to(torch.uint8)
    parts = {"indices": kept.contiguous() if n_bits == 8 else pack(kept, n_bits)}
    parts |= {f"lut.{name}": part for name, part in lut.parts.items()}
    if channel_scale is not None:
        parts["channel_scale"] = channel_scale.detach().to(lut.dtype).reshape(-1).contiguous()
    if mask is not None:
        parts["mask"] = pack(mask.to(torch.uint8), 1)
    return PalettizedTensor(chosen, parts)


def _whole(zero_point: torch.Tensor | None, counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    if zero_point is None:
        return torch.zeros(counts, dtype=torch.int32, device=device)
    points = zero_point.detach().to(torch.int32)
    return points.expand(counts) if points.numel() == 1 else points.reshape(counts)


def _uniform(points: torch.Tensor | None) -> int | None:
    """The zero point that all blocks share, if they do."""
    if points is None:
        return None
    if points.numel() == 0:
        return 0
    first = int(points.reshape(-1)[0])
    return first if bool((points == first).all()) else None


def _scale_dtype(dtype: torch.dtype, *values: torch.Tensor | None) -> str:
    if dtype in (torch.float16, torch.bfloat16) and all(
        v is None or torch.equal(v.to(dtype).float(), v) for v in values
    ):
        return dtype_name(dtype)
    return "float32"


def _stored_scale(scale: torch.Tensor, stored: str) -> torch.Tensor:
    if stored != "float8_e8m0fnu":
        return scale.to(getattr(torch, stored)).contiguous()
    codes = e8m0_codes(scale)
    if not torch.equal(e8m0_values(codes), scale):
        raise ArtifactError("A scale is no power of two, so it cannot be stored as float8_e8m0fnu.")
    return codes.contiguous()


def _packed_codes(codes: torch.Tensor, grid: Grid) -> torch.Tensor:
    fmt = format_of(grid.dtype)
    if fmt.kind == "int":
        whole = codes.to(fmt.storage)
        return whole.contiguous() if fmt.bits == 8 else pack(whole, fmt.bits)
    if fmt.bits == 8:
        return codes.to(fmt.storage).contiguous()
    return pack(encode(codes, fmt), fmt.bits)
