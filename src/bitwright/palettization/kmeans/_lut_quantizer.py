"""Quantization of palettes: every palette is one channel of the stack of palettes."""

from __future__ import annotations

from typing import Any

import torch

from bitwright.config.spec import CompressionTargetTensor
from bitwright.quantization.spec import (
    FakeQuantizeImplBase,
    PerChannelGranularity,
    QuantizationComponentFactory,
    QuantizationSpec,
)

__all__ = ["build_lut_quantizer", "frozen_qparams", "is_observed", "observe_and_quantize", "quantize_frozen"]

_QParams = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def build_lut_quantizer(spec: QuantizationSpec) -> FakeQuantizeImplBase:
    """Return the quantizer of a stack of palettes ``[P, K, D]`` with a scale for each palette."""
    per_palette = spec.model_copy(update={"granularity": PerChannelGranularity(axis=0)})
    return QuantizationComponentFactory.create_fake_quantizer(per_palette, CompressionTargetTensor.LUT)


def is_observed(quantizer: FakeQuantizeImplBase) -> bool:
    """Return whether the quantizer has scales."""
    calculator: Any = quantizer.qparams_calculator
    return bool(calculator.scale.numel())


def frozen_qparams(quantizer: FakeQuantizeImplBase) -> _QParams:
    """Return scale, zero point and minval as they are."""
    calculator: Any = quantizer.qparams_calculator
    return calculator.scale, calculator.zero_point, calculator.minval


def observe_and_quantize(quantizer: FakeQuantizeImplBase, luts: torch.Tensor) -> torch.Tensor:
    """Set the scales from ``luts`` and return what they decode to; float32, with a straight-through gradient.

    The quantizer's own switches have no part in it: other code may turn all quantizers of a model on and off.
    """
    luts = luts.float()
    with torch.no_grad():
        qparams = quantizer.qparams_calculator(luts.detach())
    return quantizer._fake_quantize(luts, *qparams)


def quantize_frozen(quantizer: FakeQuantizeImplBase, luts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``luts`` in the storage dtype, and their float32 values, with the present scales."""
    qparams = frozen_qparams(quantizer)
    luts = luts.detach().float()
    codes = quantizer.quantize(luts, *qparams)
    return codes, quantizer.dequantize(codes, *qparams)
