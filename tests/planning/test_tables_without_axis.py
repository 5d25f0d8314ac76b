"""Tables that a model reads like an activation: presets leave them as they are, as nothing gives them an axis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.errors import PlanError
from bitwright.quantization import Quantizer, QuantizerConfig

READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda table: F.layer_norm(table, (8,)),  # relative positions of DeBERTa
    "rms_norm": lambda table: F.rms_norm(table, (8,)),
    "softmax": lambda table: table.softmax(-1),
    "gelu": F.gelu,
    "normalize": lambda table: F.normalize(table, dim=-1),
    "length": lambda table: table / table.norm(dim=-1, keepdim=True),
    "transposed": lambda table: table.t(),
}


class Positions(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.linear, self.read = nn.Embedding(8, 8), nn.Linear(8, 8), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.read(self.table.weight)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", READS)
def test_presets_leave_a_table_that_is_read_like_an_activation(name: str, mode: str) -> None:
    quantizer = Quantizer(Positions(READS[name]), QuantizerConfig.presets.w8(execution_mode=mode))
    plan = quantizer.plan((torch.randn(2, 8, 8),))
    rows = {row.tensor: row for row in plan}
    assert rows["linear.weight"].spec is not None
    assert "table.weight" not in rows or rows["table.weight"].spec is None
    assert not plan.problems


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_table_that_is_multiplied_without_an_axis_is_an_error(mode: str) -> None:
    class Product(Positions):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + torch.einsum("ij,kj->ik", self.table.weight, self.read(self.table.weight))

    quantizer = Quantizer(Product(F.gelu), QuantizerConfig.presets.w8(execution_mode=mode))
    with pytest.raises(PlanError, match=r"\[axis-unresolved\] table.weight"):
        quantizer.prepare((torch.randn(2, 8, 8),))
