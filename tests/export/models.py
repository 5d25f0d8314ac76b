"""Small models and configs that the tests of all exporters share."""

from __future__ import annotations

import copy

import torch
from torch import nn

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity

CHANNEL = PerChannelGranularity(axis=0)
W8 = QuantizationSpec(dtype="int8", granularity=CHANNEL)


def blocks(size, axis=1):
    """Blocks of ``size`` along ``axis``."""
    return PerBlockGranularity(axis=axis, block_size=size)


class ConvNet(nn.Module):
    """Grouped and plain convolutions, a residual add, pooling, linear layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.fc = nn.Linear(8, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        x = torch.add(x, torch.relu(self.depthwise(x)))
        return self.head(torch.relu(self.fc(x.mean((2, 3)))))


class Mlp(nn.Module):
    """Linear layers whose sizes are multiples of 32, as FP4 blocks need them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Tied(nn.Module):
    """Two layers that share a weight, and one module that is called twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 16, bias=False)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.relu(self.mix(self.mix(self.embed(x)))))


def built(kind, dtype=torch.float32, seed=0):
    """A model in eval mode and an input for it."""
    torch.manual_seed(seed)
    model = kind().eval().to(dtype)
    shapes = {ConvNet: (2, 3, 8, 8), Mlp: (4, 64), Tied: (3, 16)}
    return model, torch.randn(shapes[kind]).to(dtype)


def prepared(model, x, weight=None, activation=None, mode="eager"):
    """The quantizer and the prepared copy of ``model``, calibrated on ``x``."""
    specs = None if activation is None else {"*": activation}
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_state_spec=None if weight is None else {"weight": weight}, op_input_spec=specs, op_output_spec=specs
        ),
        execution_mode=mode,
    )
    quantizer = Quantizer(copy.deepcopy(model), config)
    ready = quantizer.prepare((x,))
    if activation is not None:
        with quantizer.calibration_mode(), torch.no_grad():
            ready(x)
    return quantizer, ready


def sqnr(expected, found):
    """Signal to quantization noise in decibels; infinite where the two are equal."""
    expected, found = expected.detach().double(), found.detach().double()
    noise = (expected - found).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(expected.square().sum() / noise))
