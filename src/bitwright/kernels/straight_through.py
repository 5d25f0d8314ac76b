"""The gradient of a fused fake quantizer: passed on where a saved bit says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["StraightThrough", "straight_through"]

Forward = Callable[[torch.Tensor], torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def straight_through(x: torch.Tensor, forward: Forward, mask: torch.Tensor, backward: Backward) -> torch.Tensor:
    """Run ``forward`` as a function of ``x`` whose gradient ``backward`` makes from the mask.

    Args:
        x: tensor that requires a gradient.
        forward: takes the empty mask, fills it and returns the result.
        mask: memory for one bit per element, in the order of the result's memory.
        backward: takes a gradient in the strides of the result, and the mask; returns the gradient of ``x``. It must
            not hold the tensor, which would stay in memory until the backward pass.
    """
    y: torch.Tensor = StraightThrough.apply(x, forward, mask, backward)  # type: ignore[no-untyped-call]
    return y


class StraightThrough(torch.autograd.Function):
    """The gradient of a fake quantizer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Forward, mask: torch.Tensor, backward: Backward) -> torch.Tensor:
        """Run ``forward``; see ``straight_through``."""
        return StraightThrough.keep(ctx, forward(mask), mask, backward)

    @staticmethod
    def keep(ctx: Any, y: torch.Tensor, mask: torch.Tensor, backward: Backward) -> torch.Tensor:
        """Keep what ``backward`` needs and return the result."""
        ctx.save_for_backward(mask)
        ctx.pass_on = backward
        ctx.strides = y.stride()
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Pass the gradient on where the mask says so."""
        if grad is None:
            return None, None, None, None
        (mask,) = ctx.saved_tensors
        if grad.stride() != ctx.strides or grad.is_neg():
            grad = torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device).copy_(grad)
        if torch.is_grad_enabled():
            # A second derivative is wanted: plain torch, with the mask as numbers 0 and 1.
            return grad * ctx.pass_on(torch.ones_like(grad, requires_grad=False), mask), None, None, None
        return ctx.pass_on(grad, mask), None, None, None
