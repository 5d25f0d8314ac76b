"""Models that are cast to half precision after they were prepared and calibrated, in Core AI and Core ML."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr


def _cast(mode, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode=mode))
    ready = quantizer.prepare((torch.randn(2, 3, 8, 8),))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(torch.randn(2, 3, 8, 8))
    return quantizer, ready.eval().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_core_ai(dtype, mode, tmp_path):
    """Activations kept the type that they were observed in, so that float32 met the biases of the next layer."""
    pytest.importorskip("coreai_torch")
    from bitwright.export.coreai import export_coreai, run_coreai

    _, ready, x = _cast(mode, dtype)
    (found,) = run_coreai(export_coreai(ready, (x,), tmp_path / "m.aimodel"), (x,))
    with torch.no_grad():
        assert found.dtype == dtype
        assert sqnr(ready(x).float(), found.float()) > 30


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_core_ml_in_torch(mode):
    """The finalized model runs, and its results are in the model's type."""
    quantizer, ready, x = _cast(mode, torch.float16)
    with torch.no_grad():
        expected = ready(x)
        found = quantizer.finalize(backend="coreml")(x)
    assert found.dtype == torch.float16
    assert sqnr(expected.float(), found.float()) > 30


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_back_to_single_precision(mode):
    """A model that is cast there and back is what it was, but for the rounding of its weights."""
    quantizer, ready, x = _cast(mode, torch.float16)
    ready.float()
    with torch.no_grad():
        expected = ready(x.float())
        found = quantizer.finalize(backend="coreml")(x.float())
    assert found.dtype == torch.float32
    assert sqnr(expected, found) > 60
