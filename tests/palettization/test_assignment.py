"""Indices belong to the weight at hand: in checkpoints of training, averages of weights, copies, after other writes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

from bitwright.palettization import KMeansPalettizer, PalettizationSpec
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig

from .networks import config_of, simulators

KINDS = ["dkm", "ste"]


def make(kind: str, masked: bool = False) -> tuple[KMeansPalettizer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    if masked:
        MagnitudePruner(model, MagnitudePrunerConfig()).prepare((torch.randn(2, 16),))
    palettizer = KMeansPalettizer(model, config_of(PalettizationSpec(n_bits=2, training_strategy_spec={"type": kind})))
    return palettizer, palettizer.prepare((torch.randn(2, 16),))


def train(model: nn.Module, average: AveragedModel | None = None, steps: range = range(30)) -> None:
    """Steps of an optimizer; call it in ``training_mode``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in steps:
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :4].tanh()).backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [model[0].weight.detach(), model[2].weight.detach()]


def expected_weights(model: nn.Module) -> list[torch.Tensor]:
    """The nearest palette entry of each entry."""
    found = []
    for layer in (model[0], model[2]):
        *below, sim = layer.parametrizations.weight
        dense = layer.parametrizations.weight.original.detach()
        for simulator in below:
            dense = simulator(dense)
        palette = sim.centroids.flatten()
        nearest = palette[(dense.unsqueeze(-1) - palette).abs().argmin(-1)]
        found.append(torch.where(dense != 0, nearest, 0.0) if below else nearest)
    return found


def assert_nearest(model: nn.Module) -> None:
    for weight, expected in zip(weights(model), expected_weights(model), strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_training_evaluates_as_the_model_does(kind, masked):
    """Its indices are those of an earlier weight; also exported without a forward in between."""
    palettizer, model = make(kind, masked)
    with palettizer.training_mode():
        train(model)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "palettizer": palettizer.state_dict()}, file)
        twin = copy.deepcopy(model).eval()
    model.eval()
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other, loaded = make(kind, masked)
    loaded.load_state_dict(state["model"])
    other.load_state_dict(state["palettizer"])
    finalized = other.finalize(copy.deepcopy(loaded.eval()), backend="_torch")
    x = torch.randn(8, 16)
    assert_nearest(loaded)
    for found in (loaded, twin):
        assert all(torch.equal(a, b) for a, b in zip(weights(found), weights(model), strict=True))
    torch.testing.assert_close(finalized(x), model(x))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_averages_of_weights_have_indices_of_their_own(kind, masked):
    """Also one that was evaluated before, in inference mode too, and whose model was."""
    palettizer, model = make(kind, masked)
    with palettizer.training_mode():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
        for part in (range(10), range(10, 20), range(20, 30)):
            train(model, average, part)
            average.eval()
            assert_nearest(average.module)
            with torch.inference_mode():
                average(torch.randn(2, 16))
            assert_nearest(model.eval())
            model.train()
    assert_nearest(average.module)
    assert_nearest(copy.deepcopy(average.module))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_swapped_for_their_average(kind):
    """Through ``.data``, as EMAs of other libraries do, and back: nothing remains of the swap."""
    palettizer, model = make(kind)
    with palettizer.training_mode():
        train(model)
    x = torch.randn(8, 16)
    before = model.eval()(x)
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(0.5)
    assert_nearest(model)
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data.copy_(value)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_in_the_middle_leaves_training_as_it_is(kind):
    """Assigning anew for an evaluation moves no palette."""
    states = []
    for evaluates in (False, True):
        palettizer, model = make(kind)
        with palettizer.training_mode():
            for part in (range(3), range(3, 6)):
                train(model, steps=part)
                if evaluates:
                    model.eval()(torch.randn(2, 16))
                    model.train()
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_indices_of_weights_that_do_not_train_stay():
    """Without a strategy that moves weights, a write to the weight changes nothing."""
    _, model = make("default")
    before = [sim.indices.clone() for sim in simulators(model.eval())]
    with torch.no_grad():
        model[0].parametrizations.weight.original.add_(torch.randn(32, 16))
    model(torch.randn(2, 16))
    assert all(torch.equal(sim.indices, old) for sim, old in zip(simulators(model), before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_weight_whose_first_inputs_are_never_used(kind):
    """The elements that are compared lie in many columns, whatever the number of rows."""
    torch.manual_seed(0)
    palettizer = KMeansPalettizer(
        nn.Sequential(nn.Linear(784, 128)),
        config_of(PalettizationSpec(n_bits=2, training_strategy_spec={"type": kind})),
    )
    prepared = palettizer.prepare((torch.randn(2, 784),)).eval()
    (sim,) = simulators(prepared)
    dense = prepared[0].parametrizations.weight.original
    _ = prepared[0].weight
    for write in (lambda: dense[:, 1:].mul_(0.5), lambda: dense.data[:, 1:].mul_(0.5)):
        with torch.no_grad():
            write()
        palette = sim.centroids.flatten()
        nearest = palette[(dense.detach().unsqueeze(-1) - palette).abs().argmin(-1)]
        assert torch.equal(prepared[0].weight.detach(), nearest)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_exported_without_a_call_before(kind):
    """Of a finished model, whose indices are right; a trace cannot look at numbers."""
    palettizer, model = make(kind)
    with palettizer.training_mode():
        train(model)
    expected = model.eval()(torch.ones(2, 16))
    _, other = make(kind)
    other.load_state_dict(model.state_dict())
    program = torch.export.export(other.eval(), (torch.ones(2, 16),))
    assert torch.allclose(program.module()(torch.ones(2, 16)), expected)


def test_palettes_move_while_a_mode_counts_operations():
    palettizer, model = make("dkm")
    before = simulators(model)[0].centroids.clone()
    with palettizer.training_mode(), FlopCounterMode(display=False):
        train(model, steps=range(3))
    assert not torch.equal(simulators(model)[0].centroids, before)


def test_pickles_of_all_protocols_know_the_assignment():
    palettizer, model = make("ste")
    with palettizer.training_mode():
        train(model, steps=range(3))
    expected = model.eval()(torch.ones(2, 16))
    for protocol in (0, 2, 5):
        assert torch.equal(pickle.loads(pickle.dumps(model, protocol))(torch.ones(2, 16)), expected)
