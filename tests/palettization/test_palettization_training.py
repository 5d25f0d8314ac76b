"""Training with palettes: schedules, gradients of each strategy, and what is left behind."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitwright.base_model_compressor import _Lifecycle
from bitwright.errors import BitwrightWarning
from bitwright.palettization import KMeansPalettizer, ModuleKMeansPalettizerConfig, PalettizationSpec
from bitwright.palettization.config import PATSchedule
from bitwright.palettization.spec import DKMTrainingSpec, PerGroupedChannelGranularity, STETrainingSpec
from bitwright.palettization.spec.soft_assignment import _attention
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.pruning.spec import ChannelStructured
from bitwright.quantization.spec import QuantizationSpec

from .networks import config_of, simulators

STRATEGIES = [{"type": "default"}, {"type": "ste"}, {"type": "ste", "refit_palette": False}, {"type": "dkm"}]


def toy(
    schedule: int | None = None, strategy: dict | None = None, **spec: object
) -> tuple[KMeansPalettizer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    fields = {} if schedule is None else {"pat_schedule": PATSchedule(enable_fake_palettize=schedule)}
    chosen = PalettizationSpec(n_bits=2, training_strategy_spec=strategy or {"type": "default"}, **spec)
    palettizer = KMeansPalettizer(model, config_of(chosen, **fields))
    palettizer.prepare((torch.randn(2, 16),))
    return palettizer, model


def enabled(model: nn.Module) -> list[bool]:
    return [bool(sim.fake_palett_enabled.item()) for sim in simulators(model)]


def train(palettizer: KMeansPalettizer, model: nn.Module, steps: int = 30) -> float:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 16, generator=generator)
    target = torch.tanh(x @ torch.randn(16, 4, generator=generator))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with palettizer.training_mode():
        for _ in range(steps):
            optimizer.zero_grad()
            F.mse_loss(model(x), target).backward()
            optimizer.step()
            palettizer.step()
    model.eval()
    return F.mse_loss(model(x), target).item()


def test_modes_and_steps():
    """Train mode inside, the old mode afterwards; steps count on over several blocks."""
    palettizer, model = toy()
    model.eval()
    with palettizer.training_mode() as entered:
        assert entered is palettizer
        assert model.training
        assert enabled(model) == [True, True]
        palettizer.step()
        with pytest.raises(RuntimeError, match="Cannot enter training_mode"), palettizer.training_mode():
            pass
    assert not model.training
    assert palettizer._lifecycle is _Lifecycle.IDLE
    with palettizer.training_mode():
        palettizer.step()
    assert palettizer._step_count == 2


def test_schedules_switch_each_layer_at_its_step():
    """Resolved through the levels of the config."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = config_of(pat_schedule=PATSchedule(enable_fake_palettize=2))
    config.set_module_name("1", ModuleKMeansPalettizerConfig(pat_schedule=PATSchedule()))
    palettizer = KMeansPalettizer(model, config)
    palettizer.prepare((torch.randn(2, 8),))
    assert enabled(model) == [True, True]
    seen = []
    with palettizer.training_mode():
        for _ in range(3):
            seen.append(enabled(model))
            palettizer.step()
    assert seen == [[False, True], [False, True], [True, True]]


def leave_by_error(palettizer: KMeansPalettizer) -> None:
    with palettizer.training_mode():
        raise ZeroDivisionError


@pytest.mark.parametrize("how", ["early", "error"])
def test_leaving_early_never_leaves_palettization_off(how):
    """Before the schedule's step, or by an exception: weights are palettized, with palettes of what they are now."""
    palettizer, model = toy(schedule=100)
    if how == "error":
        with pytest.raises(ZeroDivisionError):
            leave_by_error(palettizer)
    else:
        train(palettizer, model, steps=5)
    assert enabled(model) == [True, True]
    assert all(sim.is_settled for sim in simulators(model))
    for layer in (model[0], model[2]):
        dense = layer.parametrizations.weight.original
        assert len(layer.weight.unique()) == 4
        assert (layer.weight - dense).square().mean() < 0.3 * dense.var()


def test_a_refused_finalize_leaves_the_model_as_it_was():
    """Palettes that are off or out of date stay so when the backend is none, or takes no folder."""
    palettizer, model = toy()
    first = simulators(model)[0]
    first.disable_fake_palett()
    first.invalidate()
    for error, arguments in ((NotImplementedError, {"backend": "typo"}), (ValueError, {"mmap_dir": "folder"})):
        with pytest.raises(error):
            palettizer.finalize(**{"backend": "coreml", **arguments})
        assert enabled(model) == [False, True]
        assert not first.is_settled


def test_weights_train_dense_until_the_schedule_starts():
    """Then their palettes are made anew."""
    palettizer, model = toy(schedule=3)
    before = model[0].weight.detach().clone()
    with palettizer.training_mode():
        assert len(model[0].weight.unique()) > 4
        model(torch.randn(4, 16)).sum().backward()
        assert model[0].parametrizations.weight.original.grad is not None
        with torch.no_grad():
            model[0].parametrizations.weight.original.mul_(2)
        for _ in range(3):
            palettizer.step()
        assert torch.allclose(model[0].weight.detach(), 2 * before, atol=1e-5)


def test_the_default_strategy_freezes_palettized_weights():
    """Inputs and other parameters get gradients, the weight gets none; train and eval agree."""
    palettizer, model = toy()
    x = torch.randn(3, 16, requires_grad=True)
    with palettizer.training_mode():
        output = model(x)
        output.sum().backward()
    assert model[0].parametrizations.weight.original.grad is None
    assert x.grad is not None
    assert model[0].bias.grad is not None
    assert torch.equal(model.eval()(x), output)


def test_straight_through_gradients_are_those_of_the_palettized_weight():
    """Forward with the palette; the gradient with respect to it goes to the dense weight unchanged."""
    palettizer, model = toy(strategy={"type": "ste", "refit_palette": False})
    x = torch.randn(5, 16)
    with palettizer.training_mode():
        model(x).square().sum().backward()
        leaf = model[0].weight.detach().requires_grad_(True)
        second = model[2].weight.detach()
        F.linear(torch.relu(F.linear(x, leaf, model[0].bias)), second, model[2].bias).square().sum().backward()
    assert torch.allclose(model[0].parametrizations.weight.original.grad, leaf.grad, rtol=1e-5, atol=1e-6)


def test_straight_through_follows_the_weight():
    """Indices are assigned anew when the weight moves, and entries become the means of their members."""
    palettizer, model = toy(strategy={"type": "ste"})
    sim = simulators(model)[0]
    original = model[0].parametrizations.weight.original
    with palettizer.training_mode():
        with torch.no_grad():
            original.copy_(torch.randn(8, 16))
        output = model[0].weight
        members = torch.stack([original[sim.indices == k].mean() for k in range(4)])
        assert torch.allclose(sim.centroids.flatten(), members, atol=1e-6)
        assert torch.equal(output, sim.centroids.flatten()[sim.indices.long()])
        kept = sim.indices
        _ = model[0].weight
        assert sim.indices is kept


def nearest(weight: torch.Tensor, sim: nn.Module) -> torch.Tensor:
    return (weight.detach().reshape(-1, 1) - sim.lut.flatten()).abs().argmin(1).view_as(weight)


def test_straight_through_follows_weights_below_a_mask_and_those_written_through_data():
    """The weight that leaves a mask is a new tensor at each access; ``data`` advances no version."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    MagnitudePruner(model, MagnitudePrunerConfig()).prepare((torch.randn(2, 32),))
    spec = PalettizationSpec(n_bits=2, training_strategy_spec={"type": "ste", "refit_palette": False})
    palettizer = KMeansPalettizer(model, config_of(spec))
    palettizer.prepare((torch.randn(2, 32),))
    chain = model[0].parametrizations.weight
    with palettizer.training_mode():
        for step in range(60):
            noise = 0.02 * torch.randn_like(chain.original)
            if step % 2:
                chain.original.data.add_(noise)
            else:
                with torch.no_grad():
                    chain.original.add_(noise)
            masked = torch.where(chain[0].mask, chain.original.detach(), 0.0)
            expected = torch.where(masked != 0, chain[1].lut.flatten()[nearest(masked, chain[1])], 0.0)
            assert torch.equal(model[0].weight, expected)
            del masked, expected


@pytest.mark.parametrize("refit", [False, True])
def test_straight_through_ends_with_the_indices_of_the_last_step(refit):
    palettizer, model = toy(strategy={"type": "ste", "refit_palette": refit})
    train(palettizer, model, steps=5)
    for layer, sim in zip((model[0], model[2]), simulators(model), strict=True):
        assert torch.equal(sim.indices.long(), nearest(layer.parametrizations.weight.original, sim))


def dkm_by_hand(
    weight: torch.Tensor,
    palette: torch.Tensor,
    temperature: float,
    iterations: int,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with the softmax of -d²/τ, and entries as means weighted by it and by importance, in float64."""
    w, c = weight.double().flatten(), palette.double().flatten()
    tau = temperature * w.var(correction=0)
    share = torch.ones_like(w) if importance is None else importance.double().flatten()
    for _ in range(iterations):
        attention = torch.softmax(-((w[:, None] - c[None]) ** 2) / tau, 1)
        c = (attention * (share * w)[:, None]).sum(0) / (attention * share[:, None]).sum(0)
    attention = torch.softmax(-((w[:, None] - c[None]) ** 2) / tau, 1)
    return (attention @ c).view(weight.shape)


@pytest.mark.parametrize("iterations", [1, 4])
def test_dkm_is_its_fixed_point(iterations):
    """Equations 1 and 2 of arXiv 2108.12659, with τ in units of the variance; the next weight goes on from there."""
    palettizer, model = toy(strategy={"type": "dkm", "temperature": 0.1, "iterations": iterations})
    weight = model[0].parametrizations.weight.original.detach()
    start = simulators(model)[0].centroids.clone()
    with palettizer.training_mode():
        soft = model[0].weight
        assert torch.allclose(soft.double(), dkm_by_hand(weight, start, 0.1, iterations), atol=1e-5)
        assert torch.equal(model[0].weight, soft)
        with torch.no_grad():
            model[0].parametrizations.weight.original[0, 0] += 1e-7
        twice = dkm_by_hand(weight, start, 0.1, 2 * iterations)
        assert torch.allclose(model[0].weight.double(), twice, atol=1e-5)


def pruned(
    strategy: dict, sparsity: float = 0.75, scheme: object = None, **spec: object
) -> tuple[KMeansPalettizer, nn.Module]:
    """A layer with a mask below its palette."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    chosen = PruningSpec(target_sparsity=sparsity, **({} if scheme is None else {"pruning_scheme": scheme}))
    masks = ModuleMagnitudePrunerConfig(op_state_spec={"weight": chosen})
    model = MagnitudePruner(model, MagnitudePrunerConfig(global_config=masks)).prepare((torch.randn(2, 64),))
    palettizer = KMeansPalettizer(
        model, config_of(PalettizationSpec(n_bits=2, training_strategy_spec=strategy, **spec))
    )
    return palettizer, palettizer.prepare((torch.randn(2, 64),))


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=str)
def test_a_state_from_the_middle_of_training_needs_no_strategy(strategy, below):
    """Another model, without one, decodes it to what the trained model evaluates to; copies save the same."""
    palettizer, model = pruned(strategy) if below else toy(strategy=strategy)
    _, plain = pruned({"type": "default"}) if below else toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(8, 64 if below else 16)
    with palettizer.training_mode():
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            palettizer.step()
        state = {name: entry.clone() for name, entry in model.state_dict().items()}
        copied = copy.deepcopy(model).state_dict()
    assert all(torch.equal(copied[name], entry) for name, entry in state.items())
    plain.load_state_dict(state)
    assert torch.equal(plain.eval()(x), model.eval()(x))


@pytest.mark.parametrize("strategy", [{"type": "ste"}, {"type": "dkm"}], ids=str)
def test_saving_changes_no_training(strategy):
    """A run that saves at every step is the one that never does; broken weights can be saved, too."""
    results = []
    for saves in (False, True):
        palettizer, model = toy(strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with palettizer.training_mode():
            for _ in range(3):
                model(torch.ones(4, 16)).square().mean().backward()
                optimizer.step()
                _ = model.state_dict() if saves else None
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], entry) for name, entry in results[1].items())
    with palettizer.training_mode():
        model(torch.ones(4, 16))
        with torch.no_grad():
            model[0].parametrizations.weight.original[0, 0] = torch.nan
        assert model.state_dict()["0.parametrizations.weight.original"][0, 0].isnan()
        with torch.no_grad():
            model[0].parametrizations.weight.original[0, 0] = 0.0


def masked(model: nn.Module) -> torch.Tensor:
    chain = model.parametrizations.weight
    return torch.where(chain[0].mask, chain.original.detach(), 0.0)


def test_dkm_of_a_pruned_weight_is_that_of_the_entries_kept():
    """Zeros have no part in attention's unit nor in palettes, and stay zero."""
    palettizer, model = pruned({"type": "dkm", "temperature": 0.001})
    weight, start = masked(model), simulators(model)[0].centroids.clone()
    kept = weight != 0
    with palettizer.training_mode():
        soft = model.weight.detach()
    assert torch.equal(soft != 0, kept)
    assert torch.allclose(soft[kept].double(), dkm_by_hand(weight[kept], start, 0.001, 3), atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("spec", [{}, {"granularity": PerGroupedChannelGranularity(axis=0, group_size=16)}], ids=str)
def test_forwards_of_a_pruned_weight_keep_its_palettes_good(strategy, spec):
    """All entries serve what is kept, after many steps without an optimizer too; a soft palette loses a third."""
    palettizer, model = pruned(strategy, **spec)
    before = F.mse_loss(model.eval().weight, masked(model))
    with palettizer.training_mode():
        for _ in range(20):
            model(torch.randn(2, 64))
            palettizer.step()
    assert F.mse_loss(model.eval().weight, masked(model)) < 1.5 * before


def test_dkm_of_channels_that_are_pruned_whole():
    """A group that has nothing left leaves weight, gradient and palettes finite."""
    granularity = PerGroupedChannelGranularity(axis=0, group_size=1)
    palettizer, model = pruned({"type": "dkm"}, 0.5, ChannelStructured(), granularity=granularity)
    with palettizer.training_mode():
        model(torch.randn(2, 64)).square().sum().backward()
    assert (masked(model) == 0).all(1).any()
    assert model.parametrizations.weight.original.grad.isfinite().all()
    assert simulators(model)[0].centroids.isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 1e-20])
def test_dkm_weighs_by_sensitivities(scale):
    """Palettes are means weighted by importance, whatever its unit."""
    palettizer, model = toy(strategy={"type": "dkm", "temperature": 0.1})
    sim, weight = simulators(model)[0], model[0].parametrizations.weight.original.detach()
    sim.sensitivities = scale * torch.rand(8, 16) ** 4
    _ = model.eval()[0].weight
    start = sim.centroids.clone()
    with palettizer.training_mode():
        soft = model[0].weight
    expected = dkm_by_hand(weight, start, 0.1, 3, sim.sensitivities)
    assert torch.allclose(soft.double(), expected, atol=1e-5)
    assert not torch.allclose(soft.double(), dkm_by_hand(weight, start, 0.1, 3), atol=1e-3)


def test_dkm_weighs_each_entry_of_a_vector():
    """Each coordinate of a palette entry is the mean by the importance of that coordinate."""
    palettizer, model = toy(strategy={"type": "dkm", "temperature": 0.1, "iterations": 1}, cluster_dim=2)
    sim, weight = simulators(model)[0], model[0].parametrizations.weight.original.detach()
    sim.sensitivities = torch.rand(8, 16) ** 4
    _ = model.eval()[0].weight
    start = sim.centroids[0].double()
    with palettizer.training_mode():
        _ = model[0].weight
        found = sim.centroids[0].double()
    w, share = (t.double().view(4, 2, 16).transpose(1, 2).reshape(-1, 2) for t in (weight, sim.sensitivities))
    distances = (w[:, None] - start[None]).square().sum(-1)
    attention = torch.softmax(-distances / (0.1 * w.var(0, correction=0).sum()), 1)
    assert torch.allclose(found, attention.T @ (share * w) / (attention.T @ share), atol=1e-5)


def test_dkm_of_a_group_without_importance_counts_all_alike():
    """As clustering does: sensitivities of zero are no reason to give a group up."""
    spec = {"granularity": PerGroupedChannelGranularity(axis=0, group_size=4)}
    palettizer, model = toy(strategy={"type": "dkm", "temperature": 0.1}, **spec)
    sim, weight = simulators(model)[0], model[0].parametrizations.weight.original.detach()
    sim.sensitivities = torch.cat((torch.zeros(4, 16), torch.rand(4, 16)))
    _ = model.eval()[0].weight
    start = sim.centroids.clone()
    with palettizer.training_mode():
        soft = model[0].weight
    assert torch.allclose(soft[:4].double(), dkm_by_hand(weight[:4], start[0], 0.1, 3), atol=1e-5)


def test_dkm_gradients_flow_through_assignment_and_palette():
    """They are those of the last step of the fixed point, found by automatic differentiation of the formula."""
    palettizer, model = toy(strategy={"type": "dkm", "temperature": 0.1, "iterations": 1})
    start = simulators(model)[0].centroids.clone()
    direction = torch.randn(8, 16)
    with palettizer.training_mode():
        (model[0].weight * direction).sum().backward()
    original = model[0].parametrizations.weight.original
    leaf = original.detach().double().requires_grad_(True)
    tau = 0.1 * leaf.detach().var(correction=0)
    c = start.double().flatten()
    attention = torch.softmax(-((leaf.flatten()[:, None] - c) ** 2) / tau, 1)
    c = (attention * leaf.flatten()[:, None]).sum(0) / attention.sum(0)
    attention = torch.softmax(-((leaf.flatten()[:, None] - c) ** 2) / tau, 1)
    ((attention @ c).view(8, 16) * direction).sum().backward()
    assert torch.allclose(original.grad.double(), leaf.grad, rtol=1e-3, atol=1e-4)


def test_a_cold_palette_is_hard():
    """τ → 0 makes the soft weight the palettized one."""
    palettizer, model = toy(strategy={"type": "dkm", "temperature": 1e-6, "iterations": 1})
    hard = model.eval()[0].weight.detach().clone()
    with palettizer.training_mode():
        assert torch.allclose(model[0].weight, hard, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"granularity": PerGroupedChannelGranularity(axis=0, group_size=2)},
        {"cluster_dim": 2},
        {"enable_per_channel_scale": True},
        {"lut_qspec": QuantizationSpec(dtype="int8")},
    ],
)
def test_every_strategy_with_every_option(strategy, spec):
    """Training runs, ends settled, and evaluation uses exactly four entries a group."""
    palettizer, model = toy(strategy=strategy, **spec)
    loss = train(palettizer, model, steps=3)
    assert loss < 2
    for sim, layer in zip(simulators(model), (model[0], model[2]), strict=True):
        assert sim.is_settled
        assert torch.isfinite(sim.lut).all()
        weight = layer.weight
        assert torch.equal(weight, sim._palettize(sim.lut, sim.indices, weight))


def test_learned_palettes_fit_better():
    """At 2 bits both strategies beat palettes of a finished model, and training only around them."""
    strategies = {"default": {}, "ste": {}, "dkm": {"temperature": 0.05}}
    losses = {name: train(*toy(strategy={"type": name, **more}), steps=80) for name, more in strategies.items()}
    assert losses["dkm"] < 0.8 * losses["default"]
    assert losses["ste"] < 0.8 * losses["default"]


def test_strategies_by_class():
    """Specs of strategies can be given as objects."""
    assert PalettizationSpec(training_strategy_spec=STETrainingSpec()).describe().endswith("ste")
    assert PalettizationSpec(training_strategy_spec=DKMTrainingSpec()).describe().endswith("dkm")


def test_soft_assignment_is_the_softmax_of_distances_without_tiny_numbers():
    """Equal to float64 to 1e-12, and nothing near the subnormal range, where processors are slow."""
    vectors = torch.linspace(-1, 1, 1001).view(1, -1, 1)
    palette = torch.tensor([[[-1.0], [0.0], [0.3], [1.0]]])
    unit = torch.full((1, 1, 1), 0.005)
    attention = _attention(vectors, palette, unit)
    exact = torch.softmax(-(vectors.double() - palette.double().transpose(1, 2)).square() / unit.double(), dim=-1)
    torch.testing.assert_close(attention.double(), exact, rtol=1e-4, atol=1e-12)
    assert ((attention == 0) | (attention > 1e-14)).all()
    assert (attention == 0).any()


def _fit(palettizer: KMeansPalettizer, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> bytes:
    """Train, and return the checkpoint of the last step, taken before the mode ends and palettes are settled."""
    with palettizer.training_mode():
        for step in steps:
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :4].tanh()).backward()
            optimizer.step()
            palettizer.step()
        file = io.BytesIO()
        parts = {"model": model, "palettizer": palettizer, "optimizer": optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    return file.getvalue()


@pytest.mark.parametrize("schedule", [0, 2, 5, 6])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(strategy, schedule):
    """Saved before, at and after the step that switches palettes on; loaded without pickle; equal in every bit."""

    def begin():
        palettizer, model = toy(schedule, strategy)
        return palettizer, model, torch.optim.Adam(model.parameters(), lr=1e-2)

    whole, part, resumed = begin(), begin(), begin()
    _fit(*whole, range(8))
    checkpoint = torch.load(io.BytesIO(_fit(*part, range(5))), weights_only=True)
    resumed[1].load_state_dict(checkpoint["model"])
    resumed[0].load_state_dict(checkpoint["palettizer"])
    resumed[2].load_state_dict(checkpoint["optimizer"])
    _fit(*resumed, range(5, 8))
    expected, found = whole[1].state_dict(), resumed[1].state_dict()
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def test_foreign_states_are_refused():
    """Another version, another model, or a mode that is active: an error that changes nothing."""
    palettizer, _ = toy()
    state = palettizer.state_dict()
    with pytest.raises(TypeError, match="got NoneType"):
        palettizer.load_state_dict(None)
    with pytest.raises(ValueError, match="no state of a KMeansPalettizer"):
        palettizer.load_state_dict({"step_count": 3})
    with pytest.raises(ValueError, match=r"does not belong to this model.*nowhere"):
        palettizer.load_state_dict({**state, "step_count": 3, "outdated": ["nowhere"]})
    with palettizer.training_mode(), pytest.raises(RuntimeError, match="load_state_dict"):
        palettizer.load_state_dict(state)
    assert palettizer.state_dict() == state


@pytest.mark.parametrize("value", [0.0, 0.25, 1e-25, 1e15])
def test_dkm_of_channels_without_spread(value):
    """Entries that are all equal belong to each palette entry alike: weight and gradient are finite."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    with torch.no_grad():
        layer.weight[:4] = value
    spec = PalettizationSpec(
        n_bits=2, granularity=PerGroupedChannelGranularity(axis=0, group_size=4), training_strategy_spec={"type": "dkm"}
    )
    palettizer = KMeansPalettizer(layer, config_of(spec))
    prepared = palettizer.prepare((torch.randn(2, 16),))
    with palettizer.training_mode():
        weight = prepared.weight
        assert torch.allclose(weight[:4], torch.tensor(value), rtol=1e-6, atol=0)
        (weight * torch.randn(8, 16)).sum().backward()
    gradient = prepared.parametrizations.weight.original.grad
    assert gradient.isfinite().all()
    assert gradient[:4].abs().max() < 10
    assert gradient[4:].abs().max() > 0


def test_dkm_of_a_group_that_became_zero():
    """Its weights are far from all entries, in units of their spread: the nearest entry has them."""
    spec = {"granularity": PerGroupedChannelGranularity(axis=0, group_size=4)}
    palettizer, model = toy(strategy={"type": "dkm"}, **spec)
    palette, weight = simulators(model)[0].centroids, model[0].parametrizations.weight.original
    with torch.no_grad():
        palette.mul_(1000)
        weight.mul_(1000)[:4] = 0
    start = palette.clone()
    with palettizer.training_mode():
        soft = model[0].weight
        (soft * torch.randn_like(soft)).sum().backward()
    assert soft[:4].abs().max() <= start[0].abs().min()
    assert weight.grad.isfinite().all()


def test_dkm_under_autocast_keeps_its_precision():
    """Attention in half precision has gradients that are off by tens of percent."""
    palettizer, model = toy(strategy={"type": "dkm"})
    copies = [model, copy.deepcopy(model)]
    direction = torch.randn(8, 16)
    with palettizer.training_mode():
        for copied, on in zip(copies, (False, True), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                soft = copied.train()[0].weight
            assert soft.dtype == torch.float32
            (soft * direction).sum().backward()
    found = [(c[0].parametrizations.weight.original.grad, simulators(c)[0].centroids) for c in copies]
    assert all(torch.equal(plain, cast) for plain, cast in zip(*found, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_gradient_checkpointing_changes_nothing(strategy, reentrant):
    """The forward that is repeated starts from the palette of the first one, and moves nothing."""
    states = []
    for checkpointed in (False, True):
        palettizer, model = toy(strategy=strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        with palettizer.training_mode():
            for _ in range(4):
                x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
                optimizer.zero_grad()
                y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
                y.square().mean().backward()
                optimizer.step()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            states.append({**model.state_dict(), **{f"{name}.grad": g for name, g in gradients.items()}})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_between_two_steps_start_from_one_palette(reentrant):
    """Two views of a batch, or a forward without gradients, before the backward that repeats the first one."""
    gradients = []
    for checkpointed in (False, True):
        palettizer, model = toy(strategy={"type": "dkm"})
        x, other = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_(), torch.ones(4, 16).requires_grad_()
        run = partial(checkpoint, model, use_reentrant=reentrant) if checkpointed else model
        with palettizer.training_mode():
            loss = run(x).square().mean() + run(other).sin().mean()
            with torch.no_grad():
                model(other)
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(plain, repeated) for plain, repeated in zip(*gradients, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_function_transforms_in_training(strategy):
    """``torch.func.grad`` gives the gradients of ``backward`` and leaves the model as it is."""
    palettizer, model = toy(strategy=strategy)
    x = torch.randn(4, 16)
    parameters = dict(model.named_parameters())
    with palettizer.training_mode():
        if strategy["type"] == "ste":
            with pytest.raises(RuntimeError, match=r"'0\.weight': torch\.func.*outside of the transform"):
                grad(lambda p: functional_call(model, p, (x,)).sum())(parameters)
            model(x)
        before = copy.deepcopy(model.state_dict())
        found = grad(lambda p: functional_call(model, p, (x,)).square().mean())(parameters)
        assert all(torch.equal(value, before[name]) for name, value in copy.deepcopy(model).state_dict().items())
        model(x).square().mean().backward()
    for name, parameter in parameters.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected)


def _weigh_by_a_loss(palettizer: KMeansPalettizer, model: nn.Module) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(9)) * torch.linspace(0.01, 5, 16)
    with palettizer.calibration_mode(loss_fn=lambda output, target: output.square().mean()) as helper:
        helper.step(model(x), None)


@pytest.mark.parametrize("schedule", [0, 6])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_after_calibration(strategy, schedule):
    """The sensitivities go with the palettizer's state, and leave the palettes of the model's own as they are."""

    def begin():
        palettizer, model = toy(schedule, strategy)
        return palettizer, model, torch.optim.Adam(model.parameters(), lr=1e-2)

    whole, part, resumed = begin(), begin(), begin()
    for palettizer, model, _ in (whole, part):
        _weigh_by_a_loss(palettizer, model)
    _fit(*whole, range(8))
    checkpoint = torch.load(io.BytesIO(_fit(*part, range(5))), weights_only=True)
    resumed[1].load_state_dict(checkpoint["model"])
    resumed[0].load_state_dict(checkpoint["palettizer"])
    resumed[2].load_state_dict(checkpoint["optimizer"])
    assert all(sim.sensitivities is not None for sim in simulators(resumed[1]))
    _fit(*resumed, range(5, 8))
    expected, found = whole[1].state_dict(), resumed[1].state_dict()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def test_states_and_their_sensitivities():
    """A state without them takes those of an earlier run away, one of version 1 leaves them; shapes are checked."""
    palettizer, model = toy()
    plain = palettizer.state_dict()
    _weigh_by_a_loss(palettizer, model)
    first = simulators(model)[0]
    weighed, centroids = first.sensitivities, first.centroids
    name = "0.parametrizations.weight.original"
    with pytest.raises(ValueError, match=r"'0\.weight' have shape \(2,\).*another model"):
        palettizer.load_state_dict({**plain, "step_count": 3, "sensitivities": {name: torch.ones(2)}})
    with pytest.raises(ValueError, match=r"does not belong to this model.*nowhere"):
        palettizer.load_state_dict({**plain, "step_count": 3, "sensitivities": {"nowhere": torch.ones(2)}})
    assert first.sensitivities is weighed
    palettizer.load_state_dict({"version": 1, "step_count": 3, "outdated": []})
    assert palettizer._step_count == 3
    assert first.sensitivities is weighed
    palettizer.load_state_dict(plain)
    assert first.sensitivities is None
    assert first.centroids is centroids


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_the_error_of_the_block_is_the_one_that_is_told(error):
    """Also where the palettes cannot be brought up to date, as a warning says; the next forward names the weight."""
    palettizer, model = toy(strategy={"type": "ste"})
    first = simulators(model)[0]

    def diverge() -> None:
        with palettizer.training_mode():
            first.disable_fake_palett()
            model[0].parametrizations.weight.original.data.fill_(torch.nan)
            raise error

    with pytest.warns(BitwrightWarning, match=r"left by an error.*'0\.weight'.*NaN"), pytest.raises(error):
        diverge()
    assert palettizer._lifecycle is _Lifecycle.IDLE
    assert enabled(model) == [True, True]
    with pytest.raises(ValueError, match=r"Cannot cluster '0\.weight'.*NaN"):
        model(torch.randn(2, 16))


@pytest.mark.parametrize("training", [False, True])
def test_nan_in_a_weight_that_trains_names_the_weight(training):
    """Where indices are assigned anew, as where palettes are found."""
    _, model = toy(strategy={"type": "ste"})
    model.train(training)
    with torch.no_grad():
        model[2].parametrizations.weight.original[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"Cannot cluster '2\.weight'.*1 NaN"):
        model(torch.randn(2, 16))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("spec", [{}, {"cluster_dim": 2}, {"enable_per_channel_scale": True}], ids=str)
def test_the_layout_of_a_weight_stays(strategy, spec):
    """A convolution in channels-last has outputs in channels-last, so that code which takes views of them runs on."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).permute(0, 2, 3, 1).view(len(x), -1)

    torch.manual_seed(0)
    model, plain = Rows().to(memory_format=torch.channels_last), Rows()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    config = config_of(PalettizationSpec(n_bits=2, training_strategy_spec=strategy, **spec))
    palettizer = KMeansPalettizer(model, config)
    palettizer.prepare((x,))
    KMeansPalettizer(plain, config).prepare((x,))
    for training in (False, True):
        model.train(training)
        plain.train(training)
        weight = model.conv.weight
        assert weight.stride() == model.conv.parametrizations.weight.original.stride()
        assert torch.allclose(weight, plain.conv.weight, atol=1e-6)
        model(x).sum().backward()
