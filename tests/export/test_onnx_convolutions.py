"""Transposed convolutions with more output padding than ONNX Runtime takes: as much as their dilation, not stride."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

pytest.importorskip("onnxscript")

from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

CASES = {
    "beyond the products": {"stride": 2, "dilation": 3, "output_padding": 2},
    "with padding that holds a part": {"stride": 2, "dilation": 3, "output_padding": 2, "padding": 1},
    "with padding that holds it all": {"stride": 2, "dilation": 3, "output_padding": 2, "padding": 2, "bias": False},
    "in groups": {"stride": 1, "dilation": 2, "output_padding": 1, "groups": 2},
}


@pytest.mark.parametrize("preset", ["w8", "w8a8"])
@pytest.mark.parametrize("case", CASES)
def test_output_padding_of_the_dilation(case, preset, tmp_path):
    torch.manual_seed(0)
    _check(nn.ConvTranspose2d(4, 6, 3, **CASES[case]), (5, 6), preset, tmp_path)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (nn.ConvTranspose1d, (5,)),
        (nn.ConvTranspose3d, (3, 4, 3)),
        # One axis as ONNX Runtime takes it, one with more.
        (lambda *args, **_: nn.ConvTranspose2d(*args, stride=(1, 3), dilation=2, output_padding=(1, 1)), (4, 5)),
    ],
)
def test_output_padding_in_other_dimensions(kind, sizes, tmp_path):
    torch.manual_seed(0)
    _check(kind(4, 6, 3, stride=2, dilation=3, output_padding=2, padding=1), sizes, "w8a8", tmp_path)


def _check(layer, sizes, preset, tmp_path):
    x = torch.randn(2, 4, *sizes)
    quantizer = Quantizer(nn.Sequential(layer).eval(), getattr(QuantizerConfig.presets, preset)(execution_mode="eager"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    ready.eval()
    path = export_onnx(ready, (x,), tmp_path / "model.onnx", dynamic_shapes=({0: Dim.DYNAMIC, 2: Dim.DYNAMIC},))
    other = torch.randn(3, 4, sizes[0] + 2, *sizes[1:])
    assert sqnr(ready(other), run_onnx(path, (other,))[0]) > 100
