"""Core AI: transposed convolutions in three dimensions, which coreai-torch has no translation of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("coreai_torch")

from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.export.operators import check_operators
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

DYNAMIC = torch.export.Dim.DYNAMIC
LAYERS = {
    "one number for all dimensions": {"kernel_size": 2, "stride": 2},
    "a number for each": {"kernel_size": (3, 2, 4), "stride": (2, 3, 1), "padding": (1, 0, 2), "dilation": (2, 1, 3)},
    "groups": {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1, "groups": 2, "bias": False},
    "layers that do not touch": {"kernel_size": 2, "stride": 3, "output_padding": 2, "dilation": (1, 1, 2)},
}


def _prepared(layer, preset, mode, x, **options):
    """A model of one layer between two without parameters, prepared and calibrated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.ConvTranspose3d(4, 6, **layer), nn.Tanh()).eval()
    assert not check_operators(model, "coreai", (x,), **options)
    quantizer = Quantizer(model, getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
    ready = quantizer.prepare((x,), **(options if mode == "graph" else {})).eval()
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    return ready


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("preset", "mode", "least"), [("w8", "eager", 100), ("w8a8", "graph", 60)])
def test_transposed_in_three_dimensions(name, preset, mode, least, tmp_path):
    """Numbers are PyTorch's; among activations of 8 bits some may be rounded to the other neighbour."""
    x = torch.randn(2, 4, 5, 4, 6, generator=torch.Generator().manual_seed(0))
    ready = _prepared(LAYERS[name], preset, mode, x)
    with torch.no_grad():
        expected = ready(x)
    (actual,) = run_coreai(export_coreai(ready, (x,), tmp_path / "model.aimodel"), (x,))
    assert actual.shape == expected.shape
    assert sqnr(expected, actual) > least


def test_batches_may_vary(tmp_path):
    x, shapes = torch.randn(2, 4, 5, 4, 6), ({0: DYNAMIC},)
    ready = _prepared(LAYERS["groups"], "w8", "graph", x, dynamic_shapes=shapes)
    path = export_coreai(ready, (x,), tmp_path / "model.aimodel", dynamic_shapes=shapes)
    for batch in (1, 3):
        x = torch.randn(batch, 4, 5, 4, 6)
        with torch.no_grad():
            assert sqnr(ready(x), run_coreai(path, (x,))[0]) > 100


def test_the_weight_stays_packed(tmp_path):
    """A weight of four bits by number takes them in the file too."""
    x = torch.randn(1, 64, 2, 2, 2)
    model = nn.Sequential(nn.ConvTranspose3d(64, 64, 3)).eval()
    ready = Quantizer(model, QuantizerConfig.presets.w4(execution_mode="eager")).prepare((x,)).eval()
    path = export_coreai(ready, (x,), tmp_path / "model.aimodel")
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert size < 64 * 64 * 27 * 0.75  # bytes; of which half are codes, and the rest scales
