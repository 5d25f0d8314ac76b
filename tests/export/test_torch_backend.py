"""``ExportBackend.Torch``: plain weights with the values that they are compressed to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from bitwright import ExportBackend
from bitwright.config.spec import CompressionSimulatorBase, CompressionTargetTensor
from bitwright.export import finalize_eager
from bitwright.palettization import KMeansPalettizer
from bitwright.pruning import MagnitudePruner
from bitwright.quantization import Quantizer, QuantizerConfig


class Language(nn.Module):
    """An embedding whose weight is the head's, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.recurrent(self.embed(tokens))[0])


TOKENS = torch.arange(10).view(2, 5)


def language() -> Language:
    torch.manual_seed(0)
    return Language()


def eager(model: nn.Module) -> Quantizer:
    return Quantizer(model, QuantizerConfig(execution_mode="eager"))


def graph(model: nn.Module) -> Quantizer:
    return Quantizer(model, QuantizerConfig(execution_mode="graph"))


@pytest.mark.parametrize("make", [eager, KMeansPalettizer, MagnitudePruner])
def test_weights_are_plain_and_outputs_the_same(make: Any) -> None:
    model = language()
    weight = model.embed.weight
    compressor = make(model)
    prepared = compressor.prepare((TOKENS,)).eval()
    wanted, values = prepared(TOKENS), prepared.embed.weight.detach().clone()
    finalized = compressor.finalize(backend=ExportBackend.Torch)
    assert torch.equal(finalized(TOKENS), wanted)
    assert not any(map(parametrize.is_parametrized, finalized.modules()))
    assert finalized.embed.weight is weight
    assert finalized.head.weight is weight
    assert torch.equal(weight, values)
    assert [name for name, _ in finalized.named_parameters()] == [name for name, _ in language().named_parameters()]
    again = copy.deepcopy(finalized)
    assert torch.equal(again(TOKENS), wanted)


def test_activations_stay_simulated_and_observe_nothing() -> None:
    quantizer = eager(language())
    prepared = quantizer.prepare((TOKENS,))
    with quantizer.training_mode():
        copied = copy.deepcopy(prepared)  # its observers are on
    finalized = quantizer.finalize(copied, backend="torch").eval()
    simulators: list[Any] = [one for one in finalized.modules() if isinstance(one, CompressionSimulatorBase)]
    assert simulators
    assert not any(int(one.observer_enabled) for one in simulators)
    assert all(int(one.fake_quant_enabled) for one in simulators)


def test_graphs_are_copied() -> None:
    model = language()
    before = copy.deepcopy(model.state_dict())
    quantizer = graph(model)
    prepared = quantizer.prepare((TOKENS,)).eval()
    finalized = quantizer.finalize(backend="torch")
    assert torch.equal(finalized(TOKENS), prepared(TOKENS))
    weight: Any = finalized.get_parameter("head.weight")
    assert not torch.equal(weight, before["head.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    targets = [one.quantization_target for one in finalized.modules() if isinstance(one, CompressionSimulatorBase)]  # type: ignore[attr-defined]
    assert targets
    assert set(targets) == {CompressionTargetTensor.ACTIVATION}


def test_a_further_technique_may_follow() -> None:
    model = language()
    palettizer = KMeansPalettizer(model)
    palettizer.prepare((TOKENS,))
    palettizer.finalize(backend="torch")
    quantizer = graph(model)
    assert quantizer.prepare((TOKENS,))(TOKENS).shape == (2, 5, 16)


def test_weights_of_several_tensors_and_stacks_of_techniques() -> None:
    model = nn.Linear(8, 8)
    MagnitudePruner(model).prepare((torch.randn(2, 8),))
    palettizer = KMeansPalettizer(model)
    palettizer.prepare((torch.randn(2, 8),))
    values = model.weight.detach().clone()
    assert finalize_eager(model, "torch") is model
    assert torch.equal(model.weight, values)
    assert not parametrize.is_parametrized(model)
    assert (values == 0).sum() == 32
