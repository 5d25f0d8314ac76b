"""Parameters that something else than a layer reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.quantization import Quantizer, QuantizerConfig
from tests.lambda_module import Lambda

from .networks import calibrated


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_every_reader_of_a_quantized_weight_reads_the_quantized_one(mode: str) -> None:
    """A penalty or a tied product sees the weight that the layer computes with."""

    def forward(s: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return s.layer(x), s.layer.weight * 1.0, s.layer.weight.abs().sum(1)

    torch.manual_seed(0)
    model, x = Lambda(forward, layer=nn.Linear(8, 6)).eval(), torch.randn(4, 8)
    config = QuantizerConfig.presets.w4(execution_mode=mode)
    result, weight, norm = Quantizer(copy.deepcopy(model), config).prepare((x,))(x)
    assert not torch.equal(weight, model.layer.weight)
    assert all(len(row.unique()) <= 16 for row in weight)
    torch.testing.assert_close(result, x @ weight.T + model.layer.bias)
    torch.testing.assert_close(norm, weight.abs().sum(1))


def test_a_parameter_behind_flatten_has_a_simulator_of_its_own() -> None:
    """Its range is its own, a hundred times that of the activation that it is added to."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        return s.layer(x) + torch.flatten(s.offset)

    torch.manual_seed(0)
    model = Lambda(forward, layer=nn.Linear(8, 8)).eval()
    model.offset = nn.Parameter(100 * torch.randn(2, 4))
    x = torch.randn(4, 8)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8())
    groups = {row.tensor: row.group for row in quantizer.plan((x,)).rows}
    assert groups["flatten[input]"] == groups["flatten[output 0]"] != groups["linear[output 0]"]
    prepared = calibrated(quantizer, (x,))
    assert (prepared(x) - model(x)).abs().max() < 0.02 * model.offset.abs().max()
