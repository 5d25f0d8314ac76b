"""Small models for the tests of graph mode, and measures of what comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bitwright.quantization import Quantizer
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase


class Net(nn.Module):
    """Convolutions with batch norm, a residual add, dropout, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.25)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)) + y)
        return self.fc(self.drop(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1)))


IMAGE = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def net(seed: int = 0) -> Net:
    """Build the network with statistics as if it had been trained."""
    torch.manual_seed(seed)
    return with_statistics(Net().eval())


def with_statistics(model: nn.Module) -> Any:
    """Give the batch norms of ``model`` statistics and gains that matter; return the model."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0.0, 0.5)
            module.running_var.uniform_(0.5, 2.0)
            if module.weight is not None:
                nn.init.uniform_(module.weight, 0.5, 2.0)
                nn.init.normal_(module.bias)
    return model


def calibrated(quantizer: Quantizer, *batches: tuple[torch.Tensor, ...]) -> Any:
    """Prepare with the first batch, calibrate with all; return the prepared model."""
    prepared: Any = quantizer.prepare(batches[0])
    with quantizer.calibration_mode():
        for batch in batches:
            prepared(*batch)
    return prepared


def train_steps(quantizer: Quantizer, prepared: nn.Module, *batches: tuple[torch.Tensor, ...]) -> None:
    """Take one optimizer step for each batch inside training mode."""
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-2)
    with quantizer.training_mode():
        for batch in batches:
            optimizer.zero_grad()
            prepared(*batch).square().mean().backward()
            optimizer.step()


def simulators(model: nn.Module) -> list[FakeQuantizeImplBase]:
    """Return the simulators of a model, each once."""
    return [module for module in model.modules() if isinstance(module, FakeQuantizeImplBase)]
