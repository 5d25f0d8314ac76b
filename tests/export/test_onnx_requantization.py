"""Quantizers and pools in ONNX files that change no code: left out, on fewer elements, or a look-up in a table."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime

from bitwright.export.onnx import compare_codes, export_onnx, run_onnx
from bitwright.quantization import Quantizer, QuantizerConfig


def _written(model, x, path, mode, **options):
    """A W8A8 model and its file."""
    quantizer = Quantizer(model.eval(), QuantizerConfig.presets.w8a8(execution_mode=mode))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    return ready.eval(), export_onnx(ready, (x,), path, **options)


def _at_run_time(path):
    """Nodes of the graph that ONNX Runtime makes of a file."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_name("optimized.onnx"))
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return onnx.load(path.with_name("optimized.onnx")).graph.node


class Pooled(nn.Module):
    """A pool behind a narrow convolution, behind a wide one, behind a sum, and one that is not alone."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 64, 3, padding=1, bias=False)
        self.deep = nn.Conv2d(64, 64, 3, padding=1, bias=False)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.narrow(x)), 3, 2, 1)
        y = self.wide(x)
        x = F.max_pool2d(y + y.flip(1), 2) + y[:, :, ::2, ::2]
        return F.max_pool2d(self.deep(x), 2)


@pytest.mark.parametrize(("mode", "kernels"), [("eager", True), ("eager", False), ("graph", True), ("graph", "fused")])
def test_pools_take_floats_but_behind_integer_convolutions(mode, kernels, tmp_path):
    """ONNX Runtime's pool of codes is ten times as slow as that of floats, if the channels are not last."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 16, 16)
    ready, path = _written(Pooled(), x, tmp_path / "m.onnx", mode, integer_kernels=kernels)
    with torch.no_grad():
        assert torch.allclose(run_onnx(path, (x,))[0], ready(x), atol=0.03 if kernels == "fused" else 1e-6)
    nodes = _at_run_time(path)
    makers = {output: node.op_type for node in nodes for output in node.output}
    sources = [makers.get(node.input[0]) for node in nodes if node.op_type in ("MaxPool", "NhwcMaxPool")]
    assert len(sources) == 3
    assert not {"QuantizeLinear", "DequantizeLinear", "Transpose", "QLinearAdd"} & set(sources)
    assert compare_codes(ready, path, (x,)).file_error < (1 if kernels == "fused" else 1e-4)


def test_a_pool_in_front_of_a_quantizer_quantizes_less(tmp_path):
    """The largest code is that of the largest value."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2))
    ready, path = _written(model, x, tmp_path / "m.onnx", "eager")
    with torch.no_grad():
        assert torch.equal(run_onnx(path, (x,))[0], ready(x))
    nodes = onnx.load(path).graph.node
    order = [node.op_type for node in nodes if node.op_type in ("Conv", "MaxPool", "QuantizeLinear")]
    assert order[:3] == ["QuantizeLinear", "Conv", "MaxPool"]


class Moved(nn.Module):
    """What is quantized again as it was, behind operators that only move it."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(12, 16), nn.Linear(8, 4)

    def forward(self, x):
        y = self.one(x).reshape(2, 3, 2, 8).transpose(1, 2)[:, :, 1:]
        return self.other(torch.relu(y).flatten(1, 2))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("unsigned", [True, False])
def test_what_was_quantized_so_before_is_not_quantized_again(mode, unsigned, tmp_path):
    """Each quantizer that would return its input's codes is left out, and the others are found by their own codes."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12)
    ready, path = _written(Moved(), x, tmp_path / "m.onnx", mode, unsigned_activations=unsigned)
    with torch.no_grad():
        assert torch.allclose(run_onnx(path, (x,))[0], ready(x), atol=0 if unsigned else 0.02)
    kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert kinds["QuantizeLinear"] <= 4  # the input, both results, and what is rectified
    report = compare_codes(ready, path, (x,))
    assert len(report.rows) == kinds["QuantizeLinear"]
    assert report.differing == 0 or not unsigned


class Twice(nn.Module):
    """One activation, called in front of a layer on codes that it leaves as they are, and on others."""

    def __init__(self):
        super().__init__()
        self.layer, self.same = nn.Linear(6, 6), nn.Identity()

    def forward(self, x):
        y = torch.relu(self.layer(x))
        return self.layer(y.reshape(3, 2, 6)), self.layer(torch.tanh(y))


def test_codes_are_compared_with_those_of_their_use(tmp_path):
    """A use of a quantizer that the file leaves out is not taken for the next one."""
    torch.manual_seed(0)
    x = torch.randn(6, 6)
    ready, path = _written(Twice(), x, tmp_path / "m.onnx", "eager")
    report = compare_codes(ready, path, (x,))
    assert report.codes > 0
    assert report.file_error < 1e-4


@pytest.mark.parametrize("shift", [-40, 0, 90])
def test_codes_for_codes_are_looked_up_and_right(shift, tmp_path):
    """Codes of a layer become codes of another scale behind a ReLU, through ONNX Runtime's table."""
    torch.manual_seed(0)
    x = (torch.arange(256.0) - 128 + shift)[:, None] * 0.013
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    nn.init.constant_(model[0].weight, -1 if shift == 90 else 1)
    nn.init.zeros_(model[0].bias)
    ready, path = _written(model, x, tmp_path / "m.onnx", "eager")
    with torch.no_grad():
        assert torch.equal(run_onnx(path, (x,))[0], ready(x))
    kinds = [node.op_type for node in _at_run_time(path)]
    assert "QLinearLeakyRelu" in kinds
    assert "Relu" not in kinds
