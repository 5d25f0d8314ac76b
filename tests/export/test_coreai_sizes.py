"""What Core AI models take: weights once, as the plan says, and programs without the lines that they come from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("coreai_torch")

from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.matrix import each_value
from tests.measures import sqnr

STEPS = 6
PER_STEP = 2500
"""Bytes that the operations of a step may take, in one direction of one layer; with lines of Python it is 3900."""
AROUND = 6000
"""Bytes of everything else, for each direction of each layer."""


class Tagger(nn.Module):
    """Outputs of a recurrent layer."""

    def __init__(self, kind, **options):
        super().__init__()
        self.recurrent = getattr(nn, kind)(32, 48, **options)

    def forward(self, x):
        return self.recurrent(x)[0]


@pytest.mark.parametrize(
    ("options", "kind", "dtype"),
    each_value(
        {"plain": {}, "bidirectional": {"num_layers": 2, "bidirectional": True, "batch_first": True}},
        ["LSTM", "GRU"],
        [torch.float32, torch.float16],
    ),
)
def test_recurrent_layers(options, kind, dtype, tmp_path):
    """Codes are stored once, for all steps and in no second form; a step adds its operations alone."""
    torch.manual_seed(0)
    model = Tagger(kind, **options).eval().to(dtype)
    x = torch.randn((2, STEPS, 32) if "batch_first" in options else (STEPS, 2, 32)).to(dtype)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager"))
    weights = sum(row.compressed_bytes for row in quantizer.plan((x,), target="coreai"))
    biases = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "bias" in name)
    ready = quantizer.prepare((x,)).eval()
    path = export_coreai(ready, (x,), tmp_path / "m.aimodel")
    files = [file for file in path.rglob("*") if file.is_file()]
    runs = 4 if options else 1
    assert sum(file.stat().st_size for file in files) - weights - biases < runs * (STEPS * PER_STEP + AROUND)
    assert not any(b".py" in file.read_bytes() for file in files)
    with torch.no_grad():
        expected = ready(x)
    assert sqnr(expected.float(), run_coreai(path, (x,))[0].float()) > (110 if dtype == torch.float32 else 50)
