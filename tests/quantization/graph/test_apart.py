"""Places that would share a range with much larger numbers have one of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.quantization import Quantizer, QuantizerConfig
from bitwright.quantization.spec import FakeQuantizeImplBase


class HandsItsInputOn(nn.Module):
    """Features beside smaller copies of the picture, as segmentation networks have them."""

    def __init__(self, growth: float) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(11, 8, 3, 2, 1)
        self.last = nn.Conv2d(11, 4, 1)
        self.growth = growth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = F.avg_pool2d(x, 2)
        y = torch.cat((self.first(x).relu() * self.growth, half), 1)
        y = torch.cat((self.second(y).relu(), F.avg_pool2d(half, 2)), 1)
        return self.last(y)


def prepare(growth, x, **options):
    torch.manual_seed(0)
    model = HandsItsInputOn(growth).eval()
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="graph"))
    return model, quantizer, quantizer.prepare((x,), **options)


def calibrate(quantizer, prepared, x):
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    return prepared.eval()


def simulators(prepared):
    """Each simulator of an activation, with the names under which it stands."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in prepared.named_modules(remove_duplicate=False):
        if isinstance(module, FakeQuantizeImplBase) and module.quantization_target.value == "activation":
            found.setdefault(module, []).append(name)
    return found


def sqnr(expected, actual):
    return float(10 * torch.log10(expected.square().sum() / (expected - actual).square().sum()))


@pytest.mark.parametrize("growth", [1.0, 500.0])
def test_a_picture_beside_large_features(growth, caplog):
    """One range for all would round the picture to zero in front of the first layer."""
    x = torch.randn(2, 3, 16, 16)
    model, quantizer, prepared = prepare(growth, x)
    calibrate(quantizer, prepared, x)
    with torch.no_grad():
        assert sqnr(model(x), prepared(x)) > 25
    assert ("it has one of its own" in caplog.text) == (growth > 1)
    shared = max(len(names) for names in simulators(prepared).values())
    assert shared > 2  # what is of like size still has one range
    for simulator, names in simulators(prepared).items():
        assert simulator.qparams_calculator.tensors_per_step == len(names)
        assert not simulator.is_observing()


def test_a_state_for_other_places():
    """A state of a model whose places share otherwise is taken as it is, in both directions."""
    x = torch.randn(2, 3, 16, 16)
    _, quantizer, apart = prepare(500.0, x)
    calibrate(quantizer, apart, x)
    _, other, together = prepare(500.0, torch.zeros(2, 3, 16, 16))  # in which all places see next to nothing
    assert len(simulators(together)) < len(simulators(apart))
    together.load_state_dict(apart.state_dict())
    with torch.no_grad():
        assert torch.equal(together.eval()(x), apart(x))
    with other.training_mode():
        together(x).sum().backward()
    _, quantizer, shared = prepare(500.0, torch.zeros(2, 3, 16, 16))
    calibrate(quantizer, shared, x)
    apart.load_state_dict(shared.state_dict())
    with torch.no_grad():
        assert torch.equal(shared(x), apart(x))
        assert torch.equal(copy.deepcopy(apart)(x), apart(x))
