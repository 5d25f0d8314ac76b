"""Recurrent layers in ONNX files: projections, which ONNX's operator lacks, and lengths that are not fixed silently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from bitwright.export.conversion import ConversionError
from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

LENGTH = torch.export.Dim("length", min=2, max=32)


class First(nn.Module):
    """What a recurrent layer returns at all steps."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def prepared(model, inputs, mode):
    torch.manual_seed(0)
    return Quantizer(model.eval(), QuantizerConfig.presets.w8(execution_mode=mode)).prepare(inputs).eval()


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2, "bias": False}])
def test_lstms_with_projections(options, mode, tmp_path):
    """They are written in steps."""
    x = torch.randn(2, 5, 16)
    ready = prepared(First(nn.LSTM(16, 16, proj_size=8, batch_first=True, **options)), (x,), mode)
    (actual,) = run_onnx(export_onnx(ready, (x,), tmp_path / "model.onnx"), (x,))
    with torch.no_grad():
        assert sqnr(ready(x), actual) > 100


def test_projections_of_unknown_length_are_refused(tmp_path):
    x = torch.randn(2, 5, 16)
    ready = prepared(First(nn.LSTM(16, 16, proj_size=8, batch_first=True)), (x,), "eager")
    with pytest.raises(ConversionError, match="LSTMs with projections"):
        export_onnx(ready, (x,), tmp_path / "model.onnx", dynamic_shapes=({1: LENGTH},))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_length_that_a_given_state_fixes_is_refused(kind, tmp_path):
    """torch.onnx would write a file whose input has any length, and its output the example's."""

    class Continued(First):
        def forward(self, x, state):
            return self.layer(x, (state, state) if kind is nn.LSTM else state)[0]

    inputs = torch.randn(6, 2, 16), torch.randn(1, 2, 16)
    ready = prepared(Continued(kind(16, 16)), inputs, "eager")
    with pytest.raises(ConversionError, match=r"Constraints violated \(length\)"):
        export_onnx(ready, inputs, tmp_path / "model.onnx", dynamic_shapes=({0: LENGTH}, None))
