"""Ranges that come from a state_dict, and those of copies, are kept like ranges that were measured in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitwright.errors import CalibrationWarning
from bitwright.quantization import Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

MODES = pytest.mark.parametrize("mode", ["eager", "graph"])
PRESETS = pytest.mark.parametrize("preset", ["w8a8", "w4a4"])


def start(mode, preset):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4))
    quantizer = Quantizer(model, getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
    return quantizer, quantizer.prepare((torch.randn(8, 16) * 0.1,))


def calibrated(mode, preset):
    quantizer, prepared = start(mode, preset)
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(torch.randn(8, 16) * 3)
    return quantizer, prepared


def ranges(model):
    return [m.calculate_qparams()[0].detach().clone() for m in model.modules() if isinstance(m, FakeQuantizeImplBase)]


def trained(quantizer, model):
    with quantizer.training_mode(), torch.no_grad():
        model(torch.ones(8, 16) * 0.1)
    return ranges(model)


@MODES
@PRESETS
def test_training_goes_on_from_loaded_ranges(mode, preset):
    """As the model that was calibrated does; what was searched for stays as it is."""
    quantizer, prepared = calibrated(mode, preset)
    other, fresh = start(mode, preset)
    fresh.load_state_dict(prepared.state_dict())
    for one, two in zip(trained(quantizer, prepared), trained(other, fresh), strict=True):
        assert torch.equal(one, two)


@MODES
def test_ranges_that_were_stored_in_half_precision_are_loaded(mode):
    _, prepared = calibrated(mode, "w8a8")
    _, fresh = start(mode, "w8a8")
    fresh.load_state_dict({k: v.half() if v.is_floating_point() else v for k, v in prepared.state_dict().items()})
    for one, two in zip(ranges(prepared), ranges(fresh), strict=True):
        assert torch.equal(one.half().float(), two)


@MODES
def test_loaded_ranges_are_not_called_those_of_example_inputs(mode, recwarn):
    _, prepared = calibrated(mode, "w8a8")
    quantizer, fresh = start(mode, "w8a8")
    fresh.load_state_dict(prepared.state_dict())
    quantizer.finalize(backend="_torch")
    assert not [warning for warning in recwarn if issubclass(warning.category, CalibrationWarning)]


@MODES
def test_a_state_that_changes_nothing_leaves_the_ranges_to_calibration(mode):
    quantizer, prepared = start(mode, "w8a8")
    prepared.load_state_dict(copy.deepcopy(prepared.state_dict()))
    x = torch.randn(8, 16) * 1e-3
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    expected = x.abs().max() * 2 / 255
    assert any(scale.numel() == 1 and torch.allclose(scale, expected) for scale in ranges(prepared))


@MODES
def test_a_finalized_copy_from_training_observes_no_more(mode):
    """Averages of weights are copies whose observers are on."""
    quantizer, prepared = start(mode, "w8a8")
    x = torch.randn(8, 16)
    with quantizer.training_mode():
        prepared(x)
        twin = copy.deepcopy(prepared)
    with quantizer.evaluating(twin), torch.no_grad():
        expected = twin(x)
    final = quantizer.finalize(twin, backend="_torch").eval()
    with torch.no_grad():
        final(9 * x)
        assert torch.equal(final(x), expected)
