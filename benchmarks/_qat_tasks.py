"""The two tasks that benchmarks of training share: their networks, data, and the training loop."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _models import Block
from torch import nn
from torch.nn import functional as F

CONTEXT = 48


class CNN(nn.Module):
    """Depthwise-separable convolutions with batch norm on 8×8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.depth, self.norm1 = nn.Conv2d(32, 32, 3, 2, 1, groups=32, bias=False), nn.BatchNorm2d(32)
        self.point, self.norm2 = nn.Conv2d(32, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm0(self.stem(x)))
        x = F.relu(self.norm2(self.point(F.relu(self.norm1(self.depth(x))))))
        return self.head(x.mean((2, 3)))


class CharTransformer(nn.Module):
    """Two blocks over characters."""

    def __init__(self, vocabulary: int = 97, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {"digits": CNN, "characters": CharTransformer}


def digits_data(steps: int, seed: int = 0) -> dict[str, Any]:
    """Batches of 64 digits, drawn from the training images, and the held-out test set."""
    from bitwright.demo import load_digits

    digits = load_digits()
    generator = torch.Generator().manual_seed(seed)
    picks = [torch.randint(0, len(digits.train_images), (64,), generator=generator) for _ in range(steps)]
    return {
        "batches": [(digits.train_images[i], digits.train_labels[i]) for i in picks],
        "test": (digits.test_images, digits.test_labels),
    }


def character_data(steps: int, seed: int = 0) -> dict[str, Any]:
    """Batches of 16 stretches of source text, and 128 stretches of the last tenth of it as test set."""
    names = ("argparse", "ast", "dataclasses", "datetime", "inspect", "tarfile", "typing", "unittest.mock", "zipfile")
    sources = [Path(str(importlib.import_module(name).__file__)).read_text() for name in names]
    return character_batches("\n".join(sources), steps, batch=16, test=128, seed=seed)


def character_batches(text: str, steps: int, batch: int, test: int, seed: int) -> dict[str, Any]:
    """Batches of stretches of a text, and ``test`` stretches of its last tenth."""
    codes = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32).long()
    codes = (codes - 31).clamp(0, 96)
    held_out = len(codes) // 10
    generator = torch.Generator().manual_seed(seed)

    def draw(text: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(0, len(text) - CONTEXT - 1, (count,), generator=generator)
        rows = torch.stack([text[s : s + CONTEXT + 1] for s in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return {"batches": [draw(codes[:-held_out], batch) for _ in range(steps)], "test": draw(codes[-held_out:], test)}


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


class Loop:
    """Adam with a linear decay to zero over all batches."""

    def __init__(self, model: nn.Module, batches: list[Any], groups: Any) -> None:
        self.model, self.batches = model, batches
        self.optimizer = torch.optim.Adam(groups)
        self.decay = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: max(0.0, 1 - i / len(batches)))
        self.done = 0

    def step(self) -> float:
        """Train on the next batch and return the seconds that it took."""
        x, y = self.batches[self.done % len(self.batches)]
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss_of(self.model(x), y).backward()
        self.optimizer.step()
        self.decay.step()
        self.done += 1
        return time.perf_counter() - start


def train(model: nn.Module, batches: list[Any], groups: Any, after: Callable[[], object] | None = None) -> float:
    """Train over all batches, calling ``after`` after each; return the median seconds of a step."""
    loop = Loop(model, batches, groups)
    seconds = []
    for _ in batches:
        seconds.append(loop.step())
        if after is not None:
            after()
    return statistics.median(seconds)


@torch.no_grad()
def evaluate(model: nn.Module, test: Any) -> dict[str, float]:
    """Return loss and accuracy in eval mode."""
    model.eval()
    logits = model(test[0])
    return {"loss": float(loss_of(logits, test[1])), "accuracy": float((logits.argmax(-1) == test[1]).float().mean())}
