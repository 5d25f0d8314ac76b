"""Stored forms of what palettization and pruning simulate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bitwright.palettization.kmeans._lut_quantizer import frozen_qparams
from bitwright.palettization.kmeans._palette_state import PaletteState
from bitwright.pruning.spec import PruneImplBase
from bitwright.quantization.spec import QuantizationScheme
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .compress import _HOLES, _MASKS, _SWITCHED_ON, register_encoder
from .encode import dense_tensor, palettized_tensor, quantized_tensor
from .tensors import CompressedTensor, DenseTensor, QuantizedTensor

__all__: list[str] = []


def _mask(simulator: PruneImplBase) -> torch.Tensor:
    return simulator.mask


def _holes(simulator: PaletteState) -> torch.Tensor | None:
    return getattr(simulator, "_sparsity_mask", None)


def _encode_palettized(
    simulator: PaletteState, tensor: torch.Tensor, mask: torch.Tensor | None
) -> CompressedTensor[Any]:
    indices, lut, scale = simulator.indices, simulator.lut, simulator.per_channel_scale
    assert indices is not None
    assert lut is not None
    rank = indices.ndim
    groups = (*lut.shape[:2], *[1] * rank)[:rank]
    tables = lut.reshape(*groups, *lut.shape[2:])
    along_inputs = scale is not None and rank > 1 and tuple(scale.shape) == (1, tensor.shape[1])
    if mask is not None and simulator.preserve_zeros:
        mask = mask & (tensor != 0)
    return palettized_tensor(
        indices,
        _quantized_tables(simulator, tables) if simulator.lut_qspec is not None else dense_tensor(tables),
        n_bits=simulator.n_bits,
        channel_scale=None if scale is None else scale.reshape(-1),
        channel_axis=1 if along_inputs else 0,
        mask=mask,
        mask_needed=True,
    )


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
        power_of_two=quantizer.qparams_calculator.scale_dtype is not None,
        zero_point_per_block=quantizer.qscheme == QuantizationScheme.ASYMMETRIC,
    )


@contextmanager
def _palettizing(simulator: PaletteState) -> Iterator[None]:
    was_on = simulator.is_on
    simulator.enable_fake_palett(True)
    try:
        yield
    finally:
        simulator.enable_fake_palett(was_on)


@contextmanager
def _pruning(simulator: PruneImplBase) -> Iterator[None]:
    was_on, simulator.enabled = simulator.enabled, True
    try:
        yield
    finally:
        simulator.enabled = was_on


register_encoder(PaletteState, _encode_palettized)
_SWITCHED_ON[PaletteState] = _palettizing
_SWITCHED_ON[PruneImplBase] = _pruning
_MASKS[PruneImplBase] = _mask
_HOLES[PaletteState] = _holes
