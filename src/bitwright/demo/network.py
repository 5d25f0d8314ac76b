"""The network of the demo and its training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .digits import Digits

__all__ = ["DigitsCNN", "accuracy", "train"]


class SeparableConv(nn.Module):
    """Depthwise 3×3 and pointwise 1×1 convolution, each with batch norm and ReLU."""

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(
            channels_in, channels_in, 3, stride=stride, padding=1, groups=channels_in, bias=False
        )
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.relu1 = nn.ReLU()
        self.pointwise = nn.Conv2d(channels_in, channels_out, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.relu2 = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[N, Cin, H, W]`` to ``[N, Cout, H', W']``."""
        x = self.relu1(self.norm1(self.depthwise(x)))
        y: torch.Tensor = self.relu2(self.norm2(self.pointwise(x)))
        return y


class DigitsCNN(nn.Module):
    """A depthwise-separable CNN with batch norm and a residual add: 8×8 images in, 10 logits out."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.down = SeparableConv(width, 2 * width, stride=2)
        self.residual = SeparableConv(2 * width, 2 * width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map ``[N, 1, 8, 8]`` to logits ``[N, 10]``."""
        x = self.down(self.stem(images))
        x = x + self.residual(x)
        logits: torch.Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def train(
    model: nn.Module,
    digits: Digits,
    *,
    epochs: int,
    learning_rate: float,
    seed: int = 0,
    after_step: Callable[[], None] | None = None,
) -> None:
    """Train in place with Adam, a cosine schedule and cross entropy."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    steps = epochs * (len(digits.train_images) // 64)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for images, labels in digits.batches(64, generator):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if after_step is not None:
                after_step()


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of rows whose largest logit is the label."""
    return (logits.argmax(1) == labels).float().mean().item()
