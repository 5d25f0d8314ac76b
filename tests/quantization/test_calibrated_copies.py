"""Calibrating a copy of a prepared model, made before or after the model itself was calibrated."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from bitwright.quantization import Quantizer
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.quantization.qat.networks import MODES, ConvNet, images, make_config

KINDS = ("plain", "lsq", "percentile")
WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}
both_modes = pytest.mark.parametrize("mode", MODES)
all_kinds = pytest.mark.parametrize("kind", KINDS)


def start(mode, kind):
    """A model that was prepared with inputs much larger than the data."""
    torch.manual_seed(0)
    quantizer = Quantizer(ConvNet(), make_config(mode, kind))
    return quantizer, quantizer.prepare((images()[0] * 100,))


def calibrate(quantizer, model, seed=1):
    with quantizer.calibration_mode(model), torch.no_grad():
        model(images(seed)[0])


def scales(model):
    return [m.calculate_qparams()[0].detach().clone() for m in model.modules() if isinstance(m, FakeQuantizeImplBase)]


@both_modes
@all_kinds
@pytest.mark.parametrize("way", WAYS)
def test_example_inputs_leave_no_trace_in_a_copy(mode, kind, way):
    """A copy made right after ``prepare`` calibrates as the original does."""
    quantizer, prepared = start(mode, kind)
    twin = WAYS[way](prepared)
    calibrate(quantizer, twin)
    calibrate(quantizer, prepared)
    assert all(torch.equal(one, other) for one, other in zip(scales(prepared), scales(twin), strict=True))


@both_modes
@all_kinds
def test_a_calibrated_copy_goes_on(mode, kind):
    """What a copy saw as part of the calibrated original still counts."""
    quantizer, prepared = start(mode, kind)
    calibrate(quantizer, prepared)
    twin = copy.deepcopy(prepared)
    for seed in (2, 3):
        calibrate(quantizer, prepared, seed)
        calibrate(quantizer, twin, seed)
    assert all(torch.equal(one, other) for one, other in zip(scales(prepared), scales(twin), strict=True))


@both_modes
def test_a_copy_with_a_loaded_state_goes_on(mode):
    """Ranges from the state_dict of a calibrated model are no example inputs'."""
    quantizer, prepared = start(mode, "plain")
    twin = copy.deepcopy(prepared)
    calibrate(quantizer, prepared)
    twin.load_state_dict(prepared.state_dict())
    for model in (prepared, twin):
        calibrate(quantizer, model, 2)
    assert all(torch.equal(one, other) for one, other in zip(scales(prepared), scales(twin), strict=True))
