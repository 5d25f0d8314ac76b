"""Quantization, palettization and pruning of one model, and of one weight."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from bitwright import ExportBackend
from bitwright.errors import PlanError
from bitwright.inspection import bits_per_weight
from bitwright.palettization import KMeansPalettizer, PalettizationSpec
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.pruning.config import ConstantSparsitySchedule
from bitwright.quantization import ExecutionMode, ModuleQuantizerConfig, Quantizer, QuantizerConfig
from bitwright.quantization.spec import QuantizationSpec

from .networks import ConvLinear, config_of, image

WEIGHTS = QuantizerConfig.presets.w8(execution_mode="eager")
ACTIVATIONS = QuantizerConfig(global_config=ModuleQuantizerConfig(op_state_spec=None), execution_mode="eager")


def prune(model: nn.Module) -> MagnitudePruner:
    return MagnitudePruner(model)


def palettize(model: nn.Module) -> KMeansPalettizer:
    return KMeansPalettizer(model)


def quantize(model: nn.Module) -> Quantizer:
    return Quantizer(model, WEIGHTS)


def activations(model: nn.Module) -> Quantizer:
    return Quantizer(model, ACTIVATIONS)


def apply(model: nn.Module, *makers) -> None:
    """Prepare with each compressor in turn, finalizing for torch in between."""
    for make in makers:
        compressor = make(model)
        compressor.prepare(image())
        compressor.finalize(backend=ExportBackend._TORCH)
        compressor._unmark_model(model)


def apply_without_unmarking(model: nn.Module, *makers) -> None:
    """Prepare with each compressor in turn, finalizing for torch in between, as a user does."""
    for make in makers:
        compressor = make(model)
        compressor.prepare(image())
        compressor.finalize(backend=ExportBackend._TORCH)


def zeros(tensor: torch.Tensor) -> float:
    return (tensor == 0).float().mean().item()


@pytest.mark.parametrize("makers", list(itertools.permutations([prune, palettize])))
def test_sparse_palettes(makers):
    """In either order: half of the entries are zero, the others have at most 16 values; all copies agree."""
    torch.manual_seed(0)
    model = ConvLinear().eval()
    apply(model, *makers)
    for layer in (model.conv, model.linear):
        assert zeros(layer.weight) == 0.5
        assert len(layer.weight.unique()) <= 17
    output = model(*image())
    assert torch.equal(pickle.loads(pickle.dumps(model))(*image()), output)
    assert torch.equal(copy.deepcopy(model)(*image()), output)
    finalized = KMeansPalettizer(model)
    finalized._mark_model_as_prepared(model)
    assert torch.equal(finalized.finalize(backend="coreml")(*image()), output)


def test_the_palette_of_a_pruned_weight_is_for_what_is_left():
    """Zeros are kept by the mask, so no entry is spent on them and the error is smaller."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64))
    example = (torch.randn(2, 64),)
    MagnitudePruner(model).prepare(example)
    masked = model[0].weight.detach().clone()
    blind = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        blind[0].weight.copy_(masked)
    KMeansPalettizer(blind, config_of(PalettizationSpec(n_bits=2))).prepare(example)
    KMeansPalettizer(model, config_of(PalettizationSpec(n_bits=2))).prepare(example)
    assert torch.equal(model[0].weight == 0, masked == 0)
    assert (model[0].weight - masked).square().sum() < 0.6 * (blind[0].weight - masked).square().sum()


def test_sparse_and_quantized():
    """Zeros stay zeros on a symmetric grid."""
    model = ConvLinear().eval()
    apply(model, prune, quantize)
    assert zeros(model.conv.weight) >= 0.5
    assert len(model.conv.parametrizations.weight) == 2


@pytest.mark.parametrize("makers", list(itertools.permutations([palettize, activations])))
def test_palettized_weights_and_quantized_activations(makers):
    """In either order; the palette stays."""
    torch.manual_seed(2)
    model = ConvLinear().eval()
    apply(model, *makers)
    assert len(model.conv.weight.unique()) == 16
    assert any("quantize" in name for name, _ in model.named_modules())
    assert model(*image()).isfinite().all()


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    "make",
    [
        prune,
        palettize,
        quantize,
        lambda model: KMeansPalettizer(model, config_of(PalettizationSpec(enable_per_channel_scale=True))),
        lambda model: KMeansPalettizer(model, config_of(PalettizationSpec(lut_qspec=QuantizationSpec(dtype="int8")))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_core_ai_unpacks_are_no_activations(make, mode, dtype):
    """Activations behind them are simulated; the weights themselves stay as they were finalized."""
    torch.manual_seed(4)
    model, (example,) = ConvLinear().eval().to(dtype), image()
    example = example.to(dtype)
    compressor = make(model)
    compressor.prepare((example,))
    finalized = compressor.finalize(backend=ExportBackend.CoreAI)
    weights = [layer.weight.detach().clone() for layer in (finalized.conv, finalized.linear)]
    quantizer = Quantizer(finalized, ACTIVATIONS.model_copy(update={"execution_mode": ExecutionMode(mode)}))
    prepared = quantizer.prepare((example,))
    simulators = [name for name, module in prepared.named_modules() if hasattr(module, "fake_quant_enabled")]
    assert len(simulators) == {"eager": 4, "graph": 3}[mode], simulators
    if mode == "eager":
        for layer, weight in zip((prepared.conv, prepared.linear), weights, strict=True):
            assert torch.equal(layer.weight, weight)


def test_all_three():
    """Sparse, palettized weights and quantized activations in one model."""
    torch.manual_seed(3)
    model = ConvLinear().eval()
    apply(model, prune, palettize, activations)
    assert zeros(model.conv.weight) == 0.5
    assert len(model.conv.weight.unique()) <= 17


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (palettize, palettize, "palettized already"),
        (prune, prune, "pruned already"),
        (quantize, palettize, "lut_qspec"),
    ],
)
def test_orders_without_a_meaning_are_errors_of_the_plan(first, second, reason):
    """The message says why and what to do; the model is as it was."""
    model = ConvLinear().eval()
    apply(model, first)
    keys = set(model.state_dict())
    plan = second(model).plan(image())
    assert {problem.code for problem in plan.problems} == {"order"}
    with pytest.raises(PlanError, match=reason):
        second(model).prepare(image())
    assert set(model.state_dict()) == keys


def test_a_vector_cannot_be_pruned_in_part():
    """Vectors on a pruned weight are an error; pruning palettized vectors is the way."""
    model = ConvLinear().eval()
    apply(model, prune)
    spec = config_of(PalettizationSpec(cluster_dim=2))
    with pytest.raises(PlanError, match="cluster_dim=2"):
        KMeansPalettizer(model, spec).prepare(image())


def test_the_plan_counts_what_stands_below():
    """A sparse palette stores a bit per entry, and indices for what is kept."""
    model = ConvLinear().eval()
    apply(model, prune)
    row = next(row for row in KMeansPalettizer(model).plan(image()) if row.tensor == "linear.weight")
    assert row.compressed_bytes == 320 // 8 + 160 * 4 // 8 + 16 * 4
    assert "on top of MagnitudePruneImpl" in row.note


def test_a_schedule_goes_on_below_a_palette():
    """Two compressors may hold one model at the same time: masks move, palettized zeros follow."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(16, 16))
    example = (torch.randn(2, 16),)
    pruner = MagnitudePruner(
        model,
        MagnitudePrunerConfig(
            global_config=ModuleMagnitudePrunerConfig(
                op_state_spec={"weight": PruningSpec(target_sparsity=0.75)},
                sparsity_schedule=ConstantSparsitySchedule(begin_step=1),
            )
        ),
    )
    pruner.prepare(example)
    palettizer = KMeansPalettizer(model, config_of(PalettizationSpec(training_strategy_spec={"type": "ste"})))
    palettizer.prepare(example)
    assert zeros(model[0].weight) == 0.0
    with palettizer.training_mode():
        pruner.step()
        model(*example).sum().backward()
    assert zeros(model[0].weight) == 0.75
    gradient = model[0].parametrizations.weight.original.grad
    assert torch.equal(gradient != 0, model[0].weight != 0)
    with pytest.raises(RuntimeError, match="already been prepared"):
        palettizer.prepare(example)


def test_a_failure_on_top_leaves_what_is_below():
    """Only the new simulators are taken back."""
    model = ConvLinear().eval()
    apply(model, prune)
    output = model(*image())
    palettizer = KMeansPalettizer(model, config_of(PalettizationSpec()))

    def broken(*args):
        raise ZeroDivisionError

    palettizer._initialise = broken
    with pytest.raises(ZeroDivisionError):
        palettizer.prepare(image())
    assert len(model.conv.parametrizations.weight) == 1
    assert torch.equal(model(*image()), output)


def test_palettes_with_quantized_entries_serve_in_place_of_quantized_palettes():
    """What the error about the order proposes."""
    model = ConvLinear().eval()
    spec = PalettizationSpec(lut_qspec=QuantizationSpec(dtype="int8"))
    KMeansPalettizer(model, config_of(spec)).prepare(image())
    assert model.conv.parametrizations.weight[0].quantized_lut.dtype == torch.int8


@pytest.mark.parametrize("weights", [[prune], [palettize], [prune, palettize], [palettize, prune]])
def test_weights_after_activations(weights):
    """Quantizing the activations first is no obstacle, and gives the weights that the other order gives."""
    torch.manual_seed(0)
    first = ConvLinear().eval()
    last = copy.deepcopy(first)
    apply_without_unmarking(first, activations, *weights)
    apply_without_unmarking(last, *weights, activations)
    for mine, other in ((first.conv, last.conv), (first.linear, last.linear)):
        assert torch.equal(mine.weight, other.weight)
    assert first(*image()).isfinite().all()
    with pytest.raises(PlanError, match="already"):
        weights[-1](first).prepare(image())


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_technique_that_found_nothing_is_no_obstacle(mode):
    """Blocks that do not divide leave all weights to the next one."""
    model = nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 4)).eval()
    example = (torch.randn(2, 20),)
    quantizer = Quantizer(model, QuantizerConfig.presets.w4_per_block(execution_mode=mode))
    with pytest.warns(UserWarning, match="divi"):
        prepared = quantizer.prepare(example)
    MagnitudePruner(prepared).prepare(example)
    assert bits_per_weight(prepared).bpw < 32


def test_tied_masks_in_a_graph_leave_no_dense_weight_behind():
    """Core AI reads a sparse weight through a module of ops under one name; the other name holds nothing any more."""
    pytest.importorskip("coreai_torch")
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False)).eval()
    model[2].weight = model[0].weight
    x = torch.randn(2, 16)
    pruner = MagnitudePruner(model)
    pruner.prepare((x,))
    pruner.finalize(backend="_torch")
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="graph"))
    ready = quantizer.prepare((x,))
    expected, bits = ready(x), bits_per_weight(ready).total_bits
    final = quantizer.finalize(backend="coreai")
    assert torch.equal(final(x), expected)
    assert bits_per_weight(final).total_bits == bits
