"""Small weights of a graph are quantized by one kernel call, with the results of their simulators' own calls."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bitwright.program import graph_module, small_weights
from bitwright.quantization import Quantizer, QuantizerConfig
from bitwright.quantization.spec import _shortcut


class Net(nn.Module):
    """Six small weights, one of them tied and one large; two outputs that share no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
        self.second = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.wide = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 8))
        self.again = nn.Linear(16, 8)
        self.again.weight = self.first[4].weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x) + self.again(x.repeat(1, 2)), self.wide(self.second(x))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of weights quantized at once, in the order of the calls."""
    found: list[int] = []

    def count(weights: list[Any], tasks: list[Any]) -> Any:
        results = small_weights_of(weights, tasks)
        found.append(sum(y is not None for y in results))
        return results

    small_weights_of = small_weights.quantized_small
    monkeypatch.setattr(small_weights, "quantized_small", count)
    return found


def prepared() -> tuple[Any, Quantizer]:
    torch.manual_seed(0)
    quantizer = Quantizer(Net(), QuantizerConfig(execution_mode="graph"))
    return quantizer.prepare((torch.randn(4, 8),)), quantizer


def train(change: Callable[[Any, int], object] = lambda model, step: None, steps: int = 4) -> list[torch.Tensor]:
    """Outputs, gradients and state of a training run, with ``change`` before each step."""
    model, quantizer = prepared()
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    with quantizer.training_mode():
        for step in range(steps):
            change(model, step)
            first, second = model(torch.randn(4, 8))
            optimizer.zero_grad()
            first.square().mean().backward()
            second.square().mean().backward()
            found += [
                first.detach(),
                second.detach(),
                *(p.grad.clone() for p in model.parameters() if p.grad is not None),
            ]
            optimizer.step()
    return [*found, *model.state_dict().values()]


def simulators(model: Any) -> list[Any]:
    return [model.get_submodule(name) for name in small_weights.weights_simulated_once(model.graph)]


def _state(model: Any, step: int) -> None:
    if step >= 2:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=step == 2)


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "nothing": lambda model, step: None,
    "observer": lambda model, step: simulators(model)[step].enable_observer(step % 2 == 0),
    "fake-quantize": lambda model, step: simulators(model)[1].enable_fake_quant(step % 2 == 0),
    "switch buffer": lambda model, step: simulators(model)[0].fake_quant_enabled.fill_(step % 2),
    "bits": lambda model, step: setattr(simulators(model)[0], "quant_max", 7 + step),
    "scale": lambda model, step: simulators(model)[2].qparams_calculator.scale.mul_(2),
    "frozen": lambda model, step: simulators(model)[2].set_export_mode(step > 1),
    "weight": lambda model, step: next(model.parameters()).data.mul_(1.5),
    "weights' memory": lambda model, step: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "state": _state,
    "simulator hook": lambda model, step: simulators(model)[0].register_forward_hook(lambda m, a, y: y * 1.5),
    "weight hook": lambda model, step: next(model.parameters()).register_hook(lambda g: g * 0.5),
    "code": lambda model, step: model.recompile(),
    "mode": lambda model, step: model.train(step % 2 == 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_the_same(change: str, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output, gradient and buffer, whatever is changed between the steps, and backward by halves."""
    mine = train(CHANGES[change])
    assert max(counted) >= 4
    monkeypatch.setattr(_shortcut, "LARGEST", 0)
    before = len(counted)
    ordinary = train(CHANGES[change])
    assert not any(counted[before:])
    for fast, slow in zip(mine, ordinary, strict=True):
        assert torch.equal(fast, slow)


def test_who_is_left_to_the_simulators(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints, weights with hooks, saved-tensor hooks of others, several processes, and models with few weights."""
    model, quantizer = prepared()
    x = torch.randn(4, 8)
    with quantizer.training_mode():
        for _ in range(3):
            model(x)
        usual = counted[-1]
        assert usual >= 4
        calls = len(counted)
        y = checkpoint(model, x.clone().requires_grad_(), use_reentrant=False)
        y[0].sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            model(x)
        monkeypatch.setattr(small_weights, "_is_distributed", lambda: True)
        model(x)
        monkeypatch.undo()
        assert len(counted) == calls
    monkeypatch.setattr(graph_module, "_WORTH_JOINING", 100)
    assert "_quantized_weights" in model.code
    model.recompile()
    assert "_quantized_weights" not in model.code


def test_copies_pickles_and_compilation(counted: list[int]) -> None:
    """Copies quantize their own weights; what ``torch.compile`` traces has no such call."""
    model, quantizer = prepared()
    x = torch.randn(4, 8)
    with quantizer.training_mode():
        for _ in range(3):
            expected = model(x)
        stream = io.BytesIO()
        pickle.dump(model, stream)
        for other in (copy.deepcopy(model), pickle.loads(stream.getvalue())):
            for p in other.parameters():
                p.data.mul_(2)
            for _ in range(2):
                assert not torch.equal(other(x)[0], expected[0])
        assert torch.equal(model(x)[0], expected[0])
        calls = len(counted)
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(x)[0], expected[0])
        assert len(counted) == calls
