"""float16 models as ONNX files: results are rounded where PyTorch rounds them, and products stay floating-point."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx

from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity
from tests.matrix import each_value
from tests.measures import sqnr

FLOAT16 = onnx.TensorProto.FLOAT16


def _network(kind):
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(8, 64)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3)), torch.randn(4, 4, 8, 8)


def _prepared(model, x, config):
    quantizer = Quantizer(model.half().eval(), config)
    ready = quantizer.prepare((x,))
    if config.global_config is None or config.global_config.op_input_spec:
        with quantizer.calibration_mode(), torch.no_grad():
            ready(x)
    return ready


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_quantized_activations_have_pytorchs_codes(kind, mode, tmp_path):
    """A chain in float32 without the roundings between moves hundreds of codes, to 40 dB."""
    model, x = _network(kind)
    x = x.half()
    ready = _prepared(model, x, QuantizerConfig.presets.w8a8(execution_mode=mode))
    found = run_onnx(export_onnx(ready, (x,), tmp_path / "m.onnx"), (x,))[0]
    with torch.no_grad():
        expected = ready(x)
    assert found.dtype == torch.float16
    assert sqnr(expected.float(), found.float()) > 60
    graph = onnx.load(str(tmp_path / "m.onnx")).graph
    assert all(one.type.tensor_type.elem_type == FLOAT16 for one in (*graph.input, *graph.output))


def _casts(path):
    return sum(node.op_type == "Cast" for node in onnx.load(str(path)).graph.node)


def test_the_runtimes_own_kernels_are_a_choice(tmp_path):
    model, x = _network("linear")
    x = x.half()
    ready = _prepared(model, x, QuantizerConfig.presets.w8a8(execution_mode="eager"))
    exact, plain = (
        _casts(export_onnx(ready, (x,), tmp_path / f"{kernels}.onnx", float16_kernels=kernels))
        for kernels in (None, True)
    )
    assert exact > plain
    weights_only = _prepared(_network("linear")[0], x, QuantizerConfig.presets.w8(execution_mode="eager"))
    plain, exact = (
        _casts(export_onnx(weights_only, (x,), tmp_path / f"w{kernels}.onnx", float16_kernels=kernels))
        for kernels in (None, False)
    )
    assert exact > plain


@pytest.mark.parametrize("dtype", ["uint8", "int4"])
def test_weights_in_blocks_are_not_multiplied_with_rounded_activations(dtype, tmp_path):
    """ONNX Runtime takes the cast to float16 out, and would fuse the rest into a product with int8 activations."""
    model, x = _network("linear")
    x = x.half()[:, None]  # three dimensions are a product without a bias, and a sum
    spec = QuantizationSpec(dtype=dtype, qscheme="asymmetric", granularity=PerBlockGranularity(axis=1, block_size=32))
    weights = ModuleQuantizerConfig(op_state_spec={"weight": spec}, op_input_spec=None, op_output_spec=None)
    config = QuantizerConfig(global_config=weights, execution_mode="eager")
    ready = _prepared(model, x, config)
    found = run_onnx(export_onnx(ready, (x,), tmp_path / "m.onnx"), (x,))[0]
    with torch.no_grad():
        assert sqnr(ready(x).float(), found.float()) > 60


class _Gathering(nn.Module):
    """A linear layer whose results are added up, or multiplied, in places that depend on them."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how

    def forward(self, x):
        x = self.layer(x)
        zeros, rows = torch.zeros_like(x), torch.tensor([0, 1, 1])
        if self.how == "index_add":
            return zeros.index_add(1, rows, x[:, :3]) * 2
        if self.how == "index_put":
            return zeros.index_put((rows,), x[:1].expand(3, -1), accumulate=True)
        if self.how == "scatter_add":
            return zeros.scatter_add(1, (x > 0).long(), x) + 1
        return torch.ones_like(x).scatter_reduce(1, (x > 0).long(), x, "prod")


@pytest.mark.parametrize("how", ["index_add", "index_put", "scatter_add", "scatter_reduce"])
def test_writes_that_add_or_multiply_run_in_float32(how, tmp_path):
    """ONNX Runtime opens a file that has them in float16, and cannot run it."""
    torch.manual_seed(0)
    model, x = _Gathering(how).eval().half(), torch.randn(4, 8).half()
    ready = _prepared(model, x, QuantizerConfig.presets.w8(execution_mode="eager"))
    path = export_onnx(ready, (x,), tmp_path / "model.onnx")
    with torch.no_grad():
        assert sqnr(ready(x).float(), run_onnx(path, (x,))[0].float()) > 55


class _BatchFirst(nn.Module):
    """Layers that move the batch behind the sequence, and multiply by weights there."""

    def __init__(self, kind):
        super().__init__()
        self.layer = getattr(nn, kind)(32, 32, batch_first=True) if kind != "Linear" else nn.Linear(32, 32)
        self.head, self.kind = nn.Linear(32, 4), kind

    def forward(self, x):
        if self.kind == "Linear":
            return self.head(self.layer(x.transpose(0, 1)) * 0.5).permute(1, 2, 0)
        return self.head(self.layer(x)[0])


@pytest.mark.parametrize(
    ("kind", "sizes"),
    each_value(["Linear", "GRU", "LSTM", "RNN"], {"fixed": None, "dynamic": ({0: torch.export.Dim.DYNAMIC},)}),
)
def test_batches_are_moved_behind_a_barrier(kind, sizes, tmp_path):
    """ONNX Runtime 1.31 ends the process when it fuses such a move with a product of float16 matrices."""
    torch.manual_seed(0)
    model, x = _BatchFirst(kind), torch.randn(2, 6, 32).half()
    ready = _prepared(model, x, QuantizerConfig.presets.w8(execution_mode="eager"))
    path = export_onnx(ready, (x,), tmp_path / "m.onnx", dynamic_shapes=sizes)
    nodes = onnx.load(str(path)).graph.node
    moved = {n.output[0] for n in nodes for a in n.attribute if n.op_type == "Transpose" and list(a.ints) == [1, 0, 2]}
    assert moved
    assert not any(n.op_type in ("MatMul", "Mul", "Cast") and n.input[0] in moved for n in nodes)
    for inputs in (x,) if sizes is None else (x, torch.randn(3, 6, 32).half()):
        with torch.no_grad():
            assert sqnr(ready(inputs).float(), run_onnx(path, (inputs,))[0].float()) > 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_of_reductions_have_the_models_type(dtype, tmp_path):
    """torch.onnx reduces in float32, and leaves what is an output so."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            y = self.layer(x)
            return {"sum": y.sum(1), "none": None, "pair": (y.cumsum(1), y), "prod": y[0].prod(-1)}

    torch.manual_seed(0)
    model, x = Sums().eval().to(dtype), torch.randn(2, 3, 16, dtype=dtype)
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,))
    path = export_onnx(ready, (x,), tmp_path / "m.onnx", output_names=["sum", "running", "values", "prod"])
    expected = ready(x)
    assert [output.name for output in onnx.load(str(path)).graph.output] == ["sum", "running", "values", "prod"]
    for one, found in zip([expected["sum"], *expected["pair"], expected["prod"]], run_onnx(path, (x,)), strict=True):
        assert found.dtype == dtype
        assert sqnr(one.float(), found.float()) > 40
