"""The capability table says what the exporters and the runtimes really do; plans are checked against it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitwright.errors import PlanError
from bitwright.export.capabilities import Form, capabilities, check_plan, weight_support
from bitwright.export.samples import SAMPLES, _prepared, sample_weight
from bitwright.export.targets import TARGETS
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.palettization.spec import PerGroupedChannelGranularity
from bitwright.planning import Severity
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerChannelGranularity
from tests.measures import sqnr

from .models import W8, Mlp, blocks, built, prepared

FAST = ("onnx", "coreai", "coreml", "gguf", "compressed-tensors", "torch")
RUN_HERE = [name for name, target in TARGETS.items() if name not in ("artifact", "aot-inductor", "onnx-nbits")]


@pytest.fixture(scope="module")
def table():
    return {(row.kind, row.label): row for row in capabilities()}


def _compressed(kind, specs, x):
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    if kind == "activation":
        return prepared(nn.Sequential(layer), x, W8, specs[0])[1]
    for spec in specs:
        layer = _prepared(layer, spec)
    return layer.eval()


def _row_test(table, kind, label, specs, name, folder):
    target, claim = TARGETS[name], table[kind, label].targets[name]
    if target.missing() is not None:
        pytest.skip(target.missing())
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    ready = _compressed(kind, specs, x)
    path = folder / f"m{target.suffix}"
    if claim.form == Form.REFUSED:
        assert claim.reason
        with pytest.raises((ValueError, NotImplementedError)):
            target.write(ready, (x,), path, {}, None)
        return
    with torch.no_grad():
        expected = ready(x)
    target.write(ready, (x,), path, {}, None)
    if target.run is not None:
        assert sqnr(expected, target.run(path, [x])[0]) > (30 if kind == "activation" else 100)
    if name == "executorch" and kind == "weight":
        assert (path.stat().st_size < 16_000) == (claim.form == Form.PACKED)


QUICK_ROWS = ("int3, per channel", "pruned to 75 %, palette of 4 bits", "int8, per tensor, minval")


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(("label", "kind", "specs"), [row for row in SAMPLES if row[0] in QUICK_ROWS])
def test_rows_hold_in_the_targets(table, label, kind, specs, name, tmp_path):
    _row_test(table, kind, label, specs, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_HERE)
@pytest.mark.parametrize(("label", "kind", "specs"), SAMPLES)
def test_every_row_holds_in_every_target(table, label, kind, specs, name, tmp_path):
    _row_test(table, kind, label, specs, name, tmp_path)


def _planned(kind, specs, model, x):
    """The plan of the last technique, on a model that the others have prepared."""
    if kind == "activation":
        module = ModuleQuantizerConfig(op_input_spec={"*": specs[0]}, op_output_spec=None, op_state_spec={"weight": W8})
        return Quantizer(model, QuantizerConfig(global_config=module, execution_mode="eager")).plan((x,))
    for spec in specs[:-1]:
        compressor, config = _compressors(spec)
        before = compressor(model, config)
        before.prepare((x,))
        model = before.finalize(backend="_torch")
    compressor, config = _compressors(specs[-1])
    return compressor(model, config).plan((x,))


@pytest.mark.parametrize(("label", "kind", "specs"), SAMPLES)
def test_plans_agree_with_the_table(table, label, kind, specs):
    """Whatever a target refuses is an error of the plan, what it stores dense a warning, and the rest is neither."""
    plan = _planned(kind, specs, nn.Sequential(nn.Linear(64, 64)).eval(), torch.zeros(4, 64))
    assert len([row for row in plan if row.kind == kind and row.spec is not None]) == 1
    for name, claim in table[kind, label].targets.items():
        found = [problem.severity for problem in check_plan(plan, name) if ("[" in problem.where) == (kind != "weight")]
        dense = claim.form == Form.DENSE and kind == "weight"
        assert found == ([Severity.ERROR] if claim.form == Form.REFUSED else [Severity.WARNING] if dense else []), name


CONVOLUTIONS = {
    "palette": PalettizationSpec(n_bits=4),
    "palettes of groups": PalettizationSpec(n_bits=2, granularity=PerGroupedChannelGranularity(axis=0, group_size=2)),
    "vectors": PalettizationSpec(n_bits=3, cluster_dim=2),
    "mask": PruningSpec(target_sparsity=0.5),
    "codes": QuantizationSpec(dtype="int8", granularity=PerChannelGranularity(axis=0)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("model", [nn.Conv1d(4, 8, 3), nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(4, 8, 2)])
def test_plans_of_convolutions_are_answered(model, name, masked):
    """Weights of every rank, with and without a mask below."""
    if masked and name in ("vectors", "mask"):
        pytest.skip("not to be combined")
    specs = (PruningSpec(target_sparsity=0.5),) * masked + (CONVOLUTIONS[name],)
    x = torch.zeros(1, 4, *[6] * (model.weight.ndim - 2))
    plan = _planned("weight", specs, copy.deepcopy(model).eval(), x)
    dense = {problem.where for problem in check_plan(plan, "executorch")}
    assert dense == (set() if name == "codes" and not masked else {"weight"})
    refused = [problem.severity for problem in check_plan(plan, "gguf")]
    assert refused in ([], [Severity.ERROR])
    assert bool(refused) == (weight_support("gguf", sample_weight(specs, (8, 4, 3), "float32")).form == Form.REFUSED)
    assert not check_plan(plan, "torch")


def test_samples_are_what_their_spec_says():
    """The weights that the exporters are asked about have the layouts of their specs."""
    tensor = sample_weight((QuantizationSpec(dtype="int4", granularity=blocks(32)),), (64, 64), "float32")
    assert tensor.layout.counts == (64, 2)
    sparse = sample_weight((PruningSpec(target_sparsity=0.75),), (64, 64), "float16")
    assert sparse.is_sparse
    assert sparse.dtype == torch.float16
    assert weight_support("onnx", sparse).form == Form.DENSE


def _plan(weight, activation=None, mode="eager"):
    specs = None if activation is None else {"*": activation}
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(op_state_spec={"weight": weight}, op_input_spec=specs, op_output_spec=None),
        execution_mode=mode,
    )
    model, x = built(Mlp)
    return Quantizer(copy.deepcopy(model), config).plan((x,))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_plans_say_what_a_target_lacks(mode):
    """Each tensor with the reason; errors for what is refused, warnings for what is stored dense."""
    plan = _plan(QuantizationSpec(dtype="int4", granularity=blocks(32)), QuantizationSpec(dtype="int4"), mode)
    assert not check_plan(plan, "onnx")
    lacking = check_plan(plan, "coreml")
    assert {problem.severity for problem in lacking} == {Severity.ERROR}
    assert all("int4" in problem.message for problem in lacking)
    dense = [problem for problem in check_plan(plan, "executorch") if "weight" in problem.where]
    assert [problem.where for problem in dense] == ["up.weight", "down.weight"]
    assert {problem.severity for problem in dense} == {Severity.WARNING}
    assert len(check_plan(plan, "gguf")) == len([row for row in plan if row.kind == "activation" and row.spec])


@pytest.mark.parametrize(("n_bits", "is_dense"), [(4, False), (8, True)])
@pytest.mark.parametrize("shared", [{"granularity": PerGroupedChannelGranularity(axis=0, group_size=32)},
                                    {"enable_per_channel_scale": True}])  # fmt: skip
def test_plans_tell_of_masks_that_core_ai_has_no_palettes_for(n_bits, is_dense, shared):
    """Where all 256 values of a table may be in use, none is left for what was pruned."""
    specs = (PruningSpec(target_sparsity=0.5), PalettizationSpec(n_bits=n_bits, **shared))
    plan = _planned("weight", specs, nn.Linear(64, 64).eval(), torch.zeros(1, 64))
    told = [(problem.severity, problem.message) for problem in check_plan(plan, "coreai")]
    reason = "Core AI stores it dense: a mask beside tables of 256 values, which leave none for zero."
    assert told == [(Severity.WARNING, reason)] * is_dense


@pytest.mark.parametrize(
    ("activation", "remedy"),
    [
        (QuantizationSpec(granularity=blocks(32)), "Use PerTensorGranularity or PerChannelGranularity, or install"),
        (QuantizationSpec(dtype="float4_e2m1fn", granularity=blocks(32)), "Use an integer or FP8 dtype, with Per"),
    ],
)
def test_plans_for_core_ai_say_what_to_use(activation, remedy):
    """The place stands before the message; a simulator that was made for the plan has no name."""
    refused = [problem for problem in check_plan(_plan(W8, activation), "coreai") if problem.severity is Severity.ERROR]
    assert refused
    for problem in refused:
        assert remedy in problem.message
        assert "<unknown>" not in problem.message
        assert "_TORCH" not in problem.message


def test_reasons_name_nothing_of_the_samples():
    """They are asked of small weights without a name."""
    for label, shape, target in (("float8_e4m3fn", (64, 64), "coreml"), ("int4", (32, 8), "gguf")):
        granularity = PerChannelGranularity(axis=0) if target == "coreml" else blocks(4)
        layer = nn.Linear(*shape).eval()
        plan = _planned(
            "weight", (QuantizationSpec(dtype=label, granularity=granularity),), layer, torch.zeros(1, shape[0])
        )
        (problem,) = check_plan(plan, target)
        assert "'" not in problem.message
        assert "shape" not in problem.message
    assert "blocks of (1, 4) are not multiples of 32 along the last axis" in problem.message


@pytest.mark.parametrize("target", ["onnx", "executorch", "coreai", "coreml"])
def test_searches_at_run_time_are_refused(target):
    """Files compute dynamic ranges as extremes, not by a search."""
    searched = QuantizationSpec(range_calculator_cls="mse", qparam_calculator_cls="dynamic")
    plan = _plan(QuantizationSpec(), searched, "eager")
    found = [problem for problem in check_plan(plan, target) if problem.severity is Severity.ERROR]
    assert len(found) == 2
    assert all("run time" in problem.message for problem in found)


def _compressors(spec):
    where = {"op_state_spec": {"weight": spec}}
    if isinstance(spec, PruningSpec):
        return MagnitudePruner, MagnitudePrunerConfig(global_config=ModuleMagnitudePrunerConfig(**where))
    if isinstance(spec, PalettizationSpec):
        module = ModuleKMeansPalettizerConfig(enable_fast_kmeans_mode=False, **where)
        return KMeansPalettizer, KMeansPalettizerConfig(global_config=module)
    module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, **where)
    return Quantizer, QuantizerConfig(global_config=module, execution_mode="eager")


@pytest.mark.parametrize(
    ("spec", "lacking"),
    [
        (QuantizationSpec(dtype="int2"), "coreml"),
        (PalettizationSpec(n_bits=3), "compressed-tensors"),
        (PruningSpec(target_sparsity=0.5), "gguf"),
    ],
)
def test_compressors_plan_and_prepare_for_a_target(spec, lacking):
    """What the target lacks is among the problems of the plan, and stops ``prepare`` before the model is touched."""
    kind, config = _compressors(spec)
    model, x = built(Mlp)
    compressor = kind(model, config)
    assert compressor.plan((x,), target="torch").problems == compressor.plan((x,)).problems
    refused = compressor.plan((x,), target=lacking).problems
    assert [problem.where for problem in refused if problem.code == "target"] == ["up.weight", "down.weight"]
    with pytest.raises(PlanError, match=r"up\.weight: \S.* cannot hold it"):
        compressor.prepare((x,), target=lacking)
    assert type(model.up) is nn.Linear
    assert compressor.prepare((x,), target="torch") is model


def test_an_unknown_target():
    with pytest.raises(KeyError):
        check_plan(_plan(W8), "tpu")
    with pytest.raises(KeyError, match="There is no target 'tpu'"):
        Quantizer(built(Mlp)[0], QuantizerConfig()).plan((torch.zeros(1, 64),), target="tpu")
