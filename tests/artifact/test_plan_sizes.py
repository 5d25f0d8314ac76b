"""Orders of techniques on one weight: the last plan says what the artifact takes."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn

from bitwright.artifact import Artifact
from bitwright.errors import ConfigMatchWarning
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig, ModuleKMeansPalettizerConfig
from bitwright.palettization.spec import PalettizationSpec
from bitwright.planning import Plan
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig

_X = (torch.zeros(2, 64),)
_GRIDS = {
    "int4": QuantizationSpec(dtype="int4"),
    "int8 minval": QuantizationSpec(dtype="int8", qformulation="minval"),
    "int4 clipped minval": QuantizationSpec(
        dtype="int4", qscheme="symmetric_with_clipping", qformulation="minval"
    ),
    "uint4 asymmetric": QuantizationSpec(dtype="uint4", qscheme="asymmetric"),
    "fp8": QuantizationSpec(dtype="float8_e4m3fn"),
}  # fmt: skip
_PALETTES = {
    "4 bits": PalettizationSpec(n_bits=4),
    "int8 entries": PalettizationSpec(n_bits=3, lut_qspec=QuantizationSpec(dtype="int8")),
    "pairs": PalettizationSpec(n_bits=4, cluster_dim=2),
}


def _apply(steps: str, model: nn.Module, grid: QuantizationSpec, palette: PalettizationSpec, sparsity: float):
    """Apply techniques in order ("s" prunes, "q" quantizes, "p" palettizes); return the last plan and the model."""
    plan = None
    for step in steps:
        if step == "q":
            weights = ModuleQuantizerConfig(op_state_spec={"weight": grid}, op_input_spec=None, op_output_spec=None)
            tool = Quantizer(model, QuantizerConfig(global_config=weights, execution_mode="eager"))
        elif step == "p":
            palettes = ModuleKMeansPalettizerConfig(
                op_state_spec={"weight": palette}, enable_fast_kmeans_mode=palette.cluster_dim == 1
            )
            tool = KMeansPalettizer(model, KMeansPalettizerConfig(global_config=palettes))
        else:
            masks = ModuleMagnitudePrunerConfig(op_state_spec={"weight": PruningSpec(target_sparsity=sparsity)})
            tool = MagnitudePruner(model, MagnitudePrunerConfig(global_config=masks))
        x = (_X[0].to(model[0].weight.dtype),)
        plan, model = tool.plan(x), tool.prepare(x)
    assert isinstance(plan, Plan)
    return plan, model


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32)).to(dtype).eval()


def _check(steps: str, dtype: torch.dtype, grid: QuantizationSpec, palette: PalettizationSpec, sparsity: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigMatchWarning)
        plan, ready = _apply(steps, _model(dtype), grid, palette, sparsity)
    entry = Artifact.from_model(ready)["0.weight"]
    (row,) = (row for row in plan if row.tensor == "0.weight")
    # Zero is on this grid for some scales only.
    clipped = grid is _GRIDS["int4 clipped minval"]
    assert row.compressed_bytes == entry.nbytes or (clipped and entry.nbytes < row.compressed_bytes)
    assert torch.equal(entry.decode(), ready[0].weight.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", ["q", "sq", "qs"])
def test_quantized_and_pruned(steps: str, dtype: torch.dtype) -> None:
    for grid, sparsity in itertools.product(_GRIDS.values(), (0.0, 0.02, 0.5)):
        _check(steps, dtype, grid, _PALETTES["4 bits"], sparsity)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("steps", ["p", "sp", "ps"])
def test_palettized_and_pruned(steps: str, dtype: torch.dtype) -> None:
    for (name, palette), sparsity in itertools.product(_PALETTES.items(), (0.0, 0.02, 0.5)):
        if not (steps == "sp" and name == "pairs"):  # refused
            _check(steps, dtype, _GRIDS["int4"], palette, sparsity)


def test_a_quantized_weight_stays_quantized_below_a_small_mask() -> None:
    """Dropped entries have codes other than that of zero, so the mask is stored though it saves nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigMatchWarning)
        _, ready = _apply("qs", _model(torch.float32), _GRIDS["int8 minval"], _PALETTES["4 bits"], 0.02)
    assert Artifact.from_model(ready)["0.weight"].nbytes < 0.4 * 4 * 64 * 32


def test_plans_warn_of_masks_that_are_lost() -> None:
    model = _model(torch.float32)
    with pytest.warns(ConfigMatchWarning, match=r"has no zero, .* Use qformulation='zp'"):
        plan, _ = _apply("sq", model, _GRIDS["int8 minval"], _PALETTES["4 bits"], 0.5)
    assert [problem.code for problem in plan.problems] == ["zeros"]
    with pytest.warns(ConfigMatchWarning, match="zeroes parts of a palette's vectors"):
        _apply("ps", _model(torch.float32), _GRIDS["int4"], _PALETTES["pairs"], 0.5)
    plan, _ = _apply("sq", _model(torch.float32), _GRIDS["int4"], _PALETTES["4 bits"], 0.5)
    assert not plan.problems


@pytest.mark.parametrize(
    "spec",
    [
        PruningSpec(pruning_scheme={"type": "channel_structured", "axis": 1}),
        PruningSpec(target_sparsity=0.4, pruning_scheme={"type": "block_structured", "axis": 0, "block_size": 3}),
        PruningSpec(target_sparsity=0.29, scope="row"),
        PruningSpec(pruning_scheme={"type": "n_m_structured", "n": 2, "m": 7}),
        PruningSpec(target_sparsity=0.58),
    ],
    ids=lambda spec: spec.describe(),
)
def test_units_that_the_target_does_not_divide(spec: PruningSpec) -> None:
    """Whole channels, blocks or entries of a row go, so fewer entries than the share of the weight."""
    torch.manual_seed(0)
    masks = ModuleMagnitudePrunerConfig(op_state_spec={"weight": spec})
    tool = MagnitudePruner(nn.Linear(7, 15), MagnitudePrunerConfig(global_config=masks))
    x = (torch.zeros(2, 7),)
    (row,) = (row for row in tool.plan(x) if row.spec)
    assert row.compressed_bytes == Artifact.from_model(tool.prepare(x))["weight"].nbytes
