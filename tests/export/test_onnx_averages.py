"""Averages of codes: ONNX files add in PyTorch's order, so that ties are rounded alike."""

from __future__ import annotations

import platform

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx

from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.quantization import ModuleQuantizerConfig, Quantizer, QuantizerConfig
from bitwright.quantization.config import OpQuantizerConfig

from .models import BYTES, ENDING_IN_AVERAGES, W8, prepared

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="sums in lanes of other widths")

ROWS = [2, 5, 8, 12, 49, 64, 100, 300]
COLUMNS = [(7, 3), (17, 6), (16, 32), (49, 40), (100, 77), (256, 5)]


class Averages(nn.Module):
    """Means of parts of one doubled tensor, over rows, over columns, and over two dimensions."""

    def forward(self, x):
        x = x * 2.0
        over_rows = [x[:, : 3 * count].unflatten(1, (3, count)).mean(-1) for count in ROWS]
        over_columns = [x[:, : rows * width].unflatten(1, (rows, width)).mean(1) for rows, width in COLUMNS]
        first, last = x[:, :144].unflatten(1, (4, 6, 6)), x[:, :144].unflatten(1, (6, 6, 4))
        turned = last.permute(0, 3, 1, 2)
        means = last.mean((1, 2)), turned.mean((2, 3)), turned.mean(1, True), turned.flatten(2).transpose(1, 2).mean(1)
        return (*over_rows, *over_columns, F.adaptive_avg_pool2d(first, 1), *means)


def test_sums_are_those_of_pytorch_to_the_last_bit(tmp_path):
    """Nothing is quantized behind the averages, so every bit of them is seen; also of another number of rows."""
    torch.manual_seed(0)
    x = torch.randn(3, 7700)
    product = OpQuantizerConfig(op_input_spec=None, op_output_spec={"*": BYTES}, op_state_spec=None)
    config = ModuleQuantizerConfig(
        op_input_spec=None, op_output_spec=None, op_state_spec=None, op_type_config={"mul": product}
    )
    batch = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    quantizer = Quantizer(Averages(), QuantizerConfig(global_config=config))
    ready = quantizer.prepare((x,), dynamic_shapes=batch)
    with quantizer.calibration_mode():
        ready(x)
    path = export_onnx(ready, (x,), tmp_path / "model.onnx", dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert "ReduceMean" not in {node.op_type for node in onnx.load(path).graph.node}
    for inputs in (x, torch.randn(5, 7700)):
        for number, (expected, found) in enumerate(zip(ready(inputs), run_onnx(path, (inputs,)), strict=True)):
            assert torch.equal(expected, found), number


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("case", list(ENDING_IN_AVERAGES))
def test_networks_that_end_in_averages_have_the_same_codes(case, mode, tmp_path):
    """Input and output of a pool have one scale, so one of 16 averages lies between two codes."""
    torch.manual_seed(0)
    model, sizes, memory_format = ENDING_IN_AVERAGES[case]
    x = torch.randn(sizes).to(memory_format=memory_format)
    _, ready = prepared(model().eval(), x, W8, BYTES, mode)
    assert torch.equal(ready(x), run_onnx(export_onnx(ready, (x,), tmp_path / "model.onnx"), (x,))[0])
