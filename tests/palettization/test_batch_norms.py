"""Averages of batch norms that were taken before weights were compressed are worth taking anew."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import update_bn

from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()


def palettized(model: nn.Module, x: torch.Tensor, strategy: str) -> nn.Module:
    spec = PalettizationSpec(n_bits=1, training_strategy_spec={"type": strategy})
    module = ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec})
    return KMeansPalettizer(model, KMeansPalettizerConfig(global_config=module)).prepare((x,))


def pruned(model: nn.Module, x: torch.Tensor, _: str) -> nn.Module:
    return MagnitudePruner(model, MagnitudePrunerConfig()).prepare((x,))


@pytest.mark.parametrize(("make", "strategy"), [(palettized, "default"), (palettized, "ste"), (pruned, "")])
def test_averages_are_those_of_compressed_weights(make, strategy: str) -> None:
    """torch's own way works on a prepared model: averages are those of a plain model with the same weights, and the
    weights stay."""
    model, batches = network(), [torch.randn(8, 3, 10, 10) for _ in range(3)]
    prepared = make(copy.deepcopy(model), batches[0], strategy)
    plain = copy.deepcopy(model)
    for place in (0, 3):
        assert parametrize.is_parametrized(prepared[place])
        plain[place].weight.data = prepared[place].weight.detach().clone()
    update_bn(batches, prepared)
    update_bn(batches, plain)
    assert not torch.allclose(plain[1].running_var, torch.ones(16))
    torch.testing.assert_close(prepared[1].running_var, plain[1].running_var)
    torch.testing.assert_close(prepared[1].running_mean, plain[1].running_mean)
    assert torch.equal(prepared[0].weight, plain[0].weight)
    with torch.no_grad():
        torch.testing.assert_close(prepared(batches[0]), plain(batches[0]))
