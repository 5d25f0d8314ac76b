"""Codes of ONNX files beside those of the prepared model, each quantizer for itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx

from bitwright.artifact.sites import activation_simulators
from bitwright.export.onnx import compare_codes, export_onnx, run_onnx
from bitwright.export.onnx.activations import has_nodes
from bitwright.quantization import QuantizationSpec, Quantizer, QuantizerConfig

from .models import BYTES, W8, Deconv, Mlp, Tied, built, prepared
from .test_random_models import _prepared

TIE = 1e-4
"""How near a bound, in steps, float32 sums of a few hundred terms are decided by the order of additions."""


class Attending(nn.Module):
    """Layers of a transformer on a stream that is quantized after every addition."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(4))
        self.parts = nn.ModuleList(nn.Linear(96, 288) for _ in range(4))
        self.outs = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))

    def forward(self, x):
        for norm, parts, out in zip(self.norms, self.parts, self.outs, strict=True):
            q, k, v = parts(norm(x))[:, None].chunk(3, -1)
            x = x + torch.relu(out(F.scaled_dot_product_attention(q, k, v)[:, 0]))
        return x


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_all_codes_are_those_of_exact_sums_or_ties(mode, tmp_path):
    """Whatever becomes of the output of a deep network, no quantizer of it rounds wrongly."""
    torch.manual_seed(0)
    model, x = Attending().eval(), torch.randn(4, 64, 96)
    _, ready = prepared(model, x, W8, BYTES, mode)
    report = compare_codes(ready, export_onnx(ready, (x,), tmp_path / "model.onnx"), (x,))
    assert len(report.rows) >= 16
    assert report.codes > 300_000
    assert report.differing <= 20
    assert max(report.file_error, report.model_error) < TIE


class Flagged(nn.Module):
    """Takes a tensor and a flag by name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x, *, shift, positive):
        y = self.layer(x) + shift
        return y.relu() if positive else y


def test_flags_among_keyword_inputs_are_for_the_model_only(tmp_path):
    torch.manual_seed(0)
    x, named = torch.randn(4, 16), {"shift": torch.randn(16), "positive": True}
    quantizer = Quantizer(Flagged().eval(), QuantizerConfig.presets.w8a8(execution_mode="eager"))
    ready = quantizer.prepare((x,), example_kwargs=named)
    with quantizer.calibration_mode():
        ready(x, **named)
    path = export_onnx(ready, (x,), tmp_path / "model.onnx", example_kwargs=named)
    report = compare_codes(ready, path, (x,), named)
    assert report.codes
    assert max(report.file_error, report.model_error) < TIE


def test_counts_are_those_of_float64(tmp_path):
    """The output's codes of one layer, computed here once more from the codes at its input."""
    torch.manual_seed(2)
    layer, x = nn.Linear(700, 400).eval(), torch.randn(500, 700)
    _, ready = prepared(layer, x, W8, BYTES)
    path = export_onnx(ready, (x,), tmp_path / "model.onnx", integer_kernels="fused")
    entry, row = compare_codes(ready, path, (x,)).rows
    assert entry.differing == 0
    assert entry.file_error < 1e-6
    (found,) = run_onnx(path, (x,))
    inputs, outputs = activation_simulators(ready).values()
    weight = layer.weight.detach()
    codes = (weight / (weight.abs().amax(1, keepdim=True) * 2 / 255)).round().clamp(-128, 127)
    decoded = codes * (weight.abs().amax(1, keepdim=True) * 2 / 255)  # in float32, as the file holds them
    exact = inputs(x).double() @ decoded.double().T + layer.bias.detach().double()
    step = float(outputs.calculate_qparams()[0])
    limits = {name: float(end) / step for name, end in (("min", found.min()), ("max", found.max()))}
    wrong = ((exact / step).clamp(**limits) - (found.double() / step).round()).abs() - 0.5
    assert row.file_inexact == int((wrong > 0).sum()) > 0
    assert row.file_error == pytest.approx(float(wrong.max()), rel=0.05)


def test_operators_in_place_are_repeated_on_their_own_inputs(tmp_path):
    """What one changed in the first run must not be the input of the second one, with exact sums."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 48), nn.Hardswish(inplace=True), nn.Linear(48, 16), nn.ReLU(inplace=True)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(64, 16)
    _, ready = prepared(model, x, W8, BYTES)
    report = compare_codes(ready, export_onnx(ready, (x,), tmp_path / "model.onnx", integer_kernels=False), (x,))
    assert report.codes > 64 * (16 + 48 + 16)
    assert max(report.file_error, report.model_error) < TIE


@pytest.mark.parametrize("kind", [Mlp, Deconv, Tied])
def test_a_wrong_weight_is_seen_where_it_is(kind, tmp_path):
    """Of a file with one code of one weight changed; the layers in front are as they were."""
    model, x = built(kind)
    _, ready = prepared(model, x, W8, BYTES)
    path = export_onnx(ready, (x,), tmp_path / "model.onnx")
    assert compare_codes(ready, path, (x,)).file_error < TIE
    file = onnx.load(path)
    bytes_ = onnx.TensorProto.UINT8, onnx.TensorProto.INT8  # of weights whose sums fit in 16 bits as they are, or not
    last = [i for i in file.graph.initializer if i.data_type in bytes_ and len(i.dims) == 2][-1]
    codes = onnx.numpy_helper.to_array(last).copy()
    low, middle, high = (1, 128, 255) if codes.dtype == np.uint8 else (-127, 0, 127)
    codes[0] = np.where(codes[0] > middle, low, high)
    last.CopyFrom(onnx.numpy_helper.from_array(codes, last.name))
    onnx.save(file, path)
    report = compare_codes(ready, path, (x,))
    assert report.file_error > 1
    assert report.model_error < TIE
    assert report.rows[0].file_error < TIE
    assert 0 < report.differing < report.codes


def test_files_of_other_models_are_refused(tmp_path):
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8, BYTES)
    other, y = built(Deconv)
    _, others = prepared(other, y, W8, BYTES)
    path = export_onnx(others, (y,), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="was written from another one"):
        compare_codes(ready, path, (y,))


@pytest.mark.parametrize(
    "activation", [QuantizationSpec(dtype="float8_e4m3fn"), QuantizationSpec(qparam_calculator_cls="dynamic")]
)
def test_activations_without_codes_have_no_rows(activation, tmp_path):
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8, activation)
    report = compare_codes(ready, export_onnx(ready, (x,), tmp_path / "model.onnx"), (x,))
    assert report.rows == ()
    assert str(report).startswith("0 of 0 codes")


def _check_random(seed, path):
    found = _prepared(seed)
    if found is None or not found[0].has_activations:
        return
    case, ready, _ = found
    simulators = activation_simulators(ready).values()
    if any(not has_nodes(s) or s.dtype.is_floating_point for s in simulators):
        return
    if next(case.model.parameters()).dtype != torch.float32:
        return
    report = compare_codes(ready, export_onnx(ready, case.inputs, path, integer_kernels="exact"), case.inputs)
    assert report.file_error < TIE, case.name


@pytest.mark.parametrize("count", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_random_models_have_no_wrong_codes(count, tmp_path):
    """However far ties have taken their outputs from the prepared model's."""

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 1 << 20))
    def check(seed):
        _check_random(seed, tmp_path / "model.onnx")

    check()
