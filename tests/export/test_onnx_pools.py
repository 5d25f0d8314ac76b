"""Average pools between quantized activations in ONNX Runtime, whose windows may reach beyond the border."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("onnxscript")

from bitwright.export.onnx import compare_codes, export_onnx, run_onnx
from bitwright.quantization import Quantizer, QuantizerConfig

POOLS = {
    "two rows": lambda x: F.avg_pool2d(x, (2, 1), (2, 1), 0, ceil_mode=True),
    "squares": lambda x: F.avg_pool2d(x, 3, 2, 0, ceil_mode=True),
    "padded": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "padding that does not count": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "nothing beyond the border": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "one dimension": lambda x: F.avg_pool1d(x.flatten(1, 2), 5, 5, 0, ceil_mode=True),
    "three dimensions": lambda x: F.avg_pool3d(x[:, None], 2, 2, 0, ceil_mode=True),
}


class Pooled(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.layer, self.pool = nn.Conv2d(3, 4, 1), pool

    def forward(self, x):
        return self.pool(self.layer(x))


@pytest.mark.parametrize("name", POOLS)
def test_each_average_is_of_its_own_elements(name, tmp_path):
    """ONNX Runtime's average pool on codes divides what reaches beyond the border by the whole window."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 8)
    quantizer = Quantizer(Pooled(POOLS[name]).eval(), QuantizerConfig.presets.w8a8(execution_mode="graph"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    ready.eval()
    path = export_onnx(ready, (x,), tmp_path / "model.onnx")
    report = compare_codes(ready, path, (x,))
    assert report.codes > 0
    assert report.file_error < 1e-4  # of a step: only what lies half-way between two codes is another one
    with torch.no_grad():
        expected = ready(x)
    (actual,) = run_onnx(path, (x,))
    assert (actual - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("name", ["transposed", "cut off"])
def test_codes_do_not_get_into_a_pool_behind_what_moves_them(name, tmp_path):
    """ONNX Runtime's optimizer dequantizes behind a transposition or a slice, right in front of the pool."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 8)
    move = {"transposed": lambda x: x.transpose(2, 3), "cut off": lambda x: x[:, :, 1:, :5]}[name]
    model = nn.Sequential(Pooled(move), nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(4, 4, 1)).eval()
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    path = export_onnx(ready.eval(), (x,), tmp_path / "model.onnx")
    assert compare_codes(ready, path, (x,)).file_error < 1e-4


def test_averages_in_windows_are_those_of_the_model(tmp_path):
    """Many of three or four codes lie half-way between two codes, where the integer pool rounds otherwise."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 169)
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.AvgPool1d(4, 3)).eval()
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="graph"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    with torch.no_grad():
        expected = ready.eval()(x)
    assert torch.equal(run_onnx(export_onnx(ready, (x,), tmp_path / "model.onnx"), (x,))[0], expected)


class Maxima(nn.Module):
    """Max pools, whose last windows may begin in the padding; results are used again, as in the memory of others."""

    def forward(self, x):
        found = [
            F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode=True)
            for kernel, stride, padding, dilation in WINDOWS
        ]
        lines = F.max_pool1d(x.flatten(1, 2), 2, 3, 1, ceil_mode=True)
        return *(-one for one in found), lines, F.max_pool3d(x[:, None], 2, 3, 1, ceil_mode=True)


WINDOWS = (
    (2, 3, 1, 1), (3, 2, 1, 1), (2, 2, 0, 1), (2, 3, 0, 1), ((3, 2), (4, 3), (1, 0), 1), (2, 5, 1, 2), (3, 2, 1, 2)
)  # fmt: skip


def test_shapes_of_maxima_are_known(tmp_path):
    """ONNX counts windows that begin in the padding, and its runtime fails where it keeps memory for them."""
    onnx = pytest.importorskip("onnx")
    for size in ((6, 8), (9, 7)):
        x = torch.randn(2, 3, *size)
        path = export_onnx(Maxima().eval(), (x,), tmp_path / "m.onnx")
        expected = Maxima()(x)
        for one, found in zip(expected, run_onnx(path, (x,)), strict=True):
            assert torch.equal(found, one)
        inferred = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True)
        shapes = [[dim.dim_value for dim in out.type.tensor_type.shape.dim] for out in inferred.graph.output]
        assert shapes == [list(one.shape) for one in expected]


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_maxima_with_defaults_left_out(ceil_mode, tmp_path):
    """torch's translation wants a number for each dimension: of batches, single images, and sizes that are free."""

    class Reduced(nn.Module):
        def forward(self, x, image):
            pool = nn.MaxPool2d(2, ceil_mode=ceil_mode)
            return pool(x), pool(image), F.max_pool3d(x[:, None], 2, ceil_mode=ceil_mode), F.max_pool1d(image, 2)

    inputs = torch.randn(2, 3, 8, 6), torch.randn(3, 9, 7)
    shapes = {"x": {2: torch.export.Dim("height", min=4, max=64)}, "image": None}
    path = export_onnx(Reduced().eval(), inputs, tmp_path / "m.onnx", dynamic_shapes=shapes)
    other = torch.randn(2, 3, 12, 6), inputs[1]
    for found, expected in zip(run_onnx(path, other), Reduced()(*other), strict=True):
        assert torch.equal(found, expected)
