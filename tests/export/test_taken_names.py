"""Tensors of a model that are called as files call parts of weights and activations; names of inputs and outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright import ExportBackend
from bitwright.export.checkpoints import export_compressed_tensors
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.quantization import Quantizer, QuantizerConfig

both_modes = pytest.mark.parametrize("mode", ["eager", "graph"])
X = torch.linspace(-2, 2, 24).reshape(3, 8)


class Scaled(nn.Linear):
    """A layer with a factor for each output, of any name."""

    def __init__(self, name):
        super().__init__(8, 8)
        self.factor = name
        setattr(self, name, nn.Parameter(torch.linspace(0.1, 0.9, 8)))

    def forward(self, x):
        return super().forward(x) * getattr(self, self.factor)


class Outer(nn.Module):
    """A layer between quantizers, and a buffer of any name at the root."""

    def __init__(self, name):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.factor = name
        self.register_buffer(name, torch.tensor(0.37))

    def forward(self, x):
        return self.fc(x) * getattr(self, self.factor)


def _quantized(model, mode, preset=None):
    torch.manual_seed(0)
    config = QuantizerConfig(execution_mode=mode) if preset is None else preset(execution_mode=mode)
    quantizer = Quantizer(model.eval(), config)
    return quantizer, quantizer.prepare((X,))


def _onnx(ready, folder, **options):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from bitwright.export.onnx import export_onnx

    return export_onnx(ready, (X,), folder / "model.onnx", **options)


def _run(path, x=X):
    from bitwright.export.onnx import run_onnx

    return run_onnx(path, (x,))


def _interface(path):
    import onnx

    graph = onnx.load(path).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


@both_modes
@pytest.mark.parametrize("part", ["scale", "zero_point", "quantized"])
def test_onnx_parameters_beside_weights(part, mode, tmp_path):
    _, ready = _quantized(nn.Sequential(Scaled(f"weight_{part}")), mode)
    assert torch.allclose(_run(_onnx(ready, tmp_path))[0], ready(X), atol=1e-6)


@pytest.mark.parametrize("part", ["lut", "indices"])
def test_onnx_parameters_beside_palettes(part, tmp_path):
    torch.manual_seed(0)
    ready = KMeansPalettizer(nn.Sequential(Scaled(f"weight_{part}")).eval(), KMeansPalettizerConfig()).prepare((X,))
    assert torch.allclose(_run(_onnx(ready, tmp_path))[0], ready(X), atol=1e-5)


NAMES = ["activation_post_process_0_scale", "activation_post_process_1_zero_point", "fc_weight_scale"]


@pytest.mark.parametrize("name", NAMES)
def test_onnx_buffers_called_as_parameters_of_simulators(name, tmp_path):
    _, ready = _quantized(Outer(name), "graph")
    assert torch.allclose(_run(_onnx(ready, tmp_path))[0], ready(X), atol=1e-6)


@pytest.mark.parametrize("name", [*NAMES, "fc_weight_quantized"])
def test_core_ai_buffers_called_as_parameters_of_simulators(name):
    pytest.importorskip("coreai_torch")
    quantizer, ready = _quantized(Outer(name), "graph")
    wanted = ready(X)
    finalized = quantizer.finalize(ready, backend=ExportBackend.CoreAI)
    assert torch.allclose(finalized(X), wanted, atol=1e-6)
    assert getattr(finalized, name).item() == pytest.approx(0.37)


def test_core_ai_weights_that_are_read_twice_are_stored_once():
    pytest.importorskip("coreai_torch")
    fc = nn.Linear(8, 8)
    quantizer, ready = _quantized(nn.Sequential(fc, nn.ReLU(), fc), "graph", QuantizerConfig.presets.w8)
    finalized = quantizer.finalize(ready, backend=ExportBackend.CoreAI)
    assert sum(name.endswith("quantized") for name, _ in finalized.named_buffers()) == 1


def test_compressed_tensors_refuses_them(tmp_path):
    """Its format fixes the names."""
    _, ready = _quantized(nn.Sequential(Scaled("weight_scale")), "eager", QuantizerConfig.presets.w8)
    with pytest.raises(ValueError, match=r"tensors called '0\.weight_scale'.*Rename"):
        export_compressed_tensors(ready, tmp_path / "checkpoint", config={})


class Several(nn.Module):
    """Returns one value twice, its input, and a weight twice."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        return y, y, x, self.fc.weight, self.fc.weight


@both_modes
@pytest.mark.parametrize("model", [lambda: nn.Sequential(nn.Linear(8, 8)), Several], ids=["one", "several"])
def test_outputs_have_the_names_asked_for(model, mode, tmp_path):
    """Behind quantizers and weights too."""
    _, ready = _quantized(model(), mode)
    results = ready(X)
    results = list(results) if isinstance(results, tuple) else [results]
    names = ["a", "b", "c", "d", "e"][: len(results)]
    path = _onnx(ready, tmp_path, input_names=["given"], output_names=names)
    assert _interface(path) == (["given"], names)
    assert all(torch.allclose(found, result, atol=1e-6) for found, result in zip(_run(path), results, strict=True))
    unnamed = _interface(_onnx(ready, tmp_path))[1]
    assert len(set(unnamed)) == len(results)


@pytest.mark.parametrize(
    "names",
    [{"input_names": ["a"], "output_names": ["a"]}, {"output_names": ["input"]}, {"input_names": ["a", "a"]}],
    ids=["both", "an input's", "two inputs"],
)
def test_inputs_and_outputs_share_no_name(names, tmp_path):
    with pytest.raises(ValueError, match=r"need a name each, but several are called '(a|input)'"):
        _onnx(nn.Linear(8, 8).eval(), tmp_path, **names)


@pytest.mark.parametrize("name", ["0.weight", "0.weight_scale", "0.weight_DequantizeLinear_w_1_output"])
@pytest.mark.parametrize("side", ["input_names", "output_names"])
def test_inputs_and_outputs_called_as_other_values(side, name, tmp_path):
    """Those others get another name."""
    _, ready = _quantized(nn.Sequential(nn.Linear(8, 8)), "graph")
    path = _onnx(ready, tmp_path, **{side: [name]})
    assert [name] in _interface(path)
    assert torch.allclose(_run(path)[0], ready(X), atol=1e-6)


@pytest.mark.parametrize("opset", ["18", 18.0, True])
def test_an_opset_is_an_integer(opset, tmp_path):
    with pytest.raises(TypeError, match="opset must be an integer or None"):
        _onnx(nn.Linear(8, 8).eval(), tmp_path, opset=opset)


def test_an_opset_that_does_not_exist_is_refused(tmp_path):
    """torch.onnx writes opset 18 instead, without an error."""
    with pytest.raises(ValueError, match=r"ONNX opset \d+, for it cannot convert it to opset 99"):
        _onnx(nn.Linear(8, 8).eval(), tmp_path, opset=99)
    assert not list(tmp_path.iterdir())
