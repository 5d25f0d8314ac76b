"""Gradients are changed in place where nobody else has them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.kernels import ownership, saved_as_codes
from bitwright.kernels.straight_through import straight_through

Fake = Callable[[], torch.Tensor]
Loss = Callable[[Fake], torch.Tensor]


def owned(build: Loss, shape: tuple[int, ...] = (2, 3, 4), **options: Any) -> list[bool]:
    """Whether each fake quantizer in ``build`` may change its gradient in place."""
    found: list[bool] = []

    def fake_quantize(x: torch.Tensor) -> torch.Tensor:
        def backward(gradient: torch.Tensor, mask: torch.Tensor, in_place: bool) -> torch.Tensor:
            found.append(in_place)
            return gradient

        return straight_through(x, lambda mask: x.detach().clone(), torch.empty(2, dtype=torch.uint8), backward)

    x = torch.randn(shape, requires_grad=True)
    build(lambda: fake_quantize(x)).backward(**options)
    return found


class Kept(torch.autograd.Function):
    """An operation whose gradient is made in the forward pass and kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, attribute: bool) -> torch.Tensor:
        gradient = x.detach() * 3
        if attribute:
            ctx.gradient = gradient
        else:
            ctx.save_for_backward(gradient)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (*ctx.saved_tensors, getattr(ctx, "gradient", None))[0], None


class FromArray(torch.autograd.Function):
    """An operation whose gradient lies in an array that it keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.array = np.ones(tuple(x.shape), dtype=np.float32)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(ctx.array)


def hooked(y: torch.Tensor) -> torch.Tensor:
    """``y`` with somebody who keeps its gradient."""
    y.register_hook([].append)
    return y


def test_unshared_gradients() -> None:
    """The usual case: the gradient comes from an operation that made it, perhaps as a view."""
    linear = nn.Linear(4, 5)
    assert owned(lambda y: (y() * 2).sum()) == [True]
    assert owned(lambda y: (linear(y()) * 2).sum()) == [True]
    assert owned(lambda y: (y().flatten() * 2).sum()) == [True]
    assert owned(lambda y: (y().transpose(1, 2) * torch.ones(4, 3)).sum()) == [True]
    assert owned(lambda y: y().sum()) == [True]  # expanded, and therefore copied


@pytest.mark.parametrize(
    "build",
    [
        lambda y: ((y() + y()) * 2).sum(),
        lambda y: ((y() + y()).flatten() * 2).sum(),
        lambda y: ((y().flatten() + y().flatten()) * 2).sum(),
        lambda y: (hooked(y()) * 2).sum(),
        lambda y: (hooked(y().flatten()) * 2).sum(),
        lambda y: Kept.apply(y(), True).sum(),
        lambda y: FromArray.apply(y()).sum(),
    ],
    ids=["add", "view-of-shared", "views-of-shared", "hook", "hook-on-view", "attribute", "array"],
)
def test_shared_gradients(build: Loss) -> None:
    """Another branch, a hook, the operation itself or an array has the gradient too."""
    assert not any(owned(build))


def test_saved_gradients_are_shared_while_the_graph_is_kept() -> None:
    """What an operation saved is free only when its graph is."""
    assert owned(lambda y: Kept.apply(y(), False).sum(), retain_graph=True) == [False]


def test_given_gradients_are_shared() -> None:
    """The caller of ``backward`` has the gradient."""
    gradient = torch.ones(2, 3, 4)
    assert owned(lambda y: y(), gradient=gradient) == [False]


def test_memory_is_known_to_be_owned_wherever_it_is_first_asked_for() -> None:
    """Hooks that somebody has on saved tensors do not change the answer."""
    expected = ownership._counts_of_own_memory()
    assert all(expected)
    ownership._counts_of_own_memory.cache_clear()
    with saved_as_codes(), torch.inference_mode():
        assert ownership._counts_of_own_memory() == expected
