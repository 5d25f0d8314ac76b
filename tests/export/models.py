"""Small models and configs that the tests of all exporters share."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.errors import ConfigMatchWarning
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.palettization.spec import PerGroupedChannelGranularity
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity
from tests.measures import sqnr

CHANNEL = PerChannelGranularity(axis=0)
W8 = QuantizationSpec(dtype="int8", granularity=CHANNEL)
BYTES = QuantizationSpec(dtype="uint8", qscheme="asymmetric")


def blocks(size, axis=1):
    """Blocks of ``size`` along ``axis``."""
    return PerBlockGranularity(axis=axis, block_size=size)


def spec_of(dtype, granularity=CHANNEL, **options):
    """A spec for weights, with a scale for each channel where nothing else is asked for."""
    return QuantizationSpec(dtype=dtype, granularity=granularity, **options)


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


class Pooled(nn.Module):
    """A convolution, an average of 16 values, a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(F.adaptive_avg_pool2d(torch.relu(self.conv(x)), 1).flatten(1))


class Turned(nn.Module):
    """A convolution over time, layers over its channels, and averages over time of what lies the other way round."""

    def __init__(self):
        super().__init__()
        self.conv, self.mix = nn.Conv1d(20, 48, 5, stride=2, padding=2), nn.Linear(48, 48)
        self.heads = nn.ModuleList(nn.Linear(48, 5) for _ in range(2))

    def forward(self, x):
        channels_last = self.conv(x).transpose(1, 2)
        mixed = torch.relu(self.mix(channels_last)).transpose(1, 2)
        return torch.cat([self.heads[0](channels_last.mean(1)), self.heads[1](mixed.mean(2, keepdim=True).flatten(1))])


ENDING_IN_AVERAGES = {
    "pooled": (Pooled, (64, 3, 4, 4), torch.contiguous_format),
    "pooled, channels last": (Pooled, (64, 3, 4, 4), torch.channels_last),
    "turned": (Turned, (64, 20, 64), torch.contiguous_format),
}
"""Models, the sizes of their input and how it lies in memory."""


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
    shapes = {"ConvNet": (2, 3, 8, 8), "Mlp": (4, 64), "Tied": (3, 16), "Deconv": (2, 4, 6, 6)}
    return model, torch.randn(shapes[kind.__name__]).to(dtype)


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


class Deconv(nn.Module):
    """A transposed convolution, whose output channels lie in dimension 1, between other layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2)
        self.fc = nn.Linear(8, 16)

    def forward(self, x):
        return self.fc(torch.relu(self.up(torch.relu(self.conv(x)))).mean((2, 3)))


def palettized(model, x, **spec):
    """The palettizer and the palettized copy of ``model``."""
    config = KMeansPalettizerConfig(
        global_config=ModuleKMeansPalettizerConfig(
            op_state_spec={"weight": PalettizationSpec(**spec)}, enable_fast_kmeans_mode=False
        )
    )
    palettizer = KMeansPalettizer(copy.deepcopy(model), config)
    return palettizer, palettizer.prepare((x,))


def pruned(model, x, sparsity=0.75):
    """The pruner and the pruned copy of ``model``."""
    spec = {"weight": PruningSpec(target_sparsity=sparsity)}
    config = MagnitudePrunerConfig(global_config=ModuleMagnitudePrunerConfig(op_state_spec=spec))
    pruner = MagnitudePruner(copy.deepcopy(model), config)
    return pruner, pruner.prepare((x,))


def grouped(size, axis=0):
    """Look-up tables for every ``size`` channels."""
    return PerGroupedChannelGranularity(axis=axis, group_size=size)


PALETTES = {
    **{f"{bits} bits": {"n_bits": bits} for bits in range(1, 9)},
    "groups of rows": {"n_bits": 4, "granularity": grouped(4)},
    "groups of columns": {"n_bits": 3, "granularity": grouped(4, axis=1)},
    "vectors": {"n_bits": 4, "cluster_dim": 2},
    "vectors in groups": {"n_bits": 2, "cluster_dim": 2, "granularity": grouped(4)},
    "int8 tables": {"n_bits": 4, "lut_qspec": QuantizationSpec(dtype="int8")},
    "uint8 tables": {"n_bits": 4, "lut_qspec": QuantizationSpec(dtype="uint8", qscheme="asymmetric")},
    "fp8 tables": {"n_bits": 4, "lut_qspec": QuantizationSpec(dtype="float8_e4m3fn")},
    "channel scale": {"n_bits": 4, "enable_per_channel_scale": True},
    "all together": {
        "n_bits": 4,
        "enable_per_channel_scale": True,
        "lut_qspec": QuantizationSpec(dtype="int8"),
        "granularity": grouped(4),
    },
}

JOINT = {
    "int8": W8,
    "int4 asymmetric": QuantizationSpec(dtype="int4", qscheme="asymmetric", granularity=CHANNEL),
    "int8 minval": QuantizationSpec(dtype="int8", qformulation="minval", granularity=CHANNEL),
    "fp8": QuantizationSpec(dtype="float8_e4m3fn", granularity=CHANNEL),
    "palette": {"n_bits": 4},
    "grouped palette": {"n_bits": 4, "granularity": grouped(4)},
}


def pruned_and_compressed(model, x, second):
    """The last compressor and the model that was pruned and then quantized or palettized."""
    pruner, _ = pruned(model, x)
    sparse = pruner.finalize(backend="_torch")
    if isinstance(second, dict):
        config = KMeansPalettizerConfig(
            global_config=ModuleKMeansPalettizerConfig(
                op_state_spec={"weight": PalettizationSpec(**second)}, enable_fast_kmeans_mode=False
            )
        )
        palettizer = KMeansPalettizer(sparse, config)
        return palettizer, palettizer.prepare((x,))
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(op_state_spec={"weight": second}, op_input_spec=None, op_output_spec=None),
        execution_mode="eager",
    )
    quantizer = Quantizer(sparse, config)
    zeros_lost = second.qformulation == "minval"
    with pytest.warns(ConfigMatchWarning, match="has no zero") if zeros_lost else contextlib.nullcontext():
        return quantizer, quantizer.prepare((x,))


class Functions(nn.Module):
    """Functions of what a layer makes of the first input, and of the other inputs as they are."""

    def __init__(self, layer, functions):
        super().__init__()
        self.layer, self.functions = layer, functions

    def forward(self, x, *others):
        y = self.layer(x)
        return tuple(function(y, *others) for function in self.functions)


def together(names, size=8):
    """Parameters for a test of several cases: lists of so many names, and each name alone for `make test-all`.

    What an export takes is mostly the same for one operator as for ten.
    """
    names = list(names)
    groups = [names[at : at + size] for at in range(0, len(names), size)]
    alone = [pytest.param([name], id=name, marks=pytest.mark.slow) for name in names]
    return [pytest.param(group, id=f"{group[0]} and others") for group in groups] + alone


def assert_alike(names, expected, actual, least=110):
    """Assert that results are those of the prepared model, named by their cases."""
    assert len(names) == len(expected) == len(actual)
    for name, one, other in zip(names, expected, actual, strict=True):
        assert other.shape == one.shape, name
        assert sqnr(one, other) > least, name
