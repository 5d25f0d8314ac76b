"""Networks as in textbooks, as anybody writes them, through every target: what the prepared model computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from bitwright.export.targets import TARGETS
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr


class Residual(nn.Module):
    """Two convolutions with batch norms and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = shortcut if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Excited(nn.Module):
    """An inverted bottleneck with squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32), nn.Hardswish())
        self.depthwise = nn.Sequential(
            nn.Conv2d(32, 32, 5, 1, 2, groups=32, bias=False), nn.BatchNorm2d(32), nn.ReLU6()
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Conv2d(8, 32, 1), nn.Hardsigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(32, 8, 1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(self.expand(x))
        return x + self.project(y * self.gate(y))


class Hourglass(nn.Module):
    """Down, up again, and joined with what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1))
        self.second = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join = nn.Conv2d(16, 8, 3, padding=1, padding_mode="reflect")
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        y = torch.cat([first, self.up(self.second(first))], 1)
        return F.interpolate(self.head(torch.relu(self.join(y))), scale_factor=2, mode="bilinear", align_corners=False)


class Recurrent(nn.Module):
    """Words, a recurrent layer, the last step."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 4)
        self.recurrent = kind(32, 32, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        steps, _ = self.recurrent(self.words(tokens))
        return self.head(steps[:, -1])


class Encoder(nn.Module):
    """Patches of an image, a class token, places, torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 32)), nn.Parameter(torch.randn(1, 17, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), y], 1) + self.places
        return self.head(self.norm(self.layers(y))[:, 0])


class Decoder(nn.Module):
    """A small GPT: one projection for queries, keys and values, causal attention, the words' table as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(32), nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(approximate="tanh"), nn.Dropout(0.1), nn.Linear(128, 32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, 32))
        return self.head(self.norm3(x + self.mlp(self.norm2(x))))


class Waves(nn.Module):
    """Convolutions over time that look back only, gates, an average over time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv1d(2, 16, 3), nn.Conv1d(16, 32, 3, dilation=2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.elu(self.first(F.pad(x, (2, 0))))
        y = F.glu(self.wide(F.pad(y, (4, 0))), dim=1)
        return F.log_softmax(self.head(F.avg_pool1d(y, 2).mean(-1)), -1)


def _images(size: int = 16, channels: int = 3) -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, channels, size, size),)


def _lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.Tanh(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10), nn.Softmax(1),
    )  # fmt: skip


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Residual(8, 8, 1), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def _mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(), Excited(),
        nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


def _tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 50, (4, 12)),)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "lenet": (_lenet, lambda: _images(16, 1)),
    "resnet": (_resnet, lambda: _images(32)),
    "mobilenet": (_mobilenet, _images),
    "unet": (Hourglass, _images),
    "lstm": (lambda: Recurrent(nn.LSTM), _tokens),
    "gru": (lambda: Recurrent(nn.GRU), _tokens),
    "vit": (Encoder, _images),
    "gpt": (Decoder, _tokens),
    "tcn": (Waves, lambda: (torch.randn(4, 2, 24),)),
    "mlp": (lambda: nn.Sequential(nn.Linear(32, 64), nn.Sigmoid(), nn.Linear(64, 32)), lambda: (torch.randn(4, 32),)),
}
W8A8, W8, W4, PALETTE = "w8a8", "w8", "w4", "palette"
KINDS = {
    "torch": (W8A8, W4, PALETTE),
    "onnx": (W8A8, W4, W8),
    "coreai": (W8A8, PALETTE, W4),
    "coreml": (PALETTE, W8, W4),
    "executorch": (W8A8, W8),
}
"""What a target takes."""
LEAST_DECIBEL = {W8A8: 25, W8: 90, W4: 90, PALETTE: 90}
"""With quantized activations, another order of a sum may move a code by one, and the codes behind it."""


def _prepared(model: nn.Module, kind: str, mode: str, inputs: list[tuple[torch.Tensor, ...]]) -> nn.Module:
    """Prepare as a user does: a preset, its mode, a few batches."""
    if kind == PALETTE:
        return KMeansPalettizer(model, KMeansPalettizerConfig()).prepare(inputs[0])
    quantizer = Quantizer(model, getattr(QuantizerConfig.presets, kind)(execution_mode=mode))
    prepared: nn.Module = quantizer.prepare(inputs[0])
    if kind == W8A8:
        with quantizer.calibration_mode(), torch.no_grad():
            for batch in inputs:
                prepared(*batch)
    return prepared


def _cases() -> list[Any]:
    """Every network in every target, as one kind; the other kinds are left to `make test-all`."""
    return [
        pytest.param(
            name, target, kind, id=f"{name}-{target}-{kind}", marks=[] if at == row % len(kinds) else [pytest.mark.slow]
        )
        for row, name in enumerate(NETWORKS)
        for target, kinds in KINDS.items()
        for at, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(("name", "target", "kind"), _cases())
def test_files_compute_what_the_prepared_model_does(name: str, target: str, kind: str, tmp_path: Path) -> None:
    """Also for inputs that were not seen before."""
    writer = TARGETS[target]
    if (missing := writer.missing()) is not None:
        pytest.skip(missing)
    torch.manual_seed(0)
    make, draw = NETWORKS[name]
    model, batches = make().eval(), [draw() for _ in range(3)]
    mode = "graph" if list(NETWORKS).index(name) % 2 else "eager"
    prepared = _prepared(model, kind, mode, batches[:2])
    path = writer.write(prepared, batches[0], tmp_path / f"model{writer.suffix}", {}, None)
    if writer.run is None:
        assert sum(file.stat().st_size for file in path.rglob("*")) > 0
        return
    for batch in batches:
        with torch.no_grad():
            expected = tree_leaves(prepared(*batch))
        for one, other in zip(expected, writer.run(path, batch), strict=True):
            assert one.shape == other.shape
            assert sqnr(one, other) > LEAST_DECIBEL[kind]
