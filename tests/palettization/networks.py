"""Small models and configs for the tests of palettization."""

from __future__ import annotations

import torch
from torch import nn

from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.palettization.kmeans.kmeans_fake_palettize import _KMeansFakePalettize

Simulator = _KMeansFakePalettize


class ConvLinear(nn.Module):
    """A convolution of 32 channels and a linear layer of 10 outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.linear = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Tokens(nn.Module):
    """An embedding, an LSTM, attention and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.rnn(self.embed(tokens))
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x)


def image() -> tuple[torch.Tensor]:
    """An input of ``ConvLinear``."""
    return (torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


def config_of(spec: PalettizationSpec | None = None, **fields: object) -> KMeansPalettizerConfig:
    """A config with one spec for all weights; vectors switch the fast mode off."""
    spec = PalettizationSpec() if spec is None else spec
    if spec.cluster_dim > 1:
        fields.setdefault("enable_fast_kmeans_mode", False)
    module = ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}, **fields)  # type: ignore[arg-type]
    return KMeansPalettizerConfig(global_config=module)


def palettized(model: nn.Module, example: tuple[torch.Tensor, ...], **spec: object) -> KMeansPalettizer:
    """A palettizer whose model is prepared with one spec for all weights."""
    palettizer = KMeansPalettizer(model, config_of(PalettizationSpec(**spec)))  # type: ignore[arg-type]
    palettizer.prepare(example)
    return palettizer


def simulators(model: nn.Module) -> list[_KMeansFakePalettize]:
    """All simulators of a model, each once."""
    return [module for module in model.modules() if isinstance(module, _KMeansFakePalettize)]


def simulator(**spec: object) -> _KMeansFakePalettize:
    """A simulator on its own, in eval mode."""
    fields = {key: spec.pop(key) for key in ("sensitivities", "output_axis", "preserve_zeros") if key in spec}
    chosen = PalettizationSpec(**spec)  # type: ignore[arg-type]
    return _KMeansFakePalettize(**chosen.__dict__, **fields).eval()  # type: ignore[arg-type]
