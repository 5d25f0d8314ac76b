"""Core ML packages of models in half precision, and of models that return dictionaries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("coremltools")

import coremltools

from bitwright.common import CoreMLExportError
from bitwright.export.capabilities import check_plan
from bitwright.export.coreml_package import compressed_constants, export_coreml
from bitwright.export.targets import TARGETS
from bitwright.inspection import artifact_of
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

from .models import palettized


class Named(nn.Module):
    """A convolution, a norm and a layer; makes tensors of a type of its own, and returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(4, 16, 3, padding=1), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x):
        y = self.norm(self.conv(x).flatten(2).transpose(1, 2)) + torch.ones(16, dtype=x.dtype)
        return {"features": y, "scores": self.head(y.float().mean(1).to(x.dtype))}


def _prepared(preset, mode, dtype):
    torch.manual_seed(0)
    model, x = Named().eval().to(dtype), torch.randn(2, 4, 6, 6).to(dtype)
    quantizer = Quantizer(model, getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    return ready.eval(), x


def _decoded(path, shape):
    (found,) = [value.float() for _, value in compressed_constants(path) if value.shape == shape]
    return found


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("preset", ["w8", "w8a8"])
def test_models_in_half_precision_are_written(preset, mode, tmp_path):
    """Weights are packed and decode to those of the prepared model; inputs stay in half precision."""
    ready, x = _prepared(preset, mode, torch.float16)
    path = export_coreml(ready, (x,), tmp_path / "m.mlpackage")
    weights = artifact_of(ready)
    for name in weights.compressed:
        weight = weights.decode(name)
        assert sqnr(weight.float(), _decoded(path, weight.shape)) > 60
    assert len(weights.compressed) == 2
    spec = coremltools.models.MLModel(str(path), skip_model_load=True).get_spec()
    kinds = [value.type.multiArrayType.dataType for value in spec.description.input]
    assert kinds == [coremltools.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT16]
    assert len(spec.description.output) == 2
    assert all(tensor.dtype == torch.float16 for tensor in ready.parameters()), "the model itself stays as it was"
    assert ready(x)["scores"].dtype == torch.float16


def test_palettes_of_models_in_half_precision(tmp_path):
    """Look-up tables hold the numbers of the weight."""
    torch.manual_seed(0)
    model, x = Named().eval().half(), torch.randn(2, 4, 6, 6).half()
    _, ready = palettized(model, x, n_bits=4)
    path = export_coreml(ready, (x,), tmp_path / "m.mlpackage")
    assert torch.equal(_decoded(path, (8, 16)), ready.head.weight.float())
    assert all(tensor.dtype == torch.float16 for tensor in ready.parameters()), "the model itself stays as it was"


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_bfloat16_is_refused_while_planning(mode):
    """Weights and activations, with what to do; the other targets hold them."""
    model, x = Named().eval().bfloat16(), torch.randn(2, 4, 6, 6).bfloat16()
    plan = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode=mode)).plan((x,))
    refused = {problem.where: problem.message for problem in check_plan(plan, "coreml")}
    assert set(refused) == {row.tensor for row in plan if row.spec is not None and row.dtype == "bfloat16"}
    assert all("convert the model to float16 or float32 before" in message for message in refused.values())
    others = [problem.message for name in TARGETS if name != "coreml" for problem in check_plan(plan, name)]
    assert not any("bfloat16" in message for message in others)


def test_bfloat16_is_refused_before_anything_is_written(tmp_path):
    """By the writer and by finalize."""
    torch.manual_seed(0)
    model, x = Named().eval().bfloat16(), torch.randn(2, 4, 6, 6).bfloat16()
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager"))
    ready = quantizer.prepare((x,))
    with pytest.raises(CoreMLExportError, match="no bfloat16"):
        export_coreml(ready, (x,), tmp_path / "m.mlpackage")
    assert not (tmp_path / "m.mlpackage").exists()
    with pytest.raises(CoreMLExportError, match=r"conv\.weight'\. Core ML has no bfloat16"):
        quantizer.finalize(backend="coreml")
