"""States that a model assigns to when it is called go on in captured programs, whichever module owns them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from bitwright.errors import BitwrightWarning
from bitwright.export.conversion import captured
from bitwright.program.assigned_buffers import assignments_written
from bitwright.program.graph import capture_graph
from bitwright.quantization import Quantizer, QuantizerConfig


class Level(nn.Module):
    """Divides by a running level, which the next call reads."""

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("level", torch.ones(8), persistent=persistent)

    def forward(self, x):
        y = x / self.level
        self.level = 0.9 * self.level + 0.1 * x.detach().abs().mean(0)
        return y


class Before(Level):
    """Returns the state of the call before."""

    def forward(self, x):
        state = self.level
        self.level = x.detach().mean(0) + 2
        return x * 2, state, state[:4]


class Growing(Level):
    """Keeps all rows that it was ever given."""

    def forward(self, x):
        self.level = torch.cat([self.level.reshape(-1, 8), x])
        return self.level.sum(0) + x


def in_both_places(kind):
    return [kind(), nn.Sequential(nn.Identity(), nn.Sequential(kind()))]


def batches():
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.mark.parametrize("kind", [Level, Before])
@pytest.mark.parametrize("nested", [0, 1], ids=["model", "submodule"])
@pytest.mark.parametrize("form", ["graph", "program"])
def test_states_go_on(form, nested, kind):
    model = in_both_places(kind)[nested].eval()
    twin, (x, *_) = copy.deepcopy(model), batches()
    made = capture_graph(model, (x,))[0] if form == "graph" else captured(model, (x,)).module()
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), twin.buffers(), strict=True))
    for batch in batches():
        torch.testing.assert_close(made(batch), twin(batch))


@pytest.mark.parametrize("nested", [0, 1], ids=["model", "submodule"])
def test_graphs_train_with_states(nested):
    """Autograd keeps the old state, which the model leaves alone and the graph writes to."""
    model = nn.Sequential(nn.Linear(8, 8), in_both_places(Level)[nested])
    eager, graph = (_trained(copy.deepcopy(model), mode) for mode in ("eager", "graph"))
    for name, value in graph.items():
        torch.testing.assert_close(value, eager[name], msg=name)


def _trained(model, mode):
    """Gradients and states after some batches."""
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode))
    ready = quantizer.prepare((batches()[0],))
    with quantizer.training_mode():
        for batch in batches():
            ready(batch).square().mean().backward()
    found = {name: value for name, value in ready.named_buffers() if name.endswith(".level")}
    path = "0.weight" if mode == "graph" else "0.parametrizations.weight.original"
    return {**found, "gradient": ready.get_parameter(path).grad}


@pytest.mark.parametrize("persistent", [True, False])
def test_states_that_grow_are_told(persistent):
    """A cache that is no part of the state_dict, such as a table of positions, is made anew anyway."""
    model = nn.Sequential(nn.Linear(8, 8), Growing(persistent))
    (x, *_) = batches()
    if persistent:
        with pytest.warns(BitwrightWarning, match=r"assigns to its state '1\.level' tensors of another shape"):
            capture_graph(model, (x,))
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error", BitwrightWarning)
            capture_graph(model, (x,))
    assert model[1].level.shape == (8,)


def test_a_call_that_failed_leaves_nothing_for_the_next_one():
    """A capture may be tried again; what the first one assigned to, by then, is another tensor."""

    class Failing(Level):
        def forward(self, x):
            y = super().forward(x)
            if x.shape[0] == 1:
                raise ValueError("one row")
            return y

    model, (x, *_) = nn.Sequential(Failing()), batches()
    first, state = model[0].level, torch.ones(8)
    with assignments_written(model):
        with pytest.raises(ValueError, match="one row"):
            model(x[:1])
        model[0]._buffers["level"] = state  # as torch.export puts others there
        model(x)
    assert model[0].level is state
    assert torch.equal(first, torch.ones(8))
    torch.testing.assert_close(state, 0.9 + 0.1 * x.abs().mean(0))


def test_dynamic_sizes_stay_dynamic():
    """Comparing shapes fixes none of them."""

    class Last(Level):
        def forward(self, x):
            y = x + self.level.mean()
            self.level = x.detach()[0]
            return y

    model, (x, *_) = nn.Sequential(nn.Linear(8, 8), Last()), batches()
    graph, _ = capture_graph(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},))
    assert graph(torch.randn(9, 8)).shape == (9, 8)
