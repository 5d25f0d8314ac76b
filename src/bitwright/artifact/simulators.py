"""Stored forms of what palettization and pruning simulate."""

from __future__ import annotations

from typing import Any

import torch

from bitwright.palettization.kmeans._lut_quantizer import frozen_qparams
from bitwright.palettization.kmeans._palette_state import PaletteState
from bitwright.pruning.spec import PruneImplBase
from bitwright.quantization.spec import QuantizationScheme
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .compress import _MASKS, register_encoder
from .encode import dense_tensor, palettized_tensor, quantized_tensor
from .tensors import CompressedTensor, DenseTensor, QuantizedTensor

__all__: list[str] = []


def _mask(simulator: PruneImplBase) -> torch.Tensor:
    return simulator.mask


def _encode_palettized(
    simulator: PaletteState, tensor: torch.Tensor, mask: torch.Tensor | None
) -> CompressedTensor[Any]:
    indices, lut, scale = simulator.indices, simulator.lut, simulator.per_channel_scale
    assert indices is not None
    assert lut is not None
    rank = indices.ndim
    groups = (*lut.shape[:2], *[1] * rank)[:rank]
    tables = lut.reshape(*groups, *lut.shape[2:])
    stored = _quantized_tables(simulator, tables) if simulator.lut_qspec is not None else dense_tensor(tables)
    channel_scale = None
    if scale is not None and scale.shape[0] == 1 and rank > 1:  # a factor for each index of dimension 1
        stored = dense_tensor(_scaled_tables(tables, scale))
    elif scale is not None:
        channel_scale = scale.reshape(-1)
    if mask is not None and simulator.preserve_zeros:
        mask = mask & (tensor != 0)
    return palettized_tensor(
        indices, stored, n_bits=simulator.n_bits, channel_scale=channel_scale, mask=mask, mask_needed=True
    )


def _scaled_tables(tables: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a table for each index of dimension 1, multiplied with its factor."""
    channels = scale.numel()
    per_channel = tables.repeat_interleave(channels // tables.shape[1], dim=1)
    return per_channel * scale.view(1, channels, *[1] * (tables.ndim - 2))


def _quantized_tables(simulator: PaletteState, tables: torch.Tensor) -> DenseTensor | QuantizedTensor:
    quantizer: FakeQuantizeImplBase | None = simulator._lut_fake_quantizer
    codes = simulator.quantized_lut
    assert quantizer is not None
    assert codes is not None
    scale, zero_point, _ = frozen_qparams(quantizer)
    return quantized_tensor(
        codes.reshape(tables.shape),
        scale,
        zero_point,
        None,
        block_size=(*[1] * (tables.ndim - 2), *tables.shape[-2:]),
        grid=quantizer._current_grid(),
        dtype=tables.dtype,
        zero_point_per_block=quantizer.qscheme == QuantizationScheme.ASYMMETRIC,
    )


register_encoder(PaletteState, _encode_palettized)
_MASKS[PruneImplBase] = _mask
