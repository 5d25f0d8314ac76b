"""Activation quantizers as plain arithmetic, for what a target's own quantize operators cannot hold."""

from __future__ import annotations

import torch
from torch import nn

from bitwright.config.spec import CompressionTargetTensor
from bitwright.formats import format_of, power_of_two_scale_by_arithmetic
from bitwright.kernels import reference
from bitwright.kernels.grid import block_view_shape
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from bitwright.quantization.spec.qparams_calculator import DynamicQParamsCalculator
from bitwright.quantization.spec.range_calculator import MinMaxRangeCalculator

__all__ = ["ArithmeticActivation", "arithmetic_activation", "fits_arithmetic"]

# Where FP4 magnitudes change, with the step up there; ties go to the even code, so every other bound belongs upwards.
_FP4_BOUNDS = ((0.25, 0.5), (0.75, 0.5), (1.25, 0.5), (1.75, 0.5), (2.5, 1.0), (3.5, 1.0), (5.0, 2.0))


def fits_arithmetic(simulator: FakeQuantizeImplBase) -> bool:
    """Whether an activation's simulation can be written with additions, products, comparisons and casts alone.

    Excluded are custom classes, whose formulas are unknown, and ranges that are searched for at run time.
    """
    if not simulator._is_fused():
        return False
    calculator = simulator.qparams_calculator
    is_dynamic = type(calculator) is DynamicQParamsCalculator
    return not simulator.is_stateless or (is_dynamic and type(calculator.range_calculator) is MinMaxRangeCalculator)


def arithmetic_activation(name: str, simulator: FakeQuantizeImplBase, target: str) -> ArithmeticActivation | None:
    """Return an activation's simulation as plain ops, or None for a custom class, whose own arithmetic is traced.

    Args:
        name: of the activation, for the message.
        simulator: its simulator.
        target: whose format is written, for the message.

    Raises:
        ValueError: its parameters are computed at run time, by a custom class or a search.
    """
    if fits_arithmetic(simulator):
        return ArithmeticActivation(simulator)
    if simulator._is_fused():
        raise ValueError(
            f"Activation {name!r}: {type(simulator.qparams_calculator).__name__} with "
            f"{type(simulator.qparams_calculator.range_calculator).__name__} computes its parameters at run time, and "
            f"has no {target} form. Use qparam_calculator_cls='dynamic' with range_calculator_cls='minmax', or a "
            "static one."
        )
    return None


class ArithmeticActivation(nn.Module):
    """What a simulator computes, as few plain ops; static parameters are buffers.

    Args:
        simulator: the simulator; see :func:`fits_arithmetic`.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    minval: torch.Tensor | None

    def __init__(self, simulator: FakeQuantizeImplBase) -> None:
        super().__init__()
        self.grid = simulator._current_grid()
        self.granularity = simulator.granularity
        self.scheme = simulator.qscheme.value
        self.dynamic = simulator.is_stateless
        self.powers_of_two = simulator.qparams_calculator.scale_dtype is not None
        parameters = (None, None, None) if self.dynamic else simulator.calculate_qparams()
        for name, parameter in zip(("scale", "zero_point", "minval"), parameters, strict=True):
            self.register_buffer(name, None if parameter is None else parameter.detach().float().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` quantized and dequantized, in its own dtype."""
        block_size = self.granularity.get_block_size(x.shape, CompressionTargetTensor.ACTIVATION)
        if self.dynamic:
            if self._is_symmetric_integer and (inner := _joined_dimensions(tuple(x.shape), block_size)) is not None:
                return self._symmetric(x, inner)
            low, high = reference.min_max(x, block_size)
            if self.powers_of_two:
                scale = power_of_two_scale_by_arithmetic(torch.maximum(-low, high), self.grid.dtype)
                return self._float(x, scale, block_size)
            scale, zero_point, minval = reference.choose_qparams(low, high, grid=self.grid, scheme=self.scheme)
        else:
            assert self.scale is not None
            scale, zero_point, minval = self.scale, self.zero_point, self.minval
        if not self.grid.is_integer:
            return self._float(x, scale, block_size)
        codes = reference.quantize(x, scale, zero_point, minval, block_size=block_size, grid=self.grid)
        return reference.dequantize(
            codes, scale, zero_point, minval, block_size=block_size, grid=self.grid, output_dtype=x.dtype
        )

    @property
    def _is_symmetric_integer(self) -> bool:
        return self.grid.is_integer and self.grid.formulation == "zp" and self.scheme != "asymmetric"

    def _symmetric(self, x: torch.Tensor, inner: tuple[int, ...]) -> torch.Tensor:
        """Scales from the largest magnitudes of ``inner`` dimensions."""
        magnitudes = x.abs()
        largest = magnitudes.amax(inner, keepdim=True) if inner else magnitudes
        # A tensor, because CUDA multiplies by the reciprocal of a number, which rounds differently.
        half = x.new_full((), (self.grid.quant_max - self.grid.quant_min) / 2)
        scale, values = (largest / half).clamp(min=torch.finfo(torch.float32).eps), x
        if x.dtype != torch.float32:
            scale, values = scale.float(), x.float()
        middle = (self.grid.quant_max + self.grid.quant_min + 1) // 2
        origin = middle or 1  # a sum with 0 would keep negative zeros, and optimizers drop it
        low, high = (bound - middle + origin for bound in (self.grid.quant_min, self.grid.quant_max))
        codes = ((values / scale).round() + origin).clamp(low, high) - origin
        y = codes * scale
        return y if x.dtype == torch.float32 else y.to(x.dtype)

    def _float(self, x: torch.Tensor, scale: torch.Tensor, block_size: tuple[int, ...]) -> torch.Tensor:
        view, _, wide, _ = block_view_shape(tuple(x.shape), block_size)
        step = scale.float().reshape([1] * len(wide) if scale.numel() == 1 else wide)
        values = (x.float().reshape(view) / step).clamp(self.grid.quant_min, self.grid.quant_max)
        fmt = format_of(self.grid.dtype)
        rounded = values.to(fmt.dtype).float() if fmt.bits == 8 else _round_to_fp4(values)
        return (rounded * step).reshape(x.shape).to(x.dtype)


def _joined_dimensions(shape: tuple[int, ...], block_size: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dimensions that lie inside blocks whole; None where one is split, or the tensor has no elements."""
    view, inner, _, _ = block_view_shape(shape, block_size)
    return inner if len(view) == len(shape) and 0 not in shape else None


def _round_to_fp4(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs()
    rounded = torch.zeros_like(magnitude)
    for number, (bound, step) in enumerate(_FP4_BOUNDS):
        above = magnitude >= bound if number % 2 else magnitude > bound
        rounded = rounded + above.to(magnitude.dtype) * step
    return torch.where(values < 0, -rounded, torch.where(torch.isnan(values), values, rounded))
