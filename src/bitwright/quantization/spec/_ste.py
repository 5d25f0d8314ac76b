"""Fake quantization with offsets given as tensors, for code that was written against that form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _FusedFakeQuantizeIntSTE(torch.autograd.Function):
    """``(clamp(round((x - f) / s) + o) - o) * s + f`` with a straight-through gradient where nothing is clamped."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        quant_offset: torch.Tensor,
        float_offset: torch.Tensor,
        quant_min: int,
        quant_max: int,
        original_shape: torch.Size,
        blockwise_shape: Sequence[int],
        reduced_shape: Sequence[int],
    ) -> torch.Tensor:
        step = scale.reshape(tuple(reduced_shape))
        pre = torch.round((tensor.reshape(tuple(blockwise_shape)) - float_offset) / step) + quant_offset
        ctx.save_for_backward((pre >= quant_min) & (pre <= quant_max))
        codes = pre.clamp(quant_min, quant_max)
        return ((codes - quant_offset) * step + float_offset).reshape(original_shape)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        masked = (grad_output.reshape(mask.shape) * mask).reshape(grad_output.shape)
        return masked, *(None,) * 8
