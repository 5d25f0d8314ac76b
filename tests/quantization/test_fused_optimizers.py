"""Optimizers that advance no version counter: what is derived from parameters follows them all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.quantization import Quantizer
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.quantization.qat.networks import MODES, ConvNet, images, make_config


class Foreign(torch.optim.Optimizer):
    """Writes as optimizers with kernels of their own do, unseen by autograd."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"])


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, fused=True),
    "foreign": Foreign,
}
all_optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def train(model, optimizer, steps=3):
    losses = []
    for seed in range(steps):
        x, y = images(seed)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def start(mode, kind):
    torch.manual_seed(0)
    quantizer = Quantizer(ConvNet(), make_config(mode, kind))
    return quantizer, quantizer.prepare((images()[0],))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["plain", "lsq"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_fused_or_not_trains_alike(mode, kind, name):
    """Losses agree with those of the same optimizer that writes by ordinary operations."""
    losses = []
    for fused in (False, True):
        quantizer, prepared = start(mode, kind)
        optimizer = getattr(torch.optim, name)(prepared.parameters(), lr=1e-2, fused=fused)
        with quantizer.training_mode():
            losses.append(train(prepared, optimizer))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


@all_optimizers
def test_learned_steps_are_read_anew(optimizer):
    """The step that quantizes is the parameter that the optimizer wrote."""
    quantizer, prepared = start("eager", "lsq")
    with quantizer.training_mode():
        train(prepared, OPTIMIZERS[optimizer](prepared.parameters()))
    for simulator in prepared.modules():
        if isinstance(simulator, FakeQuantizeImplBase):
            step = simulator.qparams_calculator.scale.abs().clamp(min=torch.finfo(torch.float32).eps)
            assert torch.equal(simulator.calculate_qparams()[0], step)


@all_optimizers
def test_kept_weights_are_quantized_anew(optimizer):
    """Also where only an element has changed that is none of those compared in the memory of a weight."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    quantizer = Quantizer(model, make_config("eager", "plain"))
    prepared = quantizer.prepare((torch.randn(2, 64),)).eval()
    weight = prepared.parametrizations.weight.original
    with torch.no_grad():
        before = prepared.weight.clone()
    weight.grad = torch.zeros_like(weight)
    weight.grad[1, 1] = 100.0 * before[1, 1].sign()  # to the other end of the range
    made = OPTIMIZERS[optimizer]([weight])
    made.param_groups[0]["lr"] = 0.5
    made.step()
    with torch.no_grad():
        assert prepared.weight[1, 1] != before[1, 1]
