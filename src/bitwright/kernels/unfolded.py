"""A folded weight that is simulated and unfolded as one function of the weight and the scale.

With ``m`` the mask of the fake quantizer, ``Q`` its result and ``s`` the scale of an output channel, the layer reads
``y = Q(W s) / s``, so that ``dy/dW = m`` and ``dy/ds = (m W - y) / s``. Product, simulator and division, each with a
gradient of its own, pass over the weight ten times for that.
"""

from __future__ import annotations

from typing import Any

import torch

from . import reference
from .dispatch import form_of
from .many import Task
from .ownership import is_unshared, references_to
from .straight_through import Backward, masked_gradient

__all__ = ["may_be_unfolded", "unfolded"]


def may_be_unfolded(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Return whether ``unfolded`` takes a weight of shape (out, ...) and a scale of shape (out,)."""
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and weight.is_cpu
        and weight.dtype == scale.dtype == torch.float32
        and form_of(weight) is not reference
        and weight.is_contiguous()
        and type(scale) is torch.Tensor
    )


def unfolded(task: Task, folded: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
    """Return the quantized ``folded``, divided by ``scale``, as a function of weight and scale.

    Args:
        task: how it is quantized.
        folded: ``weight * scale``, of shape (out, ...).
        weight: see ``may_be_unfolded``.
        scale: of shape (out,), nowhere zero.

    Returns:
        A tensor of the weight's shape; None where there is no prepared call for it.
    """
    made = task.run_masked(folded)
    if made is None:
        return None
    y: torch.Tensor = _Unfolded.apply(weight, scale, made)  # type: ignore[no-untyped-call]
    return y


class _Unfolded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, scale: torch.Tensor, made: tuple[torch.Tensor, torch.Tensor, Backward]
    ) -> torch.Tensor:
        y, mask, pass_on = made  # as arguments, tensors would be saved without the gradient of the result
        y.div_(scale.view(-1, *[1] * (y.ndim - 1)))
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
        if not ctx.needs_input_grad[1]:
            return masked_gradient(grad, weight.stride(), mask, ctx.pass_on, references), None, None
        from .cpu import unfolding

        if unfolding.suits(grad, mask) and not (torch.is_grad_enabled() or grad.is_neg()):
            in_place = is_unshared(grad, references)
            passed, sums = unfolding.unfolded_gradients(grad, mask, weight, y, in_place)
        else:
            of_result = _by_channel(grad, y)
            passed = masked_gradient(grad, weight.stride(), mask, ctx.pass_on, references)
            sums = _by_channel(passed, weight) - of_result
        return passed, sums / scale, None


def _by_channel(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The sums of a product over all dimensions but the first."""
    return (grad * factor).flatten(1).sum(1)
