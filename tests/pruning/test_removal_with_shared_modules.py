"""Physical removal in networks that call one activation, pooling or dropout module in several places."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bitwright.pruning import MagnitudePruner, PruningSpec, ShrinkReport
from bitwright.pruning.spec import ChannelStructured

from .networks import config_of


class Block(nn.Module):
    """A residual block as in torchvision: one ReLU behind every norm and behind the sum."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        sizes = (inputs, *[width] * (len(kernels) - 1), outputs)
        self.convs = nn.ModuleList(
            nn.Conv2d(sizes[i], sizes[i + 1], k, stride if i == len(kernels) - 2 else 1, k // 2, bias=False)
            for i, k in enumerate(kernels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes[1:])
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        for conv, norm in zip(self.convs[:-1], self.norms[:-1], strict=True):
            x = self.relu(norm(conv(x)))
        x = self.norms[-1](self.convs[-1](x))
        x += identity
        return self.relu(x)


def resnet(*, bottleneck: bool) -> nn.Sequential:
    """A small ResNet of ``Block``; its norms keep zeros, as padded convolutions need."""
    torch.manual_seed(0)
    wide = 4 if bottleneck else 1
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        Block(8, 8, 1, bottleneck=bottleneck), Block(8 * wide, 8, 1, bottleneck=bottleneck),
        Block(8 * wide, 12, 2, bottleneck=bottleneck), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12 * wide, 5),
    )  # fmt: skip
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_var.uniform_(0.5, 2)
    return model.eval()


def shrunk(model: nn.Module, example: torch.Tensor) -> ShrinkReport:
    """Mask half of the channels, remove what can go, and compare on other inputs than the example."""
    spec = PruningSpec(target_sparsity=0.5, pruning_scheme=ChannelStructured())
    pruner = MagnitudePruner(model.eval(), config_of(spec))
    pruner.prepare((example,))
    other = torch.randn(3, *example.shape[1:])
    before = model(other)
    report = pruner.shrink((example,))
    torch.testing.assert_close(model(other), before, atol=1e-5, rtol=1e-5)
    return report


@pytest.mark.parametrize("bottleneck", [False, True])
def test_residual_blocks_with_one_relu(bottleneck: bool) -> None:
    """What is inside a block goes, and of the sums what no branch needs."""
    model = resnet(bottleneck=bottleneck)
    with torch.no_grad():  # all that meets in the first sums has its weak channels at the same places
        for block in (model[3], model[4]):
            for conv in (block.convs[-1], *(block.downsample or [])[:1]):
                conv.weight[::2] *= 1e-3
        model[0].weight[::2] *= 1e-3
    report = shrunk(model, torch.randn(2, 3, 9, 9))
    wide = 4 if bottleneck else 1
    assert report.removed["4.convs.0"] == (8, 4)
    assert report.removed["4.convs.1"] == (8 * wide if not bottleneck else 8, 4)
    assert report.removed[f"3.convs.{2 if bottleneck else 1}"] == (8 * wide, 4 * wide)
    assert report.parameters_after < 0.6 * report.parameters_before


class Sharing(nn.Module):
    """Calls what it is given behind two layers, at different widths."""

    def __init__(self, shared: nn.Module, join: Callable[..., torch.Tensor], width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, width, 1)
        self.shared, self.join = shared, join
        self.head = nn.Conv2d(width if join is latter else 8 + width, 4, 1)

    def forward(self, x):
        x = self.shared(self.first(x))
        x = self.join(x, self.second(x))
        return self.head(self.shared(x))


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Concatenate, the images cropped to the smaller."""
    size = y.shape[-1]
    return torch.cat([x[..., :size, :size], y], 1)


def latter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y


SHARED = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "sigmoid": nn.Sigmoid(),
    "prelu": nn.PReLU(),
    "pool": nn.AvgPool2d(3, 1, 1),
    "dropout": nn.Dropout2d(0.4),
    "all": nn.Sequential(nn.SiLU(), nn.MaxPool2d(2, 1), nn.Dropout(0.2), nn.Identity()),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("join", [joined, latter])
def test_one_module_in_two_places(name: str, join: Callable[..., torch.Tensor]) -> None:
    """Channels are followed through every call, each call's at their own width."""
    torch.manual_seed(0)
    model = Sharing(SHARED[name], join, 6)
    report = shrunk(model, torch.randn(2, 3, 9, 9))
    if name != "pool":  # constants that meet zeros at the border
        assert report.removed == {"first": (8, 4), "second": (6, 3)}


@pytest.mark.parametrize("shared", [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.PReLU(8)])
def test_modules_with_a_tensor_along_the_channels_keep_those_of_all_calls(shared: nn.Module) -> None:
    """A tensor for two places is cut for neither."""
    torch.manual_seed(0)
    model = Sharing(shared, latter, 8)
    with torch.no_grad():
        model.second.weight[1::2] *= 1e-3  # other channels than those of the first
        model.first.weight[::2] *= 1e-3
    report = shrunk(model, torch.randn(2, 3, 9, 9))
    assert report.removed == {}
    assert {"first", "second"} <= set(report.kept)
