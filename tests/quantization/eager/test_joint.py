"""Quantization on top of pruning and palettization, in eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitwright.errors import PlanError
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16)).eval()


X = (torch.randn(4, 32, generator=torch.Generator().manual_seed(0)),)


def test_pruned_weights_are_quantized_on_top(model):
    """The weight is the quantized masked weight: zeros stay zero, and the scale is that of what is left."""
    dense = model[0].weight.detach().clone()
    pruner = MagnitudePruner(model, MagnitudePrunerConfig())
    pruned = pruner.finalize(pruner.prepare(X), backend="_torch")
    masked = pruned[0].weight.detach().clone()
    assert 0.4 < (masked == 0).float().mean() < 0.6
    quantizer = Quantizer(pruned, QuantizerConfig.presets.w8(execution_mode="eager"))
    quantized = quantizer.prepare(X)
    reference = Quantizer(nn.Linear(32, 16), QuantizerConfig.presets.w8(execution_mode="eager"))
    with torch.no_grad():
        reference._model.weight.copy_(masked)
    assert torch.equal(quantized[0].weight, reference.prepare(X).weight)
    assert torch.equal(quantized[0].weight == 0, masked == 0)
    assert torch.equal(quantized[0].parametrizations.weight.original, dense)


def test_failing_prepare_leaves_the_pruning_in_place(model, monkeypatch):
    """Only what prepare added is taken out again."""
    pruner = MagnitudePruner(model, MagnitudePrunerConfig())
    pruned = pruner.finalize(pruner.prepare(X), backend="_torch")
    expected = pruned(*X)
    keys = list(pruned.state_dict())
    monkeypatch.setattr(FakeQuantizeImplBase, "enable_observer", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Quantizer(pruned, QuantizerConfig(execution_mode="eager")).prepare(X)
    assert list(pruned.state_dict()) == keys
    assert torch.equal(pruned(*X), expected)


def test_palettized_weights_are_left_alone_and_activations_quantized(model):
    """A default config does not quantize a palette; the plan says why."""
    palettizer = KMeansPalettizer(model, KMeansPalettizerConfig.presets.w4())
    palettized = palettizer.finalize(palettizer.prepare(X), backend="_torch")
    weight = palettized[0].weight.detach().clone()
    quantizer = Quantizer(palettized, QuantizerConfig(execution_mode="eager"))
    rows = {row.tensor: row for row in quantizer.plan(X)}
    assert rows["0.weight"].spec is None
    assert "palettization" in rows["0.weight"].note
    prepared = quantizer.prepare(X).eval()
    assert torch.equal(prepared[0].weight, weight)
    assert sum(isinstance(m, FakeQuantizeImplBase) for m in prepared.modules()) == 4
    assert torch.equal(copy.deepcopy(prepared)(*X), prepared(*X))


def test_quantizing_a_palette_by_name_is_an_error(model):
    """What has no meaning is refused where it was asked for."""
    palettizer = KMeansPalettizer(model, KMeansPalettizerConfig.presets.w4())
    palettized = palettizer.finalize(palettizer.prepare(X), backend="_torch")
    config = QuantizerConfig(
        module_name_configs={"0": ModuleQuantizerConfig(module_state_spec={"weight": QuantizationSpec()})},
        execution_mode="eager",
    )
    with pytest.raises(PlanError, match=r"0\.weight.*palettized already.*lut_qspec"):
        Quantizer(palettized, config).prepare(X)
