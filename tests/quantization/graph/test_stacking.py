"""Pruned and palettized models given to the quantizer: one plan and one artifact, in graph mode as in eager mode."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.artifact import Artifact, PalettizedTensor, QuantizedTensor
from bitwright.errors import PlanError
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.palettization.config import PATSchedule
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.pruning.config import PolynomialDecaySchedule
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig

MODES = ("eager", "graph")
WEIGHTS = ("0.weight", "4.weight")


def network() -> nn.Sequential:
    """A convolution with a batch norm, and a linear layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)
    )
    model[1].running_var.uniform_(0.5, 2.0)
    return model.eval()


def pruned(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Half of every weight masked."""
    spec = PruningSpec(target_sparsity=0.5)
    config = MagnitudePrunerConfig(global_config=ModuleMagnitudePrunerConfig(op_state_spec={"weight": spec}))
    pruner = MagnitudePruner(model, config)
    pruner.prepare((x,))
    return pruner.finalize(backend="_torch")


def palettized(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Four values for each weight."""
    spec = PalettizationSpec(n_bits=2)
    config = KMeansPalettizerConfig(global_config=ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}))
    palettizer = KMeansPalettizer(model, config)
    palettizer.prepare((x,))
    return palettizer.finalize(backend="_torch")


Step = Callable[[nn.Module, torch.Tensor], nn.Module]
STACKS: dict[str, tuple[Step, ...]] = {
    "pruned": (pruned,),
    "palettized": (palettized,),
    "pruned and palettized": (pruned, palettized),
}


def quantized(name: str, mode: str) -> tuple[Quantizer, Any, nn.Module, torch.Tensor]:
    """Quantize activations, and weights where no palette stands on them."""
    model, x = network(), torch.randn(2, 3, 4, 4)
    for step in STACKS[name]:
        model = step(model, x)
    quantizer = Quantizer(model, QuantizerConfig(execution_mode=mode))
    if palettized in STACKS[name]:
        config = ModuleQuantizerConfig(op_state_spec=None)
        quantizer = Quantizer(model, QuantizerConfig(execution_mode=mode, global_config=config))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    return quantizer, prepared, model, x


@pytest.mark.parametrize("name", STACKS)
def test_one_plan_and_one_artifact(name: str) -> None:
    """Each weight is stored once, with mask, palette or codes together; both modes agree bit for bit."""
    found = {mode: Artifact.from_model(quantized(name, mode)[1]) for mode in MODES}
    kind = PalettizedTensor if palettized in STACKS[name] else QuantizedTensor
    for mode, artifact in found.items():
        assert set(artifact.compressed) == set(WEIGHTS), mode
        for weight in WEIGHTS:
            assert isinstance(artifact[weight], kind)
            assert artifact[weight].is_sparse == (pruned in STACKS[name])
    for weight in WEIGHTS:
        assert torch.equal(found["eager"][weight].decode(), found["graph"][weight].decode())
        assert found["eager"][weight].nbytes == found["graph"][weight].nbytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STACKS)
def test_finalized_equals_prepared(name: str, mode: str) -> None:
    """Simulated or in Core AI's ops, the numbers are the same, and so is what the artifact decodes to."""
    quantizer, prepared, _, x = quantized(name, mode)
    before = prepared(x)
    simulated = quantizer.finalize(backend="_torch")
    assert torch.equal(simulated(x), before)
    assert set(Artifact.from_model(simulated).compressed) == set(WEIGHTS)
    pytest.importorskip("coreai_torch")
    assert torch.equal(quantizer.finalize(backend="coreai")(x), before)


@pytest.mark.parametrize("name", STACKS)
def test_the_graph_computes_with_the_masks_and_palettes_below(name: str) -> None:
    """The prepared weight has the zeros of the mask and no more values than the palette."""
    _, prepared, model, x = quantized(name, "graph")
    assert not torch.equal(prepared(x), network()(x))
    weight = Artifact.from_model(prepared)["4.weight"].decode()
    below = model[4].weight.detach()
    if pruned in STACKS[name]:
        assert float((weight == 0).double().mean()) >= 0.5
        assert not weight[below == 0].any()
    if palettized in STACKS[name]:
        assert torch.equal(weight, below)
        assert len(weight[weight != 0].unique()) <= 4


def test_the_models_own_simulators_stay() -> None:
    """Graph mode leaves the model alone, also while it looks below its simulators, and also when it fails."""
    model, x = network(), torch.randn(2, 3, 4, 4)
    model = pruned(model, x)
    keys, before = list(model.state_dict()), model(x)
    Quantizer(model, QuantizerConfig()).plan((x,))
    with pytest.raises(RuntimeError, match=r"channels"):
        Quantizer(model, QuantizerConfig()).plan((torch.randn(2, 4, 4, 4),))
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), before)


def test_stacked_graphs_are_copied_and_pickled() -> None:
    """Masks and palettes travel with the graph."""
    _, prepared, _, x = quantized("pruned and palettized", "graph")
    before = prepared(x)
    assert torch.equal(copy.deepcopy(prepared)(x), before)
    assert torch.equal(pickle.loads(pickle.dumps(prepared))(x), before)


def test_training_keeps_the_mask() -> None:
    """Gradients of masked numbers have no effect on the finalized weight."""
    quantizer, prepared, _, x = quantized("pruned", "graph")
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    with quantizer.training_mode():
        for _ in range(3):
            optimizer.zero_grad()
            prepared(x).square().mean().backward()
            optimizer.step()
    prepared.eval()
    final = quantizer.finalize(backend="_torch")
    assert torch.equal(final(x), prepared(x))
    weight = Artifact.from_model(final)["4.weight"].decode()
    assert 0.49 <= float((weight == 0).double().mean()) <= 0.55


def unfinished(technique: str) -> tuple[Any, nn.Module, torch.Tensor]:
    """A model that another technique prepared and goes on training: masks that grow, palettes that come later."""
    model, x = network(), torch.randn(2, 3, 4, 4)
    compressor: Any
    if technique == "pruning":
        growing = {
            "op_state_spec": {"weight": PruningSpec(target_sparsity=0.5)},
            "sparsity_schedule": PolynomialDecaySchedule(total_iters=4, power=1.0),
        }
        compressor = MagnitudePruner(model, MagnitudePrunerConfig(global_config=ModuleMagnitudePrunerConfig(**growing)))
    else:
        spec = PalettizationSpec(
            n_bits=2, training_strategy_spec={"type": "ste"}, lut_qspec=QuantizationSpec(dtype="int8")
        )
        late = {"op_state_spec": {"weight": spec}, "pat_schedule": PATSchedule(enable_fake_palettize=2)}
        compressor = KMeansPalettizer(model, KMeansPalettizerConfig(global_config=ModuleKMeansPalettizerConfig(**late)))
    compressor.prepare((x,))
    return compressor, model, x


def values_of(model: nn.Module) -> tuple[int, int]:
    """How many numbers of the last layer's weight differ, and how many are zero."""
    weight = Artifact.from_model(model)["4.weight"].decode()
    return len(weight.unique()), int((weight == 0).sum())


@pytest.mark.parametrize("mode", MODES)
def test_schedules_of_other_techniques_go_on_below_the_quantizer(mode: str) -> None:
    """A model may be quantized before its pruning has come to an end; steps reach the masks of the given model only."""
    pruner, model, x = unfinished("pruning")
    quantizer = Quantizer(model, QuantizerConfig(execution_mode=mode))
    prepared = quantizer.prepare((x,))
    twin = copy.deepcopy(prepared)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    zeros = []
    with pruner.training_mode(twin), quantizer.training_mode(twin):
        for _ in range(5):
            optimizer.zero_grad()
            twin(x).square().mean().backward()
            optimizer.step()
            pruner.step()
            zeros.append(values_of(twin)[1])
    assert zeros == sorted(zeros)
    assert zeros[-1] >= 320 > zeros[0]
    assert values_of(prepared)[1] < 60
    final = quantizer.finalize(twin, backend="_torch")
    assert torch.equal(final.eval()(x), twin.eval()(x))


@pytest.mark.parametrize("mode", MODES)
def test_palettes_that_come_later_train_below_the_quantizer(mode: str) -> None:
    """Activations are quantized from the beginning, weights get their palettes at the scheduled step."""
    palettizer, model, x = unfinished("palettization")
    config = ModuleQuantizerConfig(op_state_spec=None)
    prepared = Quantizer(model, QuantizerConfig(execution_mode=mode, global_config=config)).prepare((x,))
    kernel = prepared.get_parameter("4.weight") if mode == "graph" else prepared[4].parametrizations.weight.original
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.5)
    seen = []
    with palettizer.training_mode(prepared):
        for _ in range(4):
            optimizer.zero_grad()
            prepared(x).square().mean().backward()
            seen.append(prepared(x).detach())
            optimizer.step()
            with torch.no_grad():
                kernel.mul_(1 if len(seen) > 1 else 3)  # palettes of the first weights would be too small
            palettizer.step()
    assert all(output.isfinite().all() for output in seen)
    assert values_of(prepared)[0] <= 4
    torch.testing.assert_close(Artifact.from_model(prepared)["4.weight"].decode().std(), kernel.std(), rtol=0.2, atol=0)


def test_a_quantized_model_is_not_quantized_again_under_another_technique() -> None:
    """What a Quantizer prepared stays its own, whatever else stands in the model."""
    pruner, model, x = unfinished("pruning")
    config = QuantizerConfig(execution_mode="eager")
    Quantizer(model, config).prepare((x,))
    with pytest.warns(UserWarning, match="already been prepared"):
        Quantizer(model, config).prepare((x,))
    with pytest.raises(RuntimeError, match="already been prepared"):
        pruner.prepare((x,))


@pytest.mark.parametrize("last", [pruned, palettized])
def test_a_technique_after_quantization_of_a_graph_hides_nothing(last: Step) -> None:
    """Simulators in the graph and on its parameters: one artifact holds both."""
    x = torch.randn(2, 3, 4, 4)
    config = QuantizerConfig.presets.w8(execution_mode="graph").without("0")
    quantizer = Quantizer(network(), config)
    quantizer.prepare((x,))
    finalized = quantizer.finalize(backend="_torch")
    (row,) = (row for row in MagnitudePruner(finalized).plan((x,)) if row.tensor == "4.weight")
    result = last(finalized, x)
    artifact = Artifact.from_model(result)
    assert isinstance(artifact["4.weight"], QuantizedTensor)
    assert (row.spec, row.compressed_bytes) == (None, artifact["4.weight"].nbytes)
    assert row.note.endswith("of the graph stands on it")
    assert len(artifact["0.weight"].decode().unique()) <= (4 if last is palettized else 8 * 27 // 2 + 1)
    torch.testing.assert_close(artifact.packed_model(network())(x), result(x))


@pytest.mark.parametrize("first", [{}, {"op_input_spec": None, "op_output_spec": None}, {"op_state_spec": None}])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_quantized_graph_is_not_quantized_again(first: dict[str, None], mode: str) -> None:
    """Its simulators would be overwritten by those of the same name, or quantized themselves."""
    x = torch.randn(2, 3, 4, 4)
    quantizer = Quantizer(network(), QuantizerConfig(global_config=ModuleQuantizerConfig(**first)))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    finalized = quantizer.finalize(backend="_torch")
    expected, keys = finalized(x), list(finalized.state_dict())
    second = Quantizer(finalized, QuantizerConfig(execution_mode=mode))
    assert [problem.code for problem in second.plan((x,)).problems if problem.severity == "error"] == ["order"]
    with pytest.raises(PlanError, match="Quantize the float model once"):
        second.prepare((x,))
    assert list(finalized.state_dict()) == keys
    assert torch.equal(finalized(x), expected)


ACTIVATIONS: dict[str, None] = {"op_state_spec": None}
STATES: dict[str, None] = {"op_input_spec": None, "op_output_spec": None}


@pytest.mark.parametrize("between", [pruned, palettized])
@pytest.mark.parametrize(
    ("second", "mode"), [(ACTIVATIONS, "graph"), (STATES, "graph"), ({}, "graph"), (ACTIVATIONS, "eager")]
)
def test_quantized_activations_are_not_quantized_again(between: Step, second: dict[str, None], mode: str) -> None:
    """Under another technique, too: their simulators would be replaced, or become ops of the graph."""
    model, x = network(), torch.randn(2, 3, 4, 4)
    eager = ModuleQuantizerConfig(**ACTIVATIONS)
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager", global_config=eager))
    quantizer.prepare((x,))
    with quantizer.calibration_mode():
        model(x)
    model = between(quantizer.finalize(backend="_torch"), x)
    expected, keys = model(x), list(model.state_dict())
    again = Quantizer(model, QuantizerConfig(execution_mode=mode, global_config=ModuleQuantizerConfig(**second)))
    assert "order" in [problem.code for problem in again.plan((x,)).problems if problem.severity == "error"]
    with pytest.raises(PlanError, match="Quantize the activations last"):
        again.prepare((x,))
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), expected)


def test_weights_may_be_quantized_after_the_activations() -> None:
    """In eager mode the simulators of the activations stay as they are."""
    model, x = network(), torch.randn(2, 3, 4, 4)
    for first, pruning in ((ACTIVATIONS, True), (STATES, False)):
        config = ModuleQuantizerConfig(**first)
        quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager", global_config=config))
        quantizer.prepare((x,))
        with quantizer.calibration_mode():
            model(x)
        model = quantizer.finalize(backend="_torch")
        model = pruned(model, x) if pruning else model
    artifact = Artifact.from_model(model)
    assert len(artifact.activations) == 4
    assert all(isinstance(artifact[weight], QuantizedTensor) and artifact[weight].is_sparse for weight in WEIGHTS)


def test_the_plan_says_what_stands_below() -> None:
    """A palette is no place for a quantizer, and the rows say so; a mask makes the codes fewer."""
    model, x = network(), torch.randn(2, 3, 4, 4)
    dense = Quantizer(network(), QuantizerConfig()).plan((x,))
    masked = Quantizer(pruned(model, x), QuantizerConfig()).plan((x,))
    bytes_of = [{row.tensor: row.compressed_bytes for row in plan if row.kind == "weight"} for plan in (dense, masked)]
    assert bytes_of[1]["4.weight"] < bytes_of[0]["4.weight"]
    on_palettes = Quantizer(palettized(network(), x), QuantizerConfig()).plan((x,))
    notes = {row.tensor: (row.spec, row.note) for row in on_palettes if row.kind == "weight"}
    assert notes["4.weight"][0] is None
    assert "palettization" in notes["4.weight"][1]
