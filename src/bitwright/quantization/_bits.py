"""Changing the number of bits of a simulator while its range stays what it is."""

from __future__ import annotations

from typing import Any

import torch

from bitwright.formats import format_of, n_bits_of, quant_range, storage_dtype
from bitwright.kernels import Grid

from .spec import QuantizationFormulation, QuantizationScheme
from .spec.fake_quantize import FakeQuantizeImplBase
from .spec.learned import LearnedQParamsCalculatorBase

__all__ = ["dtype_with_bits", "set_dtype"]


def dtype_with_bits(dtype: torch.dtype, least: int) -> torch.dtype:
    """Return the integer format of at least ``least`` bits and at least those of ``dtype``; float formats stay."""
    fmt = format_of(dtype)
    if fmt.kind != "int":
        return dtype
    wider: torch.dtype = getattr(torch, f"{'' if fmt.signed else 'u'}int{max(fmt.bits, least)}")
    return wider


def set_dtype(simulator: FakeQuantizeImplBase, dtype: torch.dtype, *, rescale: bool = True) -> None:
    """Give a simulator another integer format.

    Args:
        simulator: the simulator; unchanged if it has this format already.
        dtype: integer format of the same signedness.
        rescale: keep the range, by changing the scale; False leaves the parameters to be loaded from a checkpoint.
    """
    if simulator.dtype == dtype:
        return
    calculator: Any = simulator.qparams_calculator
    span = float(calculator.quant_max - calculator.quant_min)
    ready = rescale and not simulator.is_stateless and calculator._initialized
    old = calculator.get_qparams() if ready else None
    lowest = calculator.quant_min
    bounds = quant_range(dtype, clip_symmetric=simulator.qscheme == QuantizationScheme.SYMMETRIC_WITH_CLIPPING)
    for holder in (simulator, calculator):
        holder.dtype, holder.target_dtype = dtype, storage_dtype(dtype)
        holder.quant_min, holder.quant_max = bounds
    simulator.n_bits = n_bits_of(dtype)
    simulator.clear_weight_memory()
    finder = calculator.range_calculator
    if finder.needs_spec:
        finder._grid = Grid(dtype, bounds[0], bounds[1], finder._grid.formulation)
    if old is not None:
        with torch.no_grad():
            low = _lowest_value(simulator, old, span, lowest)
            _keep_range(calculator, old[0], span, low)


def _lowest_value(simulator: FakeQuantizeImplBase, old: Any, span: float, lowest: float) -> torch.Tensor:
    """Return the value of the smallest code ``lowest``, by the way that codes are decoded."""
    scale, zero_point, minval = old
    calculator: Any = simulator.qparams_calculator
    if calculator.qscheme != QuantizationScheme.ASYMMETRIC or zero_point is None:
        low = -scale * span / 2
    elif simulator.qformulation == QuantizationFormulation.MINVAL:
        low = minval
    elif getattr(simulator, "zero_point_domain", "INT") == "FLOAT":  # the value of the code in the middle
        low = zero_point - scale * ((span + 1) / 2)
    else:
        low = (lowest - zero_point) * scale
    found: torch.Tensor = low
    return found


def _keep_range(calculator: Any, scale: torch.Tensor, span: float, low: torch.Tensor) -> None:
    high, half = low + scale * span, scale * span / 2
    made = calculator._compute_scale_zero_point_minval(low, low, high)
    if not isinstance(calculator, LearnedQParamsCalculatorBase):
        calculator._store(made)
        return
    for name, value in calculator._initial_values(low, high, half).items():
        if name == "scale":
            value = scale * (span / float(calculator.quant_max - calculator.quant_min))
        elif name == "alpha":  # where PACT clips, with any number of bits
            continue
        if name in calculator._LEARNED:
            calculator._set_learned(name, value)
        else:
            calculator._store_buffer(name, value)
    calculator._derived = None
