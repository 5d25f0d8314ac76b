"""What a model computes under ``torch.no_grad`` gets no gradients in a graph either."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from bitwright import ExportBackend
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr


class Frozen(nn.Module):
    """Features of a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.features(x).relu()
        return self.head(y)


class Partly(Frozen):
    """One layer has a path with gradients and paths without, one of which has a part with gradients again."""

    @torch.no_grad()
    def target(self, x: torch.Tensor) -> Any:
        return self.features(x).tanh().chunk(2, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.features(x).relu()
        with torch.no_grad():
            scaled = y * 2
            with torch.enable_grad():
                again = self.head(y)
        left, right = self.target(x)
        return self.head(y + scaled) + again + left * right


class ByMode(Frozen):
    """A condition says whether a part is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(mode=False):
            y = self.features(x).relu()
        with torch.set_grad_enabled(mode=self.training):
            return self.head(y)


class Inferred(Frozen):
    """Inference mode, whose results are copied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            y = self.features(x).relu()
        return self.head(y.clone())


class Clamped(Frozen):
    """Keeps its weight in bounds, and scales a result in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.features.weight.clamp_(-0.2, 0.2)
        y = self.features(x)
        with torch.no_grad():
            z = y.mul_(2)
        return self.head(z)


class Normed(Frozen):
    """The largest singular value is followed by iterations in place."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.head)


class Codebook(Frozen):
    """Nearest entries of a table, passed straight through; the table is a running average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5, 8))
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.features(x)
        with torch.no_grad():
            nearest = torch.cdist(y, self.table).argmin(-1)
            entries = self.table[nearest]
            self.table.mul_(0.99).add_(0.01 * y.mean(0))
        return self.head(y + (entries - y).detach())


@pytest.mark.filterwarnings("ignore:.*computed-weight:bitwright.errors.ConfigMatchWarning")
@pytest.mark.parametrize("kind", [Frozen, Partly, ByMode, Inferred, Clamped, Normed, Codebook])
def test_gradients_are_those_of_the_float_model(kind: type[nn.Module]) -> None:
    """With simulators off, to the digits of the arithmetic; those that the float model lacks are lacking."""
    torch.manual_seed(0)
    model, x = kind().train(), torch.randn(6, 8)
    quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8a8())
    prepared = quantizer.prepare((x,))
    quantizer.disable_observer()
    quantizer.disable_fake_quant()
    for _ in range(2):
        for trained in (model, prepared):
            trained.zero_grad()
            trained(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        found = prepared.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(found, parameter.grad)


@pytest.mark.parametrize("preset", ["w8a8", "w2a4"])
def test_simulators_behind_it_learn_and_files_have_no_trace_of_it(preset: str) -> None:
    """Nothing of it is left in what is finalized; ranges are observed and learned as elsewhere."""
    torch.manual_seed(0)
    model, x = Partly().train(), torch.randn(6, 8)
    quantizer = Quantizer(copy.deepcopy(model), getattr(QuantizerConfig.presets, preset)())
    prepared = quantizer.prepare((x,))
    stops = [node for node in prepared.graph.nodes if node.target is torch.ops.aten.detach.default]
    assert len(stops) == 2
    with quantizer.training_mode():
        for _ in range(2):
            prepared(x).square().sum().backward()
    assert prepared.get_parameter("features.weight").grad is not None
    expected = prepared.eval()(x)
    finalized = quantizer.finalize(backend=ExportBackend._TORCH)
    assert not [node for node in finalized.graph.nodes if node.target is torch.ops.aten.detach.default]
    assert sqnr(expected, finalized(x)) > 100
    assert copy.deepcopy(prepared)(x).equal(expected)


def test_positions_that_nothing_is_learned_from_are_left_as_they_are() -> None:
    """As the rotations of language models, which compute them under ``no_grad``."""

    class Rotated(Frozen):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                angles = torch.arange(x.shape[-1]).to(x.dtype).cos()
            return self.head(self.features(x) * angles)

    prepared = Quantizer(Rotated().train(), QuantizerConfig.presets.w8a8()).prepare((torch.randn(6, 8),))
    assert not [node for node in prepared.graph.nodes if node.target is torch.ops.aten.detach.default]


def test_scopes_of_other_threads_are_none_of_a_captures() -> None:
    """They work as always meanwhile, the capture does not note them, and torch's classes are as before in the end."""
    before = torch.no_grad.__enter__, torch.set_grad_enabled.__exit__
    ended = threading.Event()

    def evaluate() -> int:
        scopes = 0
        while not ended.is_set() or scopes < 100:
            with torch.no_grad():
                assert not torch.ones(2, requires_grad=True).exp().requires_grad
                with torch.enable_grad():
                    assert torch.ones(2, requires_grad=True).exp().requires_grad
            scopes += 1
        return scopes

    with ThreadPoolExecutor(1) as thread:
        scopes = thread.submit(evaluate)
        try:
            graph = Quantizer(Frozen().train(), QuantizerConfig.presets.w8()).prepare((torch.randn(6, 8),)).graph
        finally:
            ended.set()
        assert scopes.result() >= 100
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)) == 1
    assert (torch.no_grad.__enter__, torch.set_grad_enabled.__exit__) == before


@pytest.mark.filterwarnings("ignore::bitwright.errors.ConfigMatchWarning")
@pytest.mark.parametrize("kind", [Clamped, Normed, Codebook])
@pytest.mark.parametrize("export_with_no_grad", [True, False])
def test_preparing_changes_none_of_what_the_model_writes_to(kind: type[nn.Module], export_with_no_grad: bool) -> None:
    """Also where the writes stand in an inner graph, as in captures with gradients."""
    torch.manual_seed(0)
    model, x = kind().train(), torch.randn(6, 8)
    before = copy.deepcopy(model.state_dict())
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8())
    quantizer.prepare((x,), export_with_no_grad=export_with_no_grad)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
