"""Small networks and configs that the tests of quantization-aware training share."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, QuantizerConfig
from bitwright.quantization.spec import PerChannelGranularity

MODES = ("eager", "graph")


class ConvNet(nn.Module):
    """Convolution with batch norm, a residual add, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = x + F.relu(self.block(x))
        return self.head(x.mean((2, 3)))


class Tied(nn.Module):
    """Embedding and output projection share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.mix(self.embed(tokens))))


def make_config(mode, kind="plain", schedule=None, dtype="int4"):
    """W4A4 of a kind: moving averages, LSQ, or accumulated histograms of activations."""
    weight = {"dtype": dtype, "granularity": PerChannelGranularity(axis=0)}
    activation = {"dtype": dtype, "qscheme": "asymmetric"}
    if kind == "lsq":
        weight["fake_quantize_cls"] = "lsq"
        activation["fake_quantize_cls"] = "lsq_plus"
    elif kind == "percentile":
        activation["range_calculator_cls"] = "percentile"
    spec = QuantizationSpec(**activation)
    return QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_input_spec={"*": spec},
            op_output_spec={"*": spec},
            op_state_spec={"weight": QuantizationSpec(**weight)},
            qat_schedule=schedule,
        ),
        execution_mode=mode,
    )


def images(seed=0, count=8):
    """A batch of images ``[count, 1, 6, 6]`` and labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 6, 6, generator=generator), torch.randint(0, 4, (count,), generator=generator)
