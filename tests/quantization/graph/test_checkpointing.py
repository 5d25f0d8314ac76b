"""Gradient checkpointing of prepared models: what is computed again is what was computed first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bitwright.quantization import Quantizer, QuantizerConfig


def network(normal_first: bool) -> nn.Sequential:
    """Batch norms that fold and one that does not."""
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)]
    return nn.Sequential(nn.BatchNorm2d(3), *layers) if normal_first else nn.Sequential(*layers)


def train(reentrant: bool | None, normal_first: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients and buffers of four steps with observers on; ``reentrant`` is None without checkpointing."""
    torch.manual_seed(0)
    model, batches = network(normal_first), [torch.randn(3, 3, 4, 4) * (i + 1) for i in range(4)]
    quantizer = Quantizer(model, QuantizerConfig())
    prepared: Any = quantizer.prepare((batches[0],))
    gradients = []
    with quantizer.training_mode():
        for batch in batches:
            prepared.zero_grad()
            x = batch.clone().requires_grad_()
            y = prepared(x) if reentrant is None else checkpoint(prepared, x, use_reentrant=reentrant)
            y.square().sum().backward()
            gradients += [x.grad, *(p.grad.clone() for p in prepared.parameters() if p.grad is not None)]
    return gradients, {name: buffer.clone() for name, buffer in prepared.named_buffers()}


@pytest.mark.parametrize("normal_first", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_change_nothing(reentrant: bool, normal_first: bool) -> None:
    """Gradients, observed ranges and the statistics of batch norms are those of training without checkpointing."""
    gradients, buffers = train(reentrant, normal_first)
    expected, expected_buffers = train(None, normal_first)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert buffers.keys() == expected_buffers.keys()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected_buffers[name]), name


class Checkpointed(nn.Module):
    """Checkpoints a layer itself, as transformers' models do, behind another layer."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.reentrant is None:
            return self.third(self.second(y))
        return self.third(checkpoint(self.second, y, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_model_checkpoints_trains(reentrant: bool) -> None:
    """The first pass of a reentrant checkpoint is one without gradients, and is not what the graph computes."""
    gradients = []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        model, x = Checkpointed(kind), torch.randn(3, 4)
        quantizer = Quantizer(model, QuantizerConfig())
        prepared: Any = quantizer.prepare((x,))
        with quantizer.training_mode():
            prepared(x).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in prepared.named_parameters()})
    plain, found = gradients
    assert len(plain) == 6
    assert all(torch.equal(found[name], gradient) for name, gradient in plain.items())
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)
