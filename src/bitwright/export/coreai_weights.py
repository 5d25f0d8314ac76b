"""Compressed weights as modules of Core AI's torch ops."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from bitwright.artifact import CompressedTensor, DenseTensor, PalettizedLayout, PalettizedTensor, QuantizedTensor
from bitwright.formats import encode, format_of

from .extras import require

__all__ = [
    "FP4_BLOCK",
    "CallsCoreAI",
    "container_of",
    "coreai_layers",
    "coreai_weight",
    "dense_weight",
    "quantized_operands",
    "unsupported_weight",
]

FP4_BLOCK = 32

_FP4 = "float4_e2m1fn_x2"
# Core AI's converter lacks 3 bits, although its ops know them.
_PALETTE_BITS = (1, 2, 4, 6, 8)
# The runtime decodes power-of-two scales through float16, and makes NaN of those that it does not hold.
_SCALE_EXPONENTS = (-24, 15)
_E8M0_BIAS = 127


def coreai_layers() -> Any:
    """Return the module with Core AI's compression ops and layers; importing it registers the ops.

    Raises:
        MissingExtraError: coreai-torch is not installed.
    """
    return require("coreai_torch._compression.custom_layers", "coreai", "Export to Core AI")


def container_of(dtype: torch.dtype) -> torch.dtype:
    """Return the integer type of 2, 4 or 8 bits in which Core AI holds the codes of an integer format.

    Codes of 1, 3, 5, 6 and 7 bits go into the next larger type, which changes nothing but their size.
    """
    fmt = format_of(dtype)
    bits = next(width for width in (2, 4, 8) if width >= fmt.bits)
    container: torch.dtype = getattr(torch, f"{'' if fmt.signed else 'u'}int{bits}")
    return container


def unsupported_weight(tensor: CompressedTensor[Any]) -> str | None:
    """Return why Core AI cannot hold a weight, or None if it can."""
    if tensor.dtype == torch.float64:
        return "Core AI has no float64; convert the model to float32 first"
    if not isinstance(tensor, QuantizedTensor) or tensor.layout.format != _FP4:
        return None
    blocks, rank = tuple(tensor.layout.block_size), len(tensor.layout.shape)
    needed = (*[1] * (rank - 1), FP4_BLOCK)
    if blocks != needed:
        return (
            f"FP4 quantization requires PerBlockGranularity with blocks of {FP4_BLOCK} along the last axis here. FP4 "
            f"export requires per-axis block sizes {needed} for a {rank}D weight, not {blocks}; use "
            f"PerBlockGranularity(axis=-1, block_size={FP4_BLOCK})"
        )
    if tensor.layout.scale_dtype != "float8_e8m0fnu":
        return "Core AI holds FP4 weights with power-of-two scales (scale_dtype float8_e8m0fnu)"
    if not _fits(_power_of_two_scale(tensor)):
        low, high = _SCALE_EXPONENTS
        return (
            f"its runtime decodes scales of FP4 weights from 2**{low} to 2**{high}, and this weight has others. "
            "Multiply it by a power of two in the float model, and divide what it computes"
        )
    return None


def dense_weight(tensor: CompressedTensor[Any]) -> str | None:
    """Return why the kept entries of a pruned weight are stored as floats, or None if they are not."""
    if isinstance(tensor, QuantizedTensor) and tensor.is_sparse and tensor.minval() is not None:
        return "a mask with the 'minval' formulation"
    if isinstance(tensor, PalettizedTensor) and tensor.is_sparse and not _has_one_table(tensor.layout):
        full = tensor.layout.entries == 1 << _PALETTE_BITS[-1]
        return "a mask beside tables of 256 values, which leave none for zero" if full else None
    return None


def coreai_weight(tensor: CompressedTensor[Any]) -> nn.Module:
    """Return a parametrization that computes a weight from its packed form by Core AI's ops.

    Raises:
        MissingExtraError: coreai-torch is not installed.
    """
    layers = coreai_layers()
    if isinstance(tensor, QuantizedTensor):
        return _quantized(tensor, layers)
    if isinstance(tensor, PalettizedTensor):
        return _palettized(tensor, layers)
    assert isinstance(tensor, DenseTensor)
    return _sparse(tensor.decode(), tensor.mask(), layers)


def quantized_operands(tensor: QuantizedTensor) -> dict[str, Any]:
    """Return the operands of ``coreai.constexpr_blockwise_shift_scale`` by name, ``input`` first.

    The op counts codes of the ``minval`` formulation from the lowest code of its integer type, not from ``quant_min``;
    so the codes are shifted by the difference.
    """
    layout, codes = tensor.layout, tensor.codes()
    fmt, dtype = layout.number_format, tensor.dtype
    exact = _exact_dtype(tensor)
    if fmt.kind == "float":
        data = _packed_fp4(codes) if fmt.name == _FP4 else codes
        if layout.scale_dtype == "float8_e8m0fnu":
            scale = _power_of_two_scale(tensor)
            if _fits(scale):
                return {"input": data, "scale": scale.view(torch.float8_e8m0fnu), "output_dtype": dtype}
        return {"input": data, "scale": tensor.scale().to(exact), "output_dtype": None}
    container = container_of(fmt.dtype)
    minval = tensor.minval()
    operands: dict[str, Any] = {"input": codes, "scale": tensor.scale().to(exact), "input_dtype": container}
    if minval is None:
        zero_point = tensor.zero_point()
        assert zero_point is not None
        operands["zero_point"] = zero_point.to(fmt.storage)
    else:
        shift = int(layout.quant_min) - int(format_of(container).minimum)
        operands["input"] = (codes.to(torch.int16) - shift).to(fmt.storage)
        operands["minval"] = minval.to(exact)
    return operands


def _power_of_two_scale(tensor: QuantizedTensor) -> torch.Tensor:
    """The bytes of e8m0 scales; where one is out of range and all codes of its block are zero, it is 1 instead."""
    scale = tensor.parts["scale"].view(torch.uint8)
    if _fits(scale):
        return scale
    blocks = [size for pair in zip(scale.shape, tensor.layout.block_size, strict=True) for size in pair]
    largest = tensor.codes().float().abs().reshape(blocks).amax(list(range(1, len(blocks), 2)))
    return torch.where(largest == 0, _E8M0_BIAS, scale)


def _fits(scale: torch.Tensor) -> bool:
    """Whether the runtime decodes all of these e8m0 scales."""
    low, high = (_E8M0_BIAS + exponent for exponent in _SCALE_EXPONENTS)
    return bool(((scale >= low) & (scale <= high)).all())


def _exact_dtype(tensor: QuantizedTensor) -> torch.dtype:
    """The dtype in which the op computes what the simulator computed: the weight's, unless that loses bits.

    The simulator multiplies in float32 and rounds once. A product with a half-precision scale rounds once as well, but
    not a product and a sum, nor a product with a scale that half precision does not hold.
    """
    dtype = tensor.dtype
    if dtype == torch.float32 or tensor.minval() is not None:
        return torch.float32
    scale = tensor.scale()
    return dtype if torch.equal(scale.to(dtype).float(), scale) else torch.float32


def _packed_fp4(values: torch.Tensor) -> torch.Tensor:
    """FP4 values as bytes of two codes along the last axis, the first one in the low half."""
    codes = encode(values, _FP4).reshape(*values.shape[:-1], -1, 2)
    return (codes[..., 0] | (codes[..., 1] << 4)).contiguous()


class CallsCoreAI(nn.Module):
    """A module that calls Core AI's ops, and registers them where it is unpickled."""

    def __setstate__(self, state: Any) -> None:
        coreai_layers()
        super().__setstate__(state)  # type: ignore[no-untyped-call]


class _Rounded(nn.Module):
    """A weight that is computed in float32, in the dtype of the model."""

    def __init__(self, weight: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight
        self.dtype = dtype

    def forward(self, placeholder: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.weight(placeholder).to(self.dtype)
        return result


class _SparseQuantized(CallsCoreAI):
    """Codes of the kept entries, spread by a mask, then dequantized; dropped entries have the code 0."""

    def __init__(self, operands: dict[str, Any], mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("nonzero_data", operands["input"][mask])
        self.register_buffer("mask", mask)
        for name in ("scale", "zero_point", "minval"):
            self.register_buffer(name, operands.get(name))
        self.input_dtype = operands.get("input_dtype")
        self.output_dtype = operands.get("output_dtype")

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        codes = torch.ops.coreai.sparse_to_dense(self.nonzero_data, self.mask)
        result: torch.Tensor = torch.ops.coreai.constexpr_blockwise_shift_scale(
            codes,
            self.scale,
            zero_point=self.zero_point,
            minval=self.minval,
            input_dtype=self.input_dtype,
            output_dtype=self.output_dtype,
        )
        return result


class _SparsePalettized(CallsCoreAI):
    """Values of the kept entries from one look-up table, spread by a mask."""

    def __init__(self, indices: torch.Tensor, lut: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("indices", indices)
        self.register_buffer("lut", lut)
        self.register_buffer("mask", mask)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        values = torch.ops.coreai.lut_to_dense(self.indices, self.lut, 0)
        result: torch.Tensor = torch.ops.coreai.sparse_to_dense(values, self.mask)
        return result


@functools.cache
def _parametrization(layer: Any) -> type[nn.Module]:
    """A layer of Core AI's as a parametrization that can be pickled.

    coreai-torch makes a class inside a function, which pickle does not find by name. The layer's own class it does.
    """
    utils = require("coreai_torch._compression.utils", "coreai", "Export to Core AI")
    made: Any = utils.wrap_for_parametrization(layer)
    made.__reduce_ex__ = lambda module, _: (_empty_parametrization, (layer,), module.__getstate__())
    return made  # type: ignore[no-any-return]


def _empty_parametrization(layer: Any) -> nn.Module:
    made = _parametrization(layer)
    return made.__new__(made)


def _wrapped(layer: Any, *args: Any, **kwargs: Any) -> nn.Module:
    return _parametrization(layer)(*args, **kwargs)


def _quantized(tensor: QuantizedTensor, layers: Any) -> nn.Module:
    operands = quantized_operands(tensor)
    mask = tensor.mask()
    if mask is not None:
        zero_point = operands.get("zero_point")
        if tensor.minval() is not None:
            return _sparse(tensor.decode(), mask, layers)
        if (zero_point is None or not bool(zero_point.any())) and tensor.layout.format != _FP4:
            return _rounded(_SparseQuantized(operands, mask), operands, tensor.dtype)
        operands["input"] = _with_zero_codes(tensor, mask)
    if tensor.layout.format == _FP4:
        floats = require("coreai_torch._compression._floatx", "coreai", "Export to Core AI")
        operands["input"] = floats.Float4Tensor(operands["input"])
    module = _wrapped(
        layers.WeightDequantizeModule,
        quantized_data=operands["input"],
        **{name: value for name, value in operands.items() if name != "input"},
    )
    return _rounded(module, operands, tensor.dtype)


def _rounded(module: nn.Module, operands: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    produced = operands.get("output_dtype") or operands["scale"].dtype
    return module if produced == dtype else _Rounded(module, dtype)


def _with_zero_codes(tensor: QuantizedTensor, mask: torch.Tensor) -> torch.Tensor:
    """Codes in which every dropped entry has the code that stands for zero."""
    codes, zero_point = tensor.codes(), tensor.zero_point()
    if zero_point is None:
        return _packed_fp4(codes) if tensor.layout.format == _FP4 else codes
    for dim, block in enumerate(tensor.layout.block_size):
        zero_point = zero_point.repeat_interleave(block, dim)
    return torch.where(mask, codes, zero_point.to(codes.dtype))


def _sparse(dense: torch.Tensor, mask: torch.Tensor | None, layers: Any) -> nn.Module:
    mask = dense != 0 if mask is None else mask
    return _wrapped(layers.SparseModule, nonzero_data=dense[mask], mask=mask)


def _palettized(tensor: PalettizedTensor, layers: Any) -> nn.Module:
    layout, lut, mask = tensor.layout, tensor.lut, tensor.mask()
    if mask is not None:
        if _has_one_table(layout):
            table = _padded(lut.decode(), layout.n_bits).reshape(1, -1, 1)
            return _SparsePalettized(tensor.stored_indices().reshape(-1), table, mask)
        with_zeros = _with_entries_of_zero(tensor, mask)
        if with_zeros is None:
            return _sparse(tensor.decode(), mask, layers)
        return _float_palette(tensor, *with_zeros, layers)
    if isinstance(lut, DenseTensor) or (layout.channel_axis is not None and tensor.dtype != torch.float32):
        # The simulator rounds table entries to half precision before it scales them.
        return _float_palette(tensor, tensor.indices(), lut.decode(), layers)
    return _quantized_palette(tensor, lut, layers)


def _has_one_table(layout: PalettizedLayout) -> bool:
    """Whether all entries select from the same values, without factors."""
    return all(count == 1 for count in layout.groups) and layout.channel_axis is None


def _with_entries_of_zero(tensor: PalettizedTensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Indices and decoded tables in which every dropped entry selects a zero of its table.

    That is an entry which no kept one selects, or another one behind them; None where 256 others are in use.
    """
    layout, indices = tensor.layout, tensor.indices()
    tables = tensor.lut.decode().reshape(-1, layout.entries)
    number = torch.arange(len(tables), device=indices.device).reshape(layout.groups)
    for dim, (size, count) in enumerate(zip(layout.index_shape, layout.groups, strict=True)):
        number = number.repeat_interleave(size // count, dim)
    may_be_zero = torch.ones_like(tables, dtype=torch.bool)
    may_be_zero[number[mask], indices[mask].long()] = False
    may_be_zero |= tables == 0
    if not bool(may_be_zero.any(1).all()):
        if layout.entries == 1 << _PALETTE_BITS[-1]:
            return None
        tables, may_be_zero = nn.functional.pad(tables, (0, 1)), nn.functional.pad(may_be_zero, (0, 1), value=True)
    zero = may_be_zero.int().argmax(1)
    tables = tables.scatter(1, zero[:, None], 0)
    indices = torch.where(mask, indices, zero[number].to(indices.dtype))
    return indices, tables.reshape(*layout.groups, -1, 1)


def _float_palette(tensor: PalettizedTensor, indices: torch.Tensor, tables: torch.Tensor, layers: Any) -> nn.Module:
    layout, factors = tensor.layout, tensor.channel_scale()
    common = {"indices": indices, "lut": _padded(tables, layout.n_bits), "vector_axis": layout.vector_axis}
    if factors is None:
        return _wrapped(layers.PalettizeModule, **common)
    return _wrapped(layers.ScaledPalettizeModule, scale=factors, **common)


def _quantized_palette(tensor: PalettizedTensor, lut: QuantizedTensor, layers: Any) -> nn.Module:
    rank, factors = len(tensor.shape), tensor.channel_scale()
    table, scale = _padded(lut.codes(), tensor.layout.n_bits), lut.scale().to(_exact_dtype(lut))
    scale = scale.reshape(scale.shape[:rank])
    zero_point = lut.zero_point()
    zero_point = None if zero_point is None else zero_point.reshape(zero_point.shape[:rank]).to(table.dtype)
    if factors is not None:
        axis = tensor.layout.channel_axis or 0
        repeats = factors.shape[axis] // scale.shape[axis]
        scale = scale.repeat_interleave(repeats, axis) * factors
        zero_point = None if zero_point is None else zero_point.repeat_interleave(repeats, axis)
    integer = lut.layout.number_format.kind == "int"
    palette = _wrapped(
        layers.ScaledPalettizeModule,
        indices=tensor.indices(),
        lut=table,
        vector_axis=tensor.layout.vector_axis,
        scale=scale,
        zero_point=zero_point,
        input_dtype=container_of(lut.layout.number_format.dtype) if integer else None,
    )
    return _rounded(palette, {"scale": scale}, tensor.dtype)


def _padded(lut: torch.Tensor, n_bits: int) -> torch.Tensor:
    """Tables with the number of entries that Core AI's index types address; the last entry is repeated."""
    entries = next(1 << bits for bits in _PALETTE_BITS if bits >= n_bits and 1 << bits >= lut.shape[-2])
    missing = entries - lut.shape[-2]
    return torch.cat([lut, lut[..., -1:, :].expand(*lut.shape[:-2], missing, lut.shape[-1])], -2) if missing else lut
