"""How far a result is from what it should be."""

from __future__ import annotations

import torch


def sqnr(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The signal-to-quantization-noise ratio in decibels, in float64; infinity for equal tensors."""
    expected, found = expected.detach().double(), found.detach().double()
    noise = (expected - found).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(expected.square().sum() / noise))
