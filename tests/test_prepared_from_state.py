"""``prepare(state_dict=...)``: a model that was prepared before, without calibrating, clustering or pruning again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import Quantizer, QuantizerConfig

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
Make = Callable[[nn.Module], Any]

COMPRESSORS: dict[str, Make] = {
    "eager": lambda model: Quantizer(model, QuantizerConfig(execution_mode="eager")),
    "graph": lambda model: Quantizer(model, QuantizerConfig(execution_mode="graph")),
    "palettizer": KMeansPalettizer,
    "pruner": MagnitudePruner,
}


@pytest.fixture(params=list(COMPRESSORS))
def make(request: pytest.FixtureRequest) -> Make:
    return COMPRESSORS[request.param]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def prepared(make: Make) -> nn.Module:
    """A prepared model that has seen more than its example inputs."""
    compressor = make(network())
    model: nn.Module = compressor.prepare((X,))
    if isinstance(compressor, Quantizer):
        with compressor.calibration_mode():
            model(3 * X)
    return model.eval()


def test_the_state_is_that_of_the_other_model(make: Make) -> None:
    source = prepared(make)
    model = make(network(1)).prepare((X,), state_dict=source.state_dict()).eval()
    assert torch.equal(model(X), source(X))
    state = source.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_calibrated_state_needs_no_calibration(recwarn: pytest.WarningsRecorder) -> None:
    quantizer = COMPRESSORS["eager"](network())
    quantizer.prepare((X,), state_dict=prepared(COMPRESSORS["eager"]).state_dict())
    quantizer.finalize(backend="torch")
    assert not [str(warning.message) for warning in recwarn]


def test_nothing_is_clustered(monkeypatch: pytest.MonkeyPatch) -> None:
    state = prepared(KMeansPalettizer).state_dict()
    monkeypatch.setattr("bitwright.palettization.kmeans.palettizer.settle_all", lambda *_: pytest.fail("clustered"))
    KMeansPalettizer(network()).prepare((X,), state_dict=state)(X)


def test_switches_are_those_of_every_prepared_model(make: Make) -> None:
    state = make(network()).prepare((X,)).state_dict()
    switches = {name: value for name, value in state.items() if name.endswith("_enabled")}
    flipped = state | {name: 1 - value for name, value in switches.items()}
    again = make(network()).prepare((X,), state_dict=flipped).state_dict()
    assert {name: int(again[name]) for name in switches} == {name: int(value) for name, value in switches.items()}


def _without(state: dict[str, Any], key: str) -> None:
    del state[key]


def _of_another_shape(state: dict[str, Any], key: str) -> None:
    state[key] = torch.zeros(2)


def _with_another(state: dict[str, Any], key: str) -> None:
    state["another"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without, "missing: 4"),
        (_of_another_shape, r"another shape: 4.*\(2,\)"),
        (_with_another, "unexpected: another"),
    ],
)
def test_a_state_that_does_not_match_changes_nothing(
    make: Make, change: Callable[[dict[str, Any], str], None], words: str
) -> None:
    state = dict(make(network(1)).prepare((X,)).state_dict())
    change(state, next(key for key in state if key.startswith("4.") and key.endswith((".original", "4.weight"))))
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=f"State dict does not match.*{words}"):
        make(model).prepare((X,), state_dict=state)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_state_of_another_configuration_is_refused() -> None:
    state = KMeansPalettizer(network()).prepare((X,)).state_dict()
    dense = {name: value for name, value in state.items() if not name.endswith((".centroids", ".indices"))}
    with pytest.raises(RuntimeError, match="State dict does not match"):
        KMeansPalettizer(network()).prepare((X,), state_dict=dense)
    with pytest.raises(RuntimeError, match="State dict does not match"):
        MagnitudePruner(network()).prepare((X,), state_dict=state)
    with pytest.raises(TypeError, match="state_dict must be"):
        MagnitudePruner(network()).prepare((X,), state_dict=[])  # type: ignore[arg-type]


def test_a_prepared_model_takes_no_state() -> None:
    quantizer = COMPRESSORS["eager"](network())
    state = quantizer.prepare((X,)).state_dict()
    with pytest.raises(RuntimeError, match="already been prepared"):
        quantizer.prepare((X,), state_dict=state)


def test_a_schedule_of_pruning_goes_on() -> None:
    schedule = {"type": "polynomial_decay", "total_iters": 11, "power": 1.0}
    whole = {"op_state_spec": {"weight": {"target_sparsity": 0.8}}, "sparsity_schedule": schedule}
    config = MagnitudePrunerConfig(global_config=whole)
    first = MagnitudePruner(network(), config)
    model = first.prepare((X,))
    for _ in range(5):
        first.step()
    second = MagnitudePruner(network(), config)
    again = second.prepare((X,), state_dict=model.state_dict())
    assert torch.equal(again(X), model(X))
    first.step()
    second.step()
    assert torch.equal(again(X), model(X))
    weight: Any = again[4].weight  # type: ignore[index]
    assert (weight == 0).float().mean() == pytest.approx(0.48, abs=0.01)


def test_pruned_weights_at_different_steps_are_refused() -> None:
    state = dict(MagnitudePruner(network()).prepare((X,)).state_dict())
    key = next(name for name in state if name.endswith("step_count"))
    state[key] = state[key] + 1
    model = network(1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="different steps"):
        MagnitudePruner(model).prepare((X,), state_dict=state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_palettes_on_pruned_weights() -> None:
    """A stack of two techniques: the state holds both."""
    config = KMeansPalettizerConfig(global_config={"op_state_spec": {"weight": {"n_bits": 2}}})

    def stacked(state_dict: Any = None) -> nn.Module:
        model = network() if state_dict is None else network(1)
        MagnitudePruner(model).prepare((X,))
        return KMeansPalettizer(model, config).prepare((X,), state_dict=state_dict).eval()

    source = stacked()
    assert torch.equal(stacked(source.state_dict())(X), source(X))
