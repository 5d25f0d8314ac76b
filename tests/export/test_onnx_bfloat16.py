"""bfloat16 models as ONNX files: float32 operators between casts, which ONNX Runtime's CPU kernels can run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx

from bitwright.errors import ConfigMatchWarning
from bitwright.export.conversion import ConversionError
from bitwright.export.onnx import compare_codes, export_onnx, run_onnx
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

BFLOAT16 = onnx.TensorProto.BFLOAT16


class Branches(nn.Module):
    """Linear layers, one of them inside a branch, behind a constant that is filled in."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        with torch.no_grad():
            for tensor in self.parameters():  # sums of such numbers are exact in any order
                tensor.copy_(tensor.mul(20).round().clamp(-3, 3) / 4)

    def forward(self, x):
        y = self.first(x)
        return torch.cond(x.sum() > 0, lambda y: y * 3 + self.second.bias, lambda y: self.second(y), (y,))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.norm, self.head = nn.GRU(16, 16), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        return torch.softmax(self.head(self.norm(self.rnn(x)[0])), -1)


def _prepared(model, x, preset, mode):
    quantizer = Quantizer(model.bfloat16().eval(), getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    return ready.eval()


@pytest.mark.parametrize("preset", ["w8", "w8a8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_every_result_is_rounded_as_pytorch_rounds_it(preset, sign, tmp_path):
    """Bit for bit where no order of sums matters: both branches of a cond, each with a result rounded twice."""
    torch.manual_seed(0)
    x = torch.randint(1, 5, (3, 32)).bfloat16()
    with pytest.warns(ConfigMatchWarning, match=r"enclosed-weight.* second\.weight \(cond\)"):
        ready = _prepared(Branches(), x, preset, "graph")
    export_onnx(ready, (x,), tmp_path / "m.onnx")
    (found,) = run_onnx(tmp_path / "m.onnx", (sign * x,))
    with torch.no_grad():
        expected = ready(sign * x)
    assert found.dtype == torch.bfloat16
    if preset == "w8" and sign == -1:
        assert sqnr(expected.float(), found.float()) > 40  # sums of products of rounded weights
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("preset", ["w4", "w8a8"])
def test_operators_without_bfloat16_kernels_run(preset, mode, tmp_path):
    """Recurrent layers, norms and softmax."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 16).bfloat16()
    ready = _prepared(Recurrent(), x, preset, mode)
    export_onnx(ready, (x,), tmp_path / "m.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "m.onnx"), full_check=True)
    (found,) = run_onnx(tmp_path / "m.onnx", (x,))
    with torch.no_grad():
        assert sqnr(ready(x).float(), found.float()) > 30


def test_inputs_outputs_and_weights_stay_bfloat16(tmp_path):
    """Only what lies between the casts is wider."""
    x = torch.randn(2, 32).bfloat16()
    ready = _prepared(nn.Linear(32, 8), x, "w8", "eager")
    graph = onnx.load(export_onnx(ready, (x,), tmp_path / "m.onnx")).graph
    ends = [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]
    assert ends == [BFLOAT16, BFLOAT16]
    assert BFLOAT16 in {constant.data_type for constant in graph.initializer}  # the bias


def test_operators_can_be_left_to_a_runtime_that_has_them(tmp_path):
    """Then nothing is cast, and ONNX Runtime's refusal says how to write the file for it."""
    x = torch.randn(2, 32).bfloat16()
    ready = _prepared(nn.Linear(32, 8), x, "w8", "eager")
    path = export_onnx(ready, (x,), tmp_path / "m.onnx", bfloat16_kernels=True)
    graph = onnx.load(path).graph
    (linear,) = (node for node in graph.node if node.op_type in ("Gemm", "MatMul"))
    assert linear.input[0] == graph.input[0].name
    with pytest.raises(ConversionError, match="bfloat16_kernels=False"):
        run_onnx(path, (x,))


def test_codes_are_compared(tmp_path):
    """The comparison reads bfloat16 values out of the file too."""
    torch.manual_seed(0)
    x = torch.randn(8, 32).bfloat16()
    ready = _prepared(nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4)), x, "w8a8", "graph")
    path = export_onnx(ready, (x,), tmp_path / "m.onnx")
    assert compare_codes(ready, path, (x,)).file_error < 1
