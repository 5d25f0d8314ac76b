"""Weights of a network that was really trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F


@pytest.fixture(scope="session")
def trained_weights() -> list[torch.Tensor]:
    """Weight matrices of a small network trained on scikit-learn's digits."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _ in range(80):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    assert (model(images).argmax(1) == labels).float().mean() > 0.95
    return [model[0].weight.detach(), model[2].weight.detach()]
