"""What a model writes in place to its parameters and buffers keeps every digit, whatever view it writes through."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from bitwright.errors import BitwrightWarning
from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.quantization import ModuleQuantizerConfig, Quantizer, QuantizerConfig
from bitwright.quantization.spec import default_activation_quantization_spec
from tests.measures import sqnr

from .test_insertion import simulator_names

WRITES = {
    "itself": lambda t: t.mul_(0.7),
    "data": lambda t: t.data.mul_(0.7),
    "slice": lambda t: t[1:].add_(0.3),
    "view": lambda t: t.view(-1).sub_(0.3),
    "t": lambda t: t.t().div_(0.7),
    "detach": lambda t: t.detach().mul_(0.7),
    "out": lambda t: torch.mul(t, 0.7, out=t),
    "out of a slice": lambda t: torch.add(t[0], t[1], out=t[2]),
}


class Writing(nn.Module):
    """Changes a parameter at its first call, or a buffer at every call."""

    def __init__(self, write, kind):
        super().__init__()
        self.fc, self.is_written = nn.Linear(4, 4), False
        self.write, self.kind = write, kind
        self.gain = nn.Parameter(torch.rand(4, 4) + 0.5)
        self.register_buffer("state", torch.rand(4, 4))

    def forward(self, x):
        if self.kind == "buffer" or not self.is_written:
            with torch.no_grad():
                WRITES[self.write](self.state if self.kind == "buffer" else self.gain)
            self.is_written = True
        return self.fc(x) * self.gain + self.state


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_through_views_is_no_activation(write, kind):
    """Simulators stand on the product and the sum that follow, which are told apart from writes of the same name."""
    torch.manual_seed(0)
    x, model = torch.randn(4, 4), Writing(write, kind).eval()
    truth = copy.deepcopy(model)
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    found = {name.partition("_quantize")[0] for name in simulator_names(prepared) if not name.startswith("fc.")}
    assert len(found) == 2
    assert not any(name.endswith("_") for name in found)
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
        truth(x)
    optimizer = torch.optim.SGD(prepared.fc.parameters(), 0.1)
    with quantizer.training_mode():
        prepared(x).square().mean().backward()
        optimizer.step()
        truth(x)
    assert torch.equal(prepared.gain, truth.gain)
    assert torch.equal(prepared.state, truth.state)


@pytest.mark.parametrize(("write", "kind"), [("data", "parameter"), ("t", "parameter"), ("slice", "buffer")])
def test_models_that_write_through_views_are_exported(write, kind, tmp_path):
    """A simulator that sees one call at most has no scale to write."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("coreai_torch")
    torch.manual_seed(0)
    x, model = torch.randn(4, 4), Writing(write, kind).eval()
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    kept = pytest.warns(BitwrightWarning, match="'state'.*keeps nothing for the next call")
    with kept if kind == "buffer" else contextlib.nullcontext():
        (onnx,) = run_onnx(export_onnx(prepared, (x,), tmp_path / "m.onnx"), (x,))
    path = export_coreai(prepared, (x,), tmp_path / "m.aimodel")
    states: dict[str, torch.Tensor] = {}
    run_coreai(path, (x,), states)
    (coreai,) = run_coreai(path, (x,), dict.fromkeys(states, prepared.state))  # the file's begin with zeros
    finalized = copy.deepcopy(quantizer).finalize(copy.deepcopy(prepared))
    with torch.no_grad():
        expected = prepared(x)
        assert torch.equal(onnx, expected)
        assert sqnr(expected, coreai) > 40
        assert sqnr(expected, finalized(x)) > 40


class Remembering(nn.Module):
    """Writes its input into a part of a buffer, and reads that."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, x):
        self.cache[:4].copy_(x)
        return torch.matmul(x, self.cache[:4].t())


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Remembering()

    def forward(self, x):
        return self.inner(x)


def test_what_is_written_takes_the_spec_of_a_boundary():
    """The input of a module is quantized for the cache too, and the cache again where a product reads it."""
    config = QuantizerConfig(
        global_config=None,
        module_name_configs={
            "inner": ModuleQuantizerConfig(module_input_spec={0: default_activation_quantization_spec()})
        },
        execution_mode="eager",
    )
    x = torch.randn(4, 4)
    quantizer = Quantizer(Around().eval(), config)
    prepared = quantizer.prepare((x,))
    names = simulator_names(prepared)
    assert sum(name.startswith("inner.copy_") for name in names) == 1
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    prepared(x)
    assert 10 < sqnr(x, prepared.inner.cache[:4]) < 60
    assert not prepared.inner.cache[4:].any()


class IntoOut(nn.Module):
    """Has sums written into a tensor that it made before."""

    def forward(self, x):
        y = torch.empty_like(x)
        torch.mul(x, 3, out=y)
        torch.add(y, x, out=y)
        return y


def test_what_is_given_as_out_holds_the_quantized_result():
    """The result was written to a copy, and the tensor that the model reads on stayed as it was."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    quantizer = Quantizer(IntoOut().eval(), QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    with torch.no_grad():
        found = prepared(x)
    assert sqnr(4 * x, found) > 30
    assert found.unique().numel() <= 256
