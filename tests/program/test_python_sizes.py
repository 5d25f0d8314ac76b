"""Python's functions on sizes in the code of models that torch.export captures."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention

from bitwright.export.conversion import captured
from bitwright.export.targets import TARGETS
from bitwright.program.exporting import exported
from bitwright.program.python_sizes import python_on_sizes
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr


def windows_of(x, side):
    batch, height, width, channels = x.shape
    x = x.view(batch, height // side, side, width // side, side, channels)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, side * side, channels)


def joined(windows, side, height, width):
    """As in Swin transformers: the number of images is a quotient of floats."""
    batch = int(windows.shape[0] / (height * width / side / side))
    x = windows.view(batch, height // side, width // side, side, side, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(batch, height, width, -1)


class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        height, width = int(x.shape[1]), x.shape[2]
        return joined(self.layer(windows_of(x, 4)).softmax(1), 4, height, width) + x


@pytest.mark.parametrize("sizes", [{0: Dim("b", max=6)}, {0: Dim("b", max=6), 1: 4 * Dim("h", max=8)}])
def test_windows_hold_for_every_batch(sizes):
    model, x = Windows().eval(), torch.randn(2, 8, 12, 4)
    program = exported(model, (x,), {}, dynamic_shapes={"x": sizes}, strict=False)
    for height in (8, 20) if 1 in sizes else (8,):
        other = torch.randn(3, height, 12, 4)
        assert torch.equal(program.module()(other), model(other))
    assert "int" not in globals()


def test_windows_are_quantized_with_a_dynamic_batch():
    quantizer = Quantizer(Windows(), QuantizerConfig.presets.w8a8(execution_mode="graph"))
    x = torch.randn(2, 8, 12, 4)
    prepared = quantizer.prepare((x,), dynamic_shapes={"x": {0: Dim("b", max=6)}})
    with quantizer.calibration_mode():
        prepared(x)
    assert prepared.eval()(torch.randn(3, 8, 12, 4)).shape == (3, 8, 12, 4)


def test_classes_compare_with_the_stand_in_as_with_int():
    with python_on_sizes(Windows()):
        number = globals()["int"]
        assert int is number
        assert all(isinstance(one, int) for one in (3, True))
        assert not isinstance(3.0, int)
        assert issubclass(bool, int)
        assert (3).__class__ in (int, float)
        assert (int("7").__class__, int(2.9), int("11", base=2)) == ((1).__class__, 2, 3)
    assert "int" not in globals()


class Attention(nn.Module):
    """As in OpenAI's Whisper."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return scaled_dot_product_attention(y, x, y, is_causal=x.shape[1] > 1) + y


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_flags_are_comparisons_of_sizes(mode):
    """The call is simulated as planned, too, which its place in the code decides in eager mode."""
    x, shapes = torch.randn(2, 8, 4), {"x": {1: Dim("length", max=32)}}
    quantizer = Quantizer(Attention().eval(), QuantizerConfig.presets.w8a8(execution_mode=mode))
    prepared = quantizer.prepare((x,), dynamic_shapes=shapes if mode == "graph" else None)
    with quantizer.calibration_mode():
        prepared(x)
    program = captured(prepared.eval(), (x,), None, shapes)
    for length in (8, 5, 31):
        other = torch.randn(2, length, 4)
        assert torch.equal(program.module()(other), prepared(other))
    assert globals()["scaled_dot_product_attention"] is torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("target", ["onnx", "coreai"])
@pytest.mark.parametrize("make", [Windows, Attention])
def test_files_take_other_sizes(make, target, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    x = torch.randn(2, 8, 12, 4) if make is Windows else torch.randn(2, 8, 4)
    quantizer = Quantizer(make().eval(), QuantizerConfig.presets.w8a8(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    place = 0 if make is Windows else 1
    shapes = {"x": {place: Dim("size", max=32)}}
    path = TARGETS[target].write(prepared.eval(), (x,), tmp_path / f"model{TARGETS[target].suffix}", {}, shapes)
    other = torch.cat([x, x], place)[(slice(None),) * place + (slice(3),)]
    assert sqnr(prepared(other), TARGETS[target].run(path, (other,))[0]) > 60


_ASKING = """
import functools
from torch import nn

def decorated(function):
    return functools.wraps(function)(lambda *args: function(*args))

class Asking(nn.Module):
    {decorator}
    def asks(self, size):
        return type(size) is int

    def forward(self, x):
        return x
"""


@pytest.mark.parametrize("decorator", ["", "@decorated", "@property", "@classmethod"])
def test_code_that_asks_for_int_itself_keeps_it(decorator, monkeypatch):
    module = ModuleType("a_model_of_its_own")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(_ASKING.format(decorator=decorator), vars(module))
    with python_on_sizes(module.Asking()):
        assert "int" not in vars(module)
    exec(_ASKING.format(decorator=decorator).replace(" is int", " == int"), vars(module))
    with python_on_sizes(module.Asking()):
        assert "int" in vars(module)
    assert "int" not in vars(module)
