"""Programs with branches: what ExecuTorch makes of ``torch.cond``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("executorch.exir")

from bitwright.export.executorch import export_executorch, run_executorch
from tests.measures import sqnr


class Gate(nn.Module):
    """Layers before, in and after two branches, of which the first reads a value that is computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.a, self.b, self.head = (nn.Linear(16, size) for size in (16, 16, 16, 4))

    def forward(self, x):
        x = torch.relu(self.pre(x))
        x = torch.cond(x.mean() > 0.1, lambda y: torch.relu(self.a(y)), lambda y: self.b(y) * 2, (x,))
        return self.head(x)


def test_layers_before_branches(tmp_path):
    """Each branch reads what was computed before it, through a view."""
    torch.manual_seed(0)
    model, x = Gate().eval(), torch.randn(3, 5, 16)
    path = export_executorch(model, (x,), tmp_path / "m.pte")
    for inputs, first in ((x, True), (x / 100, False)):
        assert bool(torch.relu(model.pre(inputs)).mean() > 0.1) == first
        assert sqnr(model(inputs), run_executorch(path, (inputs,))[0]) > 100
