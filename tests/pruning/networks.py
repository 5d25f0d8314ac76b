"""Small models for the tests of pruning."""

from __future__ import annotations

import torch
from torch import nn

from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec


def counted(rows: int, columns: int) -> nn.Linear:
    """A linear layer whose weights are 1, 2, 3, ...: all magnitudes differ."""
    layer = nn.Linear(columns, rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, rows * columns + 1).view(rows, columns))
    return layer


def config_of(spec: PruningSpec | None = None, **fields: object) -> MagnitudePrunerConfig:
    """A config with one spec for all weights, and further fields of the module config."""
    chosen = PruningSpec() if spec is None else spec
    return MagnitudePrunerConfig(
        global_config=ModuleMagnitudePrunerConfig(op_state_spec={"weight": chosen}, **fields)  # type: ignore[arg-type]
    )


def pruned(model: nn.Module, example: tuple[torch.Tensor, ...], **spec: object) -> MagnitudePruner:
    """A pruner whose model is prepared with one spec for all weights."""
    pruner = MagnitudePruner(model, config_of(PruningSpec(**spec)))  # type: ignore[arg-type]
    pruner.prepare(example)
    return pruner


def zeros(tensor: torch.Tensor) -> float:
    """The share of zeros."""
    return (tensor == 0).float().mean().item()


class SmallCNN(nn.Module):
    """Convolutions (plain, grouped, transposed), a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=4, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.up(torch.relu(self.grouped(x))))
        return self.head(x.mean((2, 3)))


class TokenModel(nn.Module):
    """An embedding, an RNN and attention: weights in lists, and under other names than ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.rnn(self.embed(tokens))
        return self.attention(x, x, x, need_weights=False)[0]
