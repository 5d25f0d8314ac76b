"""Buffers that a model writes to when it is called: exporters leave them alone, files go on with them or say so."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from bitwright.errors import BitwrightWarning
from bitwright.export.targets import TARGETS
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.matrix import each_pair
from tests.measures import sqnr

MODES = ["eager", "graph"]
both_modes = pytest.mark.parametrize("mode", MODES)


class RunningMean(nn.Module):
    """Subtracts a running mean; a batch norm has buffers of its own, which nothing writes to."""

    def __init__(self, start=0.0):
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("mean", torch.full((16,), start))

    def forward(self, x):
        y = self.norm(self.layer(x))
        self.mean.mul_(0.9).add_(y.mean(0) * 0.1)
        return y - self.mean


class Assigned(RunningMean):
    """Keeps the running mean in a new tensor."""

    def forward(self, x):
        y = self.norm(self.layer(x))
        self.mean = 0.9 * self.mean + y.mean(0) * 0.1
        return y - self.mean


class Inside(nn.Sequential):
    """Keeps the running mean in a submodule."""

    def __init__(self, start=0.0):
        super().__init__(nn.Linear(16, 16), Assigned(start))


class Filled(RunningMean):
    """Leaves a tensor behind that the next call does not read."""

    def forward(self, x):
        self.mean.copy_(x.mean(0))
        return self.norm(self.layer(x)) - x.mean(0)


class Counting(RunningMean):
    """Counts calls and watches ranges, one from the other, and computes nothing from them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.norm(self.layer(x))
        self.largest = torch.where(self.calls > 1, torch.maximum(self.largest, y.detach().max()), y.detach().max())
        return y


KINDS = {kind.__name__: kind for kind in (RunningMean, Assigned, Inside)}


class Indirect(RunningMean):
    """Computes its result from one state, which is computed from another one of the call before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x):
        y = self.norm(self.layer(x)) - self.mean
        self.mean = self.mean + self.largest
        self.largest += y.max()
        return y


def prepared(mode, preset="w8a8", kind=RunningMean, **options):
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    config = getattr(QuantizerConfig.presets, preset)(execution_mode=mode)
    quantizer = Quantizer(kind(**options).eval(), config)
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    return ready.eval(), x


def require(target):
    if TARGETS[target].missing():
        pytest.skip(f"needs {target}")


def written(target, ready, x, folder):
    return TARGETS[target].write(ready, (x,), folder / f"model{TARGETS[target].suffix}", {}, None)


@both_modes
@pytest.mark.parametrize("target", ["torch", "onnx", "coreai", "coreml", "executorch"])
@pytest.mark.filterwarnings("ignore:The model writes to its state", "ignore:The states")
def test_the_models_own_buffers_stay(target, mode, tmp_path):
    """Converters and checks run the model, whose states are the user's."""
    require(target)
    ready, x = prepared(mode)
    before = {name: value.clone() for name, value in ready.state_dict().items()}
    written(target, ready, x, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in ready.state_dict().items())


@both_modes
@pytest.mark.filterwarnings("ignore:The model writes to its state")
def test_codes_are_compared_from_one_state(mode, tmp_path):
    """The exact run begins where the first one began, and the model is left there."""
    require("onnx")
    from bitwright.export.onnx import compare_codes

    ready, x = prepared(mode)
    path = written("onnx", ready, x, tmp_path)
    before = {name: value.clone() for name, value in ready.state_dict().items()}
    report = compare_codes(ready, path, (x,))
    assert report.codes > 100
    assert max(report.file_error, report.model_error) < 1e-4
    assert all(torch.equal(value, before[name]) for name, value in ready.state_dict().items())


@pytest.mark.parametrize(("mode", "preset", "kind"), each_pair(MODES, ["w8a8", "w8"], KINDS))
def test_executorch_goes_on_from_the_models_state(mode, preset, kind, tmp_path):
    """Three calls of one loaded program are three calls of the model, whose states do not begin with zeros."""
    require("executorch")
    from bitwright.export.executorch.runtime import load

    ready, x = prepared(mode, preset, kind, start=0.3)
    with torch.no_grad():
        ready(x)
    program = load(written("executorch", ready, x, tmp_path))
    twin = copy.deepcopy(ready)
    for _ in range(3):
        (actual,) = program.execute([x])
        with torch.no_grad():
            assert sqnr(twin(x), actual.clone()) > 100


LOST = r"writes to its state '(1\.)?mean' when it is called"


@pytest.mark.parametrize(("target", "kind", "mode"), each_pair(["onnx", "coreml"], KINDS, MODES))
def test_lost_states_are_told(target, kind, mode, tmp_path):
    """Files that keep nothing from call to call say so, in the plan and when they are written."""
    require(target)
    config = QuantizerConfig.presets.w8(execution_mode=mode)
    ready, x = prepared(mode, kind=kind)
    with pytest.warns(BitwrightWarning, match=LOST):
        Quantizer(kind(), config).plan((x,), target=target)
    with pytest.warns(BitwrightWarning, match=LOST):
        written(target, ready, x, tmp_path)


@both_modes
@pytest.mark.parametrize("target", ["onnx", "coreml"])
def test_states_behind_states_are_told(target, mode, tmp_path):
    require(target)
    ready, x = prepared(mode, kind=Indirect)
    with pytest.warns(BitwrightWarning, match="writes to its state 'mean', 'largest'|'largest', 'mean'"):
        written(target, ready, x, tmp_path)


@pytest.mark.parametrize(
    ("target", "kind", "mode"), each_pair(["onnx", "coreml"], {"Filled": Filled, "Counting": Counting}, MODES)
)
def test_what_changes_no_later_output_is_not_told(target, kind, mode, tmp_path):
    require(target)
    ready, x = prepared(mode, kind=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BitwrightWarning)
        Quantizer(kind(), QuantizerConfig.presets.w8(execution_mode=mode)).plan((x,), target=target)
        written(target, ready, x, tmp_path)
