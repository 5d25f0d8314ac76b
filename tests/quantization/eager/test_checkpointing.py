"""Gradient checkpointing of methods and closures: the second pass meets the simulators of the first."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitwright.quantization import Quantizer, QuantizerConfig


class Inner(nn.Module):
    """Calls functions itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, F.gelu(x) * 0.5)


class Net(nn.Module):
    """Checkpoints a method twice, a closure, and a child with calls of its own, between calls that are not repeated."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second, self.inner = nn.Linear(8, 8), nn.Linear(8, 8), Inner()
        self.reentrant = reentrant

    def part(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        y = self.inner(x)
        y = F.relu(self.second(F.gelu(y)))
        return torch.matmul(y, x.transpose(0, 1)) * factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            run: Any = lambda function, *args: function(*args)  # noqa: E731
        else:
            run = partial(checkpoint, use_reentrant=self.reentrant)
        x = F.relu(self.first(x)) + 1
        x = x + run(self.part, x, 0.1)[:, :1]
        x = torch.add(x, run(self.part, F.gelu(x), 0.2)[:, :1])
        return run(lambda y, z: F.relu(torch.add(self.inner(y), z)), run(self.inner, x), x) * 2


def train(reentrant: bool | None) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients and tensors of three steps."""
    torch.manual_seed(0)
    batches = [torch.randn(6, 8) * (i + 1) for i in range(3)]
    model = Net(reentrant)
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager"))
    prepared: Any = quantizer.prepare((batches[0],))
    gradients = []
    with quantizer.training_mode():
        for batch in batches:
            prepared.zero_grad()
            x = batch.clone().requires_grad_()
            prepared(x).square().sum().backward()
            gradients += [x.grad, *(p.grad.clone() for p in prepared.parameters() if p.grad is not None)]
    return gradients, {name: tensor.clone() for name, tensor in prepared.state_dict().items()}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_methods_and_closures_are_repeated_with_their_simulators(reentrant: bool) -> None:
    """Gradients and ranges are those of training without checkpointing."""
    gradients, state = train(reentrant)
    expected, expected_state = train(None)
    assert len(gradients) == len(expected)
    assert all(isinstance(gradient, torch.Tensor) for gradient in gradients)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)  # sums in another order
    assert state.keys() == expected_state.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected_state[name]), name
