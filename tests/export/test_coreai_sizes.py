"""What Core AI models take: weights once, as the plan says, and programs without the lines that they come from."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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


class Mixed(nn.Module):
    """Products of rows that lie in memory in another order, with a matrix for all of a batch."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(64, 192)), nn.Parameter(torch.randn(192))
        self.function = function

    def forward(self, x):
        return self.function(x.transpose(0, 1), self.weight, self.bias)


MATRICES = {
    "linear": lambda x, w, b: F.linear(x, w.t(), b),
    "product": lambda x, w, b: x @ w + b,
    "pictures": lambda x, w, b: (x.unsqueeze(0).transpose(0, 2) @ w).flatten(0, 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_one_matrix_for_a_batch(name, dynamic, tmp_path):
    """It is stored once, not once for each element of the batch, which may be of any size."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixed(MATRICES[name]), nn.Linear(192, 8)).eval(), torch.randn(3, 5, 64)
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager").without("0")).prepare((x,))
    shapes = ({0: torch.export.Dim("batch", max=9), 1: torch.export.Dim("rows", max=9)},) if dynamic else None
    path = export_coreai(ready, (x,), tmp_path / "m.aimodel", dynamic_shapes=shapes)
    assert sum(file.stat().st_size for file in path.rglob("*")) < 4 * 64 * 192 + AROUND
    for values in (x, torch.randn(4, 7, 64))[: 1 + dynamic]:
        assert sqnr(ready(values), run_coreai(path, (values,))[0]) > 100


class Attending(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def test_attention_of_short_sequences(tmp_path):
    """The joint projection of a layer that is left out is stored once."""
    torch.manual_seed(0)
    model, x = Attending().eval(), torch.randn(2, 5, 64)
    config = QuantizerConfig.presets.w8(execution_mode="eager").without("attention")
    ready = Quantizer(model, config).prepare((x,))
    path = export_coreai(ready, (x,), tmp_path / "m.aimodel")
    assert sum(file.stat().st_size for file in path.rglob("*")) < 4 * 64 * 256 + AROUND
    assert sqnr(ready(x), run_coreai(path, (x,))[0]) > 100
