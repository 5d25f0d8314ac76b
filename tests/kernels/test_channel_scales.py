"""A weight times, or divided by, a scale for each channel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("bitwright.kernels.cpu.channel_scales")

from bitwright.kernels.channel_scales import divided, scaled, suits

Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("fused", "plain"), [(scaled, lambda w, s: w * s[:, None]), (divided, lambda w, s: w / s[:, None])]
)
def test_gradients_that_stand_for_many(fused: Form, plain: Form) -> None:
    """``is_grads_batched`` gives what torch's own operations give."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 16, generator=generator).requires_grad_()
    scale = torch.tensor([0.5, 0.7, 1.1, 2.0], requires_grad=True)
    gradients = torch.randn(3, 4, 16, generator=generator)
    assert suits(weight, scale.detach())
    found, expected = (
        torch.autograd.grad(form(weight, scale), (weight, scale), gradients, is_grads_batched=True)
        for form in (fused, plain)
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
