"""Activations: int8 with parameters from calibration, int8 with parameters of each row, or plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bitwright.config.spec import CompressionTargetTensor
from bitwright.export.arithmetic import ArithmeticActivation, arithmetic_activation, fits_arithmetic
from bitwright.export.coreai_activations import ActivationOperands, activation_operands
from bitwright.kernels import reference
from bitwright.quantization.spec import PerTensorGranularity, PerTokenGranularity
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

__all__ = ["ActivationStandIns", "DynamicActivation", "activation_form", "saturates_as_int8"]

_LOW, _HIGH = -128, 127


def activation_form(simulator: FakeQuantizeImplBase) -> str:
    """Return how an activation of a model is written.

    ``"static"`` are int8 quantize and dequantize ops, which saturate where the simulator does. ``"dynamic"`` are
    integers of up to 8 bits whose parameters are computed from each tensor or each row of it; linear layers quantize
    them on the way in. All else is ``"arithmetic"``.
    """
    grid = simulator._current_grid()
    integers = grid.is_integer and grid.formulation == "zp"
    per_tensor = isinstance(simulator.granularity, PerTensorGranularity)
    if simulator.is_stateless:
        rows = per_tensor or isinstance(simulator.granularity, PerTokenGranularity)
        bits = 2 <= (grid.quant_max - grid.quant_min) <= _HIGH - _LOW
        return "dynamic" if integers and rows and bits and fits_arithmetic(simulator) else "arithmetic"
    whole = (grid.quant_min, grid.quant_max) in ((_LOW, _HIGH), (0, 255))
    return "static" if integers and per_tensor and whole else "arithmetic"


def saturates_as_int8(simulator: FakeQuantizeImplBase) -> bool:
    """Whether a calibrated activation of the form ``"static"`` has its range and its arithmetic as XNNPACK."""
    if activation_form(simulator) != "static" or simulator.check_health():
        return False
    operands = activation_operands(simulator)
    return operands.compute_dtype == torch.float32 and operands.low is None and operands.high is None


@dataclass
class ActivationStandIns:
    """Makes what stands for activations in the model that is exported.

    Attributes:
        static: whether activations of the form ``"static"`` are int8 ops; else they are arithmetic.
        dynamic: those whose parameters are computed at run time, by the name in their op.
    """

    static: bool
    dynamic: dict[str, DynamicActivation] = field(default_factory=dict)

    def __call__(self, name: str, simulator: FakeQuantizeImplBase) -> nn.Module | None:
        """Return the stand-in of an activation; None keeps the simulator.

        Raises:
            ValueError: ExecuTorch has no form of it.
        """
        form = activation_form(simulator)
        if form == "dynamic":
            self.dynamic[name] = DynamicActivation(name, simulator)
            return self.dynamic[name]
        if form == "static" and self.static:
            return _Activation(activation_operands(simulator))
        if simulator.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(
                f"Activation {name!r}: ExecuTorch has no FP8 numbers; use an integer dtype or float4_e2m1fn for it."
            )
        return arithmetic_activation(name, simulator, "ExecuTorch")


class DynamicActivation(ArithmeticActivation):
    """An activation whose parameters are computed at run time: one op by its name, until its readers are known.

    Args:
        name: of the activation.
        simulator: its simulator, of the form ``"dynamic"``.
    """

    def __init__(self, name: str, simulator: FakeQuantizeImplBase) -> None:
        super().__init__(simulator)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` through the op."""
        marked: torch.Tensor = _dynamic_activation(x, self.name)
        return marked

    def arithmetic(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` quantized and dequantized by plain ops."""
        return super().forward(x)

    def is_found_by_xnnpack(self, shape: torch.Size) -> bool:
        """Whether XNNPACK's range of a row, from its smallest to its largest value, is the simulator's."""
        # The number of elements of a torch.Size would fix the sizes that are dynamic.
        alone = isinstance(self.granularity, PerTokenGranularity) or all(size == 1 for size in shape[:-1])
        return alone and self.scheme == "asymmetric" and self.grid.quant_max - self.grid.quant_min == _HIGH - _LOW

    def with_range(self, x: torch.Tensor) -> torch.Tensor:
        """Round ``x``, and append two columns from which XNNPACK finds the simulator's scale and zero point.

        XNNPACK spreads 256 codes from the smallest to the largest value of a row. The columns hold the values of its
        first and its last code on the simulator's scale, which XNNPACK's own differs from in the last bit. Rounded
        values lie in the middle of a code, so that this moves none.

        Args:
            x: float32, shape (..., features).

        Returns:
            float32, shape (..., features + 2).
        """
        grid = self.grid
        block_size = self.granularity.get_block_size(x.shape, CompressionTargetTensor.ACTIVATION)
        low, high = reference.min_max(x, block_size)
        scale, zero_point, _ = reference.choose_qparams(low, high, grid=grid, scheme=self.scheme)
        options: dict[str, Any] = {"block_size": block_size, "grid": grid}
        assert zero_point is not None
        codes = reference.quantize(x, scale, zero_point, None, **options)
        rounded = reference.dequantize(codes, scale, zero_point, None, **options)
        first = 0 if grid.quant_min >= 0 else _LOW
        ends = [((first + code) - zero_point) * scale for code in (0, _HIGH - _LOW)]
        return torch.cat([rounded, *(end.expand(*x.shape[:-1], 1) for end in ends)], -1)


@torch.library.custom_op("bitwright::dynamic_activation", mutates_args=())
def _dynamic_activation(x: torch.Tensor, name: str) -> torch.Tensor:
    raise NotImplementedError(f"Activation {name!r} is not lowered.")


@_dynamic_activation.register_fake
def _(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


class _Activation(nn.Module):
    """An activation through ``quantize_per_tensor`` and back, as int8; unsigned codes are moved down by 128."""

    def __init__(self, operands: ActivationOperands) -> None:
        super().__init__()
        assert operands.zero_point is not None
        shift = 128 if operands.dtype == torch.uint8 else 0
        self.parameters_of_op = (float(operands.scale), int(operands.zero_point) - shift, _LOW, _HIGH, torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.ndim:  # XNNPACK's passes fail on a tensor without an order of dimensions
            return self(x.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]
        ops = torch.ops.quantized_decomposed
        codes = ops.quantize_per_tensor(x, *self.parameters_of_op)
        decoded: torch.Tensor = ops.dequantize_per_tensor(codes, *self.parameters_of_op)
        return decoded
