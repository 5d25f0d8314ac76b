"""When one kernel call does what a calculator and a simulator do step by step.

Only Bitwright's own classes qualify, whose steps are known: a subclass may have changed any of them.
"""

from __future__ import annotations

from typing import Any

import torch

from .qparams_calculator import (
    DynamicQParamsCalculator,
    GlobalMinMaxQParamsCalculator,
    MovingAverageQParamsCalculator,
    StaticQParamsCalculator,
)
from .range_calculator import MinMaxRangeCalculator

__all__ = [
    "follows_latest",
    "has_bounds_of",
    "is_plainly_static",
    "is_settled_dynamic",
    "measures_both_ends",
    "tracks_in_place",
]


def has_bounds_of(calculator: Any, simulator: Any) -> bool:
    """Whether a calculator chooses parameters for the codes that its simulator has; either's can be set."""
    bounds: bool = calculator.quant_min == simulator.quant_min and calculator.quant_max == simulator.quant_max
    return bounds


def is_plainly_static(calculator: Any) -> bool:
    """Whether the parameters depend on the latest tensor alone, and computing them has no other effect."""
    return (
        type(calculator) is StaticQParamsCalculator
        and type(calculator._modules["range_calculator"]) is MinMaxRangeCalculator
    )


def follows_latest(calculator: Any) -> bool:
    """Whether the range is that of the latest tensor, measured at both ends."""
    if type(calculator) is DynamicQParamsCalculator:
        return type(calculator._modules["range_calculator"]) is MinMaxRangeCalculator
    return is_plainly_static(calculator) and not calculator.is_frozen and measures_both_ends(calculator)


def is_settled_dynamic(calculator: Any) -> bool:
    """Whether a tensor that is not going to be quantized has nothing to tell the calculator."""
    return type(calculator) is DynamicQParamsCalculator and calculator._initialized


def measures_both_ends(calculator: Any) -> bool:
    """Whether no end of the range is fixed."""
    low, high = calculator.float_range
    return low is None and high is None


def _is_averaged_in_float32(calculator: Any, running: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel moves a float32 range by halves: that of a model trained under autocast, on a GPU."""
    return (
        running.is_cuda and running.dtype == torch.float32 and not calculator._progress.restart and dtype.itemsize == 2
    )


def tracks_in_place(calculator: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a further tensor of this dtype and device updates a running range whose buffers are ready for it."""
    kind = type(calculator)
    if kind is not MovingAverageQParamsCalculator and kind is not GlobalMinMaxQParamsCalculator:
        return False
    running = calculator._buffers["running_min"]
    return (
        calculator._initialized
        and not calculator._export_mode
        and calculator.tensors_per_step == 1
        and measures_both_ends(calculator)
        and type(calculator._modules["range_calculator"]) is MinMaxRangeCalculator
        and calculator._buffers["scale"].shape == running.shape
        and (running.dtype == dtype or _is_averaged_in_float32(calculator, running, dtype))
        and running.device == device
    )
