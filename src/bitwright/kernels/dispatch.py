"""The kernels that the rest of the package calls."""

from __future__ import annotations

import torch

from . import reference
from .grid import Grid

__all__ = [
    "choose_qparams",
    "dequantize",
    "fake_quantize",
    "min_max",
    "observe_and_fake_quantize",
    "quantize",
]

choose_qparams = reference.choose_qparams
dequantize = reference.dequantize
fake_quantize = reference.fake_quantize
min_max = reference.min_max
quantize = reference.quantize


def observe_and_fake_quantize(
    x: torch.Tensor,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    scheme: str,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Find every block's range, choose its parameters, and fake-quantize with them.

    Returns:
        The fake-quantized tensor, scale, zero point and minval.
    """
    low, high = min_max(x, block_size)
    scale, zero_point, minval = choose_qparams(low, high, grid=grid, scheme=scheme, scale_dtype=scale_dtype)
    y = fake_quantize(x, scale, zero_point, minval, block_size=block_size, grid=grid)
    return y, scale, zero_point, minval
