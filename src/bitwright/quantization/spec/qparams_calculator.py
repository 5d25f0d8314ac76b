"""QParams calculators: scale, zero point and minval of a tensor, from the ranges seen so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bitwright.kernels.reference import moving_average

from ._calculator_base import QParams, QParamsCalculatorBase
from ._calculator_state import StatefulQParamsCalculatorBase, StatelessQParamsCalculatorBase
from ._running_range import RunningRangeMixin
from .granularity import QuantizationGranularity
from .qscheme import QuantizationScheme
from .range_calculator import RangeCalculatorBase

__all__ = [
    "AccumulatedQParamsCalculator",
    "DynamicQParamsCalculator",
    "GlobalMinMaxQParamsCalculator",
    "MovingAverageQParamsCalculator",
    "QParams",
    "QParamsCalculatorBase",
    "RunningRangeMixin",
    "StatefulQParamsCalculatorBase",
    "StatelessQParamsCalculatorBase",
    "StaticQParamsCalculator",
]

DEFAULT_AVERAGING_CONSTANT = 1e-2


@QParamsCalculatorBase.register("default")
class _DefaultQParamsCalculator(QParamsCalculatorBase):
    """Stands in a spec for "static for weights, moving average for activations"; the factory resolves it."""

    def __init__(self, **kwargs: Any) -> None:
        raise RuntimeError(
            "_DefaultQParamsCalculator is a marker class: QuantizationComponentFactory replaces it by the static "
            "calculator for weights and the moving average for activations. Use the factory, or one of these."
        )

    def forward(self, tensor: torch.Tensor) -> QParams:
        raise NotImplementedError


@QParamsCalculatorBase.register("static")
class StaticQParamsCalculator(StatefulQParamsCalculatorBase):
    """The range of the latest tensor, nothing before it. For weights."""

    _TAKES_SINGLE_RANGES = True


@QParamsCalculatorBase.register("accumulated")
class AccumulatedQParamsCalculator(StatefulQParamsCalculatorBase):
    """The range of all tensors seen, kept by a range calculator that accumulates. Merging two of them is exact.

    With one that keeps the latest range alone, as ``minmax``, it is that of the latest tensor; ``global_minmax`` has
    that of all.
    """

    def reset_statistics(self) -> None:
        """Start anew with the next tensor; until then the parameters stay as they are."""
        calculator: Any = self.range_calculator
        if calculator.accumulates:
            calculator.reset()

    def _merge_statistics(self, other: Any) -> None:
        calculator: Any = self.range_calculator
        if not calculator.accumulates:
            super()._merge_statistics(other)
        calculator.merge(other.range_calculator)
        low, high = calculator.current_range()
        low, high = self._bounded(low, high, torch.float32)
        self._store(self._compute_scale_zero_point_minval(low, low, high))


@QParamsCalculatorBase.register("dynamic")
class DynamicQParamsCalculator(StatelessQParamsCalculatorBase):
    """The range of each tensor, at run time too. For activations."""


@QParamsCalculatorBase.register("moving_average")
class MovingAverageQParamsCalculator(RunningRangeMixin, StatefulQParamsCalculatorBase):
    """An exponential moving average of the range: ``r = c * x + (1 - c) * r``, started by the first tensor's range.

    Args:
        averaging_constant: the weight ``c`` of a further tensor, in (0, 1].
        **kwargs: see ``QParamsCalculatorBase``.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        qscheme: QuantizationScheme,
        granularity: QuantizationGranularity,
        target_dtype: torch.dtype,
        quant_min: int | float,
        quant_max: int | float,
        range_calculator: RangeCalculatorBase,
        float_range: Sequence[float | None],
        averaging_constant: float = DEFAULT_AVERAGING_CONSTANT,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dtype=dtype,
            qscheme=qscheme,
            granularity=granularity,
            target_dtype=target_dtype,
            quant_min=quant_min,
            quant_max=quant_max,
            range_calculator=range_calculator,
            float_range=float_range,
            **kwargs,
        )
        self.averaging_constant = averaging_constant

    def update_running_range(self, min_val: torch.Tensor, max_val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the averages with the further range taken in; blocks that were zero so far take it as it is."""
        return moving_average(min_val, max_val, self.running_min, self.running_max, self.averaging_constant)

    def merge_running_range(
        self, other_min: torch.Tensor, other_max: torch.Tensor, other_share: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean of the two averages, weighted by the number of tensors behind each.

        An average that weights tensors by their order has no exact union; this one does not depend on which
        calculator is merged into which.
        """
        return (
            torch.lerp(self.running_min, other_min, other_share),
            torch.lerp(self.running_max, other_max, other_share),
        )


@QParamsCalculatorBase.register("global_minmax")
class GlobalMinMaxQParamsCalculator(RunningRangeMixin, StatefulQParamsCalculatorBase):
    """The smallest and the largest value over all tensors seen; merging two of them is exact."""

    def update_running_range(self, min_val: torch.Tensor, max_val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elementwise extremes."""
        return torch.minimum(self.running_min, min_val), torch.maximum(self.running_max, max_val)
