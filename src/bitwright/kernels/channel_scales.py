"""A weight times a scale for each output channel, and divided by it again, with a fake quantizer between them or not.

Product, simulator and division, each with a gradient of its own, pass over the weight ten times. Each of these
functions passes over it once, and the one that stands for all three gives the bits that they give one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from . import reference
from .dispatch import form_of
from .layout import LANES
from .many import Task
from .ownership import References, has_memory, is_unshared, references_to
from .straight_through import Backward

__all__ = ["divided", "scaled", "suits", "unfolded"]


def suits(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Return whether the functions here take a weight of shape (out, ...), or one made of it, and a scale (out,)."""
    count = weight.numel()
    return (
        not is_compiling()
        and weight.requires_grad
        and torch.is_grad_enabled()
        and weight.is_cpu
        and weight.dtype == scale.dtype == torch.float32
        and count > 0
        and count % (LANES * len(scale)) == 0
        and form_of(weight) is not reference
        and weight.is_contiguous()
        and scale.is_contiguous()
        and type(scale) is torch.Tensor
    )


def scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``weight * scale``; see ``suits`` for both."""
    y: torch.Tensor = _Scaled.apply(weight, scale)  # type: ignore[no-untyped-call]
    return y


def divided(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``weight / scale``; see ``suits`` for both. The scale is nowhere zero."""
    y: torch.Tensor = _Divided.apply(weight, scale)  # type: ignore[no-untyped-call]
    return y


def unfolded(task: Task, folded: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
    """Return the quantized ``folded``, divided by ``scale``, as a function of weight and scale.

    Args:
        task: how it is quantized.
        folded: ``weight * scale``.
        weight: see ``suits``.
        scale: nowhere zero.

    Returns:
        A tensor of the weight's shape; None where there is no prepared call for it.
    """
    made = task.run_masked(folded)
    if made is None or made[1].numel() * LANES != 2 * folded.numel():  # rows of the mask that are filled up
        return None
    y: torch.Tensor = _Unfolded.apply(weight, scale, made)  # type: ignore[no-untyped-call]
    return y


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.set_materialize_grads(False)
        return weight * _spread(scale, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None
        references = references_to(grad)
        weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled() or not has_memory(grad):
            return grad * _spread(scale, weight), _sums(grad, weight)
        return _gradients(grad, references, scale, weight=weight)


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = weight / _spread(scale, weight)
        ctx.save_for_backward(scale, y)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None
        references = references_to(grad)
        scale, y = ctx.saved_tensors
        if torch.is_grad_enabled() or not has_memory(grad):
            return grad / _spread(scale, y), -_sums(grad, y) / scale
        return _gradients(grad, references, scale, result=y)


class _Unfolded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, scale: torch.Tensor, made: tuple[torch.Tensor, torch.Tensor, Backward]
    ) -> torch.Tensor:
        y, mask, pass_on = made  # as arguments, tensors would be saved without the gradient of the result
        y.div_(_spread(scale, y))
        ctx.save_for_backward(weight, scale, y, mask)
        ctx.pass_on = pass_on
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None
        references = references_to(grad)
        weight, scale, y, mask = ctx.saved_tensors
        if torch.is_grad_enabled() or not has_memory(grad):
            passed = grad / _spread(scale, y) * ctx.pass_on(torch.ones_like(y, requires_grad=False), mask, True)
            return passed * _spread(scale, y), _sums(passed, weight) - _sums(grad, y) / scale, None
        return *_gradients(grad, references, scale, mask=mask, weight=weight, result=y), None


def _gradients(
    grad: torch.Tensor, references: References, scale: torch.Tensor, **others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from .cpu.channel_scales import scaled_gradients

    copied = not grad.is_contiguous() or grad.is_neg()
    grad = grad.resolve_neg().contiguous() if copied else grad
    return scaled_gradients(grad, scale, copied or is_unshared(grad, references), **others)


def _spread(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return scale.view(-1, *[1] * (weight.ndim - 1))


def _sums(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The sums of a product over all dimensions but the first."""
    return (grad * factor).sum(tuple(range(1, factor.ndim)))
