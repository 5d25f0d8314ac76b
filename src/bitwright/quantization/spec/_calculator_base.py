"""What all calculators of quantization parameters share: the range of a tensor, and parameters from a range."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from bitwright import kernels
from bitwright._utils.registry_utils import ClassRegistryMixin
from bitwright.config.spec import CompressionTargetTensor
from bitwright.kernels import Grid, reference

from .granularity import QuantizationGranularity
from .qscheme import QuantizationScheme
from .range_calculator import RangeCalculatorBase

__all__ = ["QParams", "QParamsCalculatorBase"]

QParams = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class QParamsCalculatorBase(ClassRegistryMixin, nn.Module, ABC):
    """Base class of the modules that map a tensor to its quantization parameters.

    A new calculator derives from ``StatefulQParamsCalculatorBase`` or ``StatelessQParamsCalculatorBase`` and is
    registered with ``@QParamsCalculatorBase.register("<key>")``.

    Args:
        dtype: the quantized number format.
        qscheme: how a range is laid over the codes.
        granularity: how the tensor divides into blocks.
        target_dtype: dtype of a tensor that holds the codes.
        quant_min: smallest code.
        quant_max: largest code.
        range_calculator: finds the range of a tensor.
        float_range: ``(min, max)``; a side that is not None replaces what the range calculator finds.
        scale_dtype: ``torch.float8_e8m0fnu`` for power-of-two scales, or None.
        **kwargs: the fields that a subclass of ``QuantizationSpec`` adds; ignored here.
    """

    #: Whether the range calculator is asked for the range of each tensor alone, not of all that it has seen.
    _TAKES_SINGLE_RANGES: ClassVar[bool] = False

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
        scale_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.qscheme = QuantizationScheme(qscheme)
        self._granularity = granularity
        self.target_dtype = target_dtype
        self.quant_min = quant_min
        self.quant_max = quant_max
        if self._TAKES_SINGLE_RANGES:
            range_calculator.accumulates = False
        self.range_calculator = range_calculator
        self.float_range = float_range
        self.scale_dtype = scale_dtype
        self._grid: Grid | None = None
        self._initialized = False
        # Core AI's quantize and dequantize ops compute in this dtype: that of the tensor seen first.
        self._compute_dtype_for_export = torch.float32
        self._resolved_axis: Any = ...

    @property
    def granularity(self) -> QuantizationGranularity:
        """How the tensor divides into blocks; may be set until the first tensor has been seen.

        Raises:
            RuntimeError: set later than that.
        """
        return self._granularity

    @granularity.setter
    def granularity(self, granularity: QuantizationGranularity) -> None:
        if self._initialized:
            raise RuntimeError(
                "Cannot change granularity after observer has been initialized. "
                "Set it before the first forward pass, or build a new quantizer."
            )
        self._granularity = granularity
        self.range_calculator.granularity = granularity

    @property
    def quantization_target(self) -> CompressionTargetTensor:
        """What the tensor is; kept by the range calculator."""
        return self.range_calculator.quantization_target

    @quantization_target.setter
    def quantization_target(self, target: CompressionTargetTensor) -> None:
        self.range_calculator.quantization_target = target

    @abstractmethod
    def forward(self, tensor: torch.Tensor) -> QParams:
        """Return ``(scale, zero_point, minval)`` for ``tensor``.

        Args:
            tensor: floating point, any shape that the granularity fits.

        Returns:
            scale and minval in the dtype of ``tensor`` and zero_point as int32, with one entry per block; zero_point
            and minval are None for float formats.
        """

    def compute_qparams(self, tensor: torch.Tensor, min_val: torch.Tensor, max_val: torch.Tensor) -> QParams:
        """Return the parameters for an observed range; override it to smooth the range first.

        Args:
            tensor: the tensor that was observed.
            min_val: smallest value of each block, at most 0.
            max_val: largest value of each block, at least 0.
        """
        return self._compute_scale_zero_point_minval(tensor, min_val, max_val)

    def _initialize_state(self, tensor: torch.Tensor, min_val: torch.Tensor, max_val: torch.Tensor) -> None:
        """Prepare a subclass's state for the first tensor; called before its ``compute_qparams``."""

    def _resolve_axis(self, tensor_ndim: int) -> None:
        if self._resolved_axis is ...:
            self._resolved_axis = QuantizationGranularity._resolve_axis(self.granularity, tensor_ndim)

    def _get_min_and_max_val(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range of every block: measured, or fixed by ``float_range``; it includes zero.

        A range is float32 if it is fixed on both sides or the dtype of ``tensor`` does not hold a fixed end; any other
        has that dtype.
        """
        fixed_low, fixed_high = self.float_range
        if fixed_low is not None and fixed_high is not None:
            low = self._get_tensor_with_granularity_from_scalar(fixed_low, tensor)
            return low, self._get_tensor_with_granularity_from_scalar(fixed_high, tensor)
        low, high = self.range_calculator(tensor)
        return self._bounded(low, high, tensor.dtype)

    def _bounded(self, low: torch.Tensor, high: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a measured range that includes zero, with the ends that ``float_range`` fixes.

        Args:
            low: smallest value of each block.
            high: largest value of each block.
            dtype: of the range; float32 instead where it does not hold a fixed end.
        """
        fixed_low, fixed_high = self.float_range
        if any(end is not None and abs(end) > torch.finfo(dtype).max for end in self.float_range):
            dtype, low, high = torch.float32, low.float(), high.float()
        low = low.clamp(max=0) if fixed_low is None else torch.full_like(low, fixed_low, dtype=dtype)
        high = high.clamp(min=0) if fixed_high is None else torch.full_like(high, fixed_high, dtype=dtype)
        return low, high

    def _get_tensor_with_granularity_from_scalar(self, scalar: float, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return a float32 tensor with ``scalar`` for every block of ``input_tensor``."""
        block_size = self.granularity.get_block_size(input_tensor.shape, self.quantization_target)
        counts = kernels.block_counts(tuple(input_tensor.shape), block_size)
        return torch.full(counts, scalar, dtype=torch.float32, device=input_tensor.device)

    def _compute_scale_zero_point_minval(
        self, tensor: torch.Tensor, min_val: torch.Tensor, max_val: torch.Tensor
    ) -> QParams:
        """Return the parameters of a range by the formulas of ``bitwright.kernels.choose_qparams``.

        They are computed in the dtype of ``min_val`` and returned in it, except power-of-two scales, which are float32.
        """
        learn = torch.is_grad_enabled() and (min_val.requires_grad or max_val.requires_grad)
        choose = reference.choose_qparams if learn else kernels.choose_qparams
        scale, zero_point, minval = choose(
            min_val, max_val, grid=self._current_grid(), scheme=self.qscheme.value, scale_dtype=self.scale_dtype
        )
        if min_val.dtype != torch.float32 and self.scale_dtype is None:
            scale = scale.to(min_val.dtype)
            minval = None if minval is None else minval.to(min_val.dtype)
        return scale, zero_point, minval

    def _current_grid(self) -> Grid:
        grid = self._grid
        if (
            grid is None
            or grid.quant_min != self.quant_min
            or grid.quant_max != self.quant_max
            or grid.dtype != self.dtype
        ):
            grid = Grid(self.dtype, self.quant_min, self.quant_max)
            if not torch.compiler.is_compiling():  # a traced change of an attribute would have the graph compiled anew
                self._grid = grid
        return grid
