"""Core AI models of operators whose results coreai-torch makes in float32 where PyTorch makes halves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("coreai_torch")

from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.export.operators import check_operators
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.matrix import each_pair
from tests.measures import sqnr


class Filled(nn.Module):
    """A layer, a constant that is filled in, which is returned too, and zeros."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 16)

    def forward(self, x):
        filled = torch.full((16,), 0.3, dtype=x.dtype)
        return self.layer(x) + filled + x.new_zeros(16), filled


class Recurrent(nn.Module):
    """A recurrent layer begins with zeros of the model's type."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 16)

    def forward(self, x):
        return self.lstm(x)[0]


class Sums(nn.Module):
    """Running sums of what a layer of many inputs returns."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 16)

    def forward(self, x):
        y = self.layer(x)
        return y, torch.cat([y.abs()] * 16, -1).cumsum(-1)


class Normed(nn.Module):
    """A layer, a parameter that has its length apart, as weight normalization has it, and norms."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.direction, self.length = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.rand(1, 6))

    def forward(self, x):
        y = self.layer(x)
        return y + torch._weight_norm(self.direction, self.length, 1), (1e3 * y).norm(dim=1), y.norm(1, dim=2)


def _convolutions():
    norms = [nn.BatchNorm2d(8), nn.BatchNorm2d(8)]
    for norm in norms:
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 1.5)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norms[0], nn.ReLU(), norms[1], nn.Conv2d(8, 4, 3))


NETWORKS = {
    "batch norms": lambda: (_convolutions(), torch.randn(2, 3, 8, 8)),
    "filled": lambda: (Filled(), torch.randn(4, 32)),
    "normed": lambda: (Normed(), torch.randn(2, 4, 8)),
    "sums": lambda: (Sums(), torch.randn(2, 4, 1024)),
    "recurrent": lambda: (Recurrent(), torch.randn(5, 32)),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "mode"), each_pair(list(NETWORKS), [torch.float16, torch.bfloat16], ["eager", "graph"])
)
def test_models_in_half_precision(kind, dtype, mode, tmp_path):
    """The plan has nothing to say, and the runtime computes what the model does."""
    torch.manual_seed(0)
    model, x = NETWORKS[kind]()
    model, x = model.eval().to(dtype), x.to(dtype)
    assert not check_operators(model, "coreai", (x,))
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode)).prepare((x,)).eval()
    path = export_coreai(ready, (x,), tmp_path / "m.aimodel")
    with torch.no_grad():
        expected = ready(x)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for one, found in zip(expected, run_coreai(path, (x,)), strict=True):
        assert found.dtype == dtype
        assert sqnr(one.float(), found.float()) > 40


@pytest.mark.parametrize("own_kernels", [False, True])
def test_products_may_be_left_to_the_runtimes_kernels(own_kernels, tmp_path):
    """A program has products of bfloat16 matrices only where its writer asked for them."""
    from coreai.authoring import AIModelAsset

    x = torch.randn(2, 4, 32, dtype=torch.bfloat16)
    ready = Quantizer(nn.Linear(32, 16).bfloat16(), QuantizerConfig.presets.w8()).prepare((x,)).eval()
    path = export_coreai(ready, (x,), tmp_path / "m.aimodel", bfloat16_kernels=own_kernels)
    text = AIModelAsset.load(path).program._module._mlir_module.operation.get_asm()
    (product,) = (line for line in text.splitlines() if "matmul" in line)
    assert ("bf16" in product) == own_kernels
