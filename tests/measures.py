"""How far a result is from what it should be."""

from __future__ import annotations

from pathlib import Path

import torch

_FLAGS = Path("/proc/cpuinfo")
#: Whether XNNPACK's layers on float16 add in float16, as they do where the processor can.
ADDS_IN_FLOAT16 = _FLAGS.exists() and "avx512_fp16" in _FLAGS.read_text()


def sqnr(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The signal-to-quantization-noise ratio in decibels, in float64; infinity for equal tensors."""
    expected, found = expected.detach().double(), found.detach().double()
    noise = (expected - found).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(expected.square().sum() / noise))
