"""The gradient of a fused fake quantizer: passed on where a saved bit says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .ownership import References, has_memory, is_unshared, references_to

__all__ = ["Backward", "is_straight_through", "masked_gradient", "passed_straight", "straight_through"]

_transforms_active = torch._C._are_functorch_transforms_active
_unsafe_view: Any = torch.ops.aten._unsafe_view.default._op

Forward = Callable[[torch.Tensor], torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]


def straight_through(x: torch.Tensor, forward: Forward, mask: torch.Tensor, backward: Backward) -> torch.Tensor:
    """Run ``forward`` as a function of ``x`` whose gradient ``backward`` makes from the mask.

    Args:
        x: tensor that requires a gradient.
        forward: takes the empty mask, fills it and returns the result.
        mask: memory for one bit per element, in the order of the result's memory.
        backward: takes a gradient in the strides of the result, the mask, and whether it may change the gradient in
            place; returns the gradient of ``x``, which may be the tensor that it was given. It must not hold the
            tensor, which would stay in memory until the backward pass.
    """
    apply = _StraightThrough.apply if _transforms_active() else _apply_plainly
    y: torch.Tensor = apply(x, forward, mask, backward)  # type: ignore[no-untyped-call]
    return y


def passed_straight(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as a function of ``x`` whose gradient is that of the result, whole.

    The node in the graph is one of torch's own, which costs less than one that calls Python, and keeps nothing.

    Args:
        x: tensor that requires a gradient and is the result of an operation.
        values: tensor of the shape and dtype of ``x``, without a gradient, that nobody else uses.
    """
    y: torch.Tensor = _unsafe_view(x, x.shape)  # no view: autograd takes it for a result with memory of its own
    y.data = values
    return y


def masked_gradient(
    grad: torch.Tensor, strides: tuple[int, ...], mask: torch.Tensor, pass_on: Backward, references: References
) -> torch.Tensor:
    """Return the gradient of a fake quantizer's input, from that of its result.

    Args:
        grad: gradient of the result.
        strides: those of the result.
        mask: what ``forward`` filled.
        pass_on: see ``backward`` of ``straight_through``.
        references: what ``references_to`` returned for the gradient; an empty tuple never changes it in place.
    """
    if not has_memory(grad):
        ones = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).fill_(1)
        return grad * pass_on(ones, mask, True)
    copied = grad.stride() != strides or grad.is_neg()
    if copied:
        grad = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
    if torch.is_grad_enabled():
        # A second derivative is wanted: plain torch, with the mask as numbers 0 and 1.
        return grad * pass_on(torch.ones_like(grad, requires_grad=False), mask, True)
    return pass_on(grad, mask, copied or is_unshared(grad, references))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Forward, mask: torch.Tensor, backward: Backward) -> torch.Tensor:
        y = forward(mask)
        ctx.save_for_backward(mask)
        ctx.pass_on = backward
        ctx.strides = y.stride()
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        references = references_to(grad)
        (mask,) = ctx.saved_tensors
        return masked_gradient(grad, ctx.strides, mask, ctx.pass_on, references), None, None, None


_NODE: Any = _StraightThrough._backward_cls


def is_straight_through(node: Any) -> bool:
    """Return whether a node of the graph is one that ``straight_through`` made."""
    return type(node) is _NODE


# Without the function around it that prepares arguments for the transforms of ``torch.func``.
_apply_plainly = super(torch.autograd.Function, _StraightThrough).apply
