"""Which values lie beyond the range of a quantizer's codes, and which end at its edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bitwright.quantization.spec._calculator_base import QParams
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from bitwright.quantization.spec.granularity import PerTensorGranularity

from .metrics import PIECE, parts_of

__all__ = ["CodeUse", "code_range", "code_use"]


@dataclass(slots=True)
class CodeUse:
    """Counts of values.

    Attributes:
        values: all of them.
        clipped: further than half a step beyond the first or last code.
        saturated: at the first or last code after rounding.
    """

    values: int = 0
    clipped: int = 0
    saturated: int = 0

    def add(self, other: CodeUse) -> None:
        """Add the counts of further values."""
        self.values += other.values
        self.clipped += other.clipped
        self.saturated += other.saturated

    def clipped_share(self) -> float | None:
        """Share of values that are clipped; None for none."""
        return self.clipped / self.values if self.values else None

    def saturated_share(self) -> float | None:
        """Share of values that are saturated; None for none."""
        return self.saturated / self.values if self.values else None


def code_use(simulator: FakeQuantizeImplBase, tensor: torch.Tensor) -> CodeUse:
    """Return how the codes of a quantizer are used by what enters it; empty where it has no parameters yet."""
    x = tensor.detach().float()
    found = CodeUse()
    try:
        with torch.no_grad():
            parameters = _parameters(simulator, x)
            for piece in _pieces(simulator, x):
                found.add(_use(simulator, piece, parameters))
    except (RuntimeError, ValueError):
        return CodeUse()
    return found


def code_range(simulator: FakeQuantizeImplBase) -> tuple[float, float] | None:
    """Return the lowest and highest value that has a code, for quantizers with stored parameters."""
    if simulator.is_stateless:
        return None
    try:
        scale, zero_point, minval = simulator.calculate_qparams()
        with torch.no_grad():
            edges = [
                simulator.dequantize(torch.full_like(scale, limit), scale, zero_point, minval)
                for limit in (simulator.quant_min, simulator.quant_max)
            ]
    except (RuntimeError, ValueError):
        return None
    low, high = float(edges[0].min()), float(edges[1].max())
    return (low, high) if all(map(_is_finite, (low, high))) else None


def _is_finite(value: float) -> bool:
    return value - value == 0


def _parameters(simulator: FakeQuantizeImplBase, x: torch.Tensor) -> QParams:
    return simulator.qparams_calculator(x) if simulator.is_stateless else simulator.calculate_qparams()


def _pieces(simulator: FakeQuantizeImplBase, x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield parts that the same parameters hold for: those of a tensor with one scale, else the tensor."""
    if isinstance(simulator.granularity, PerTensorGranularity) and x.ndim and x.numel() > PIECE:
        yield from parts_of(x.reshape(-1, *[1] * (x.ndim - 1)), PIECE)
    else:
        yield x


def _use(simulator: FakeQuantizeImplBase, x: torch.Tensor, parameters: QParams) -> CodeUse:
    low = simulator.dequantize(torch.full_like(x, simulator.quant_min), *parameters)
    high = simulator.dequantize(torch.full_like(x, simulator.quant_max), *parameters)
    codes = simulator.quantize(x, *parameters, cast_to_target_dtype=False)
    step = (high - low) / max(1.0, float(simulator.quant_max) - float(simulator.quant_min))
    slack = 0.5005 * step if simulator._current_grid().is_integer else torch.zeros_like(step)
    clipped = (x > high + slack) | (x < low - slack)
    saturated = (codes <= simulator.quant_min) | (codes >= simulator.quant_max)
    return CodeUse(x.numel(), int(clipped.sum()), int(saturated.sum()))
