"""The plan says what prepare will do, why, how many bytes it takes, and what is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from bitwright.errors import ConfigMatchWarning, PlanError
from bitwright.planning import Severity
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity


def make_plan(model, config, *inputs):
    return Quantizer(model, config.set_execution_mode("eager")).plan(inputs)


def test_each_row_names_the_rule_that_decided():
    """Name beats type beats global, and the row tells which key it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 1))
    config = QuantizerConfig.presets.w8()
    config.set_module_type(nn.Linear, ModuleQuantizerConfig.presets.w4())
    config.set_module_name("1", None)
    plan = make_plan(model, config, torch.randn(4, 4))
    rows = {row.tensor: row for row in plan}
    assert rows["0.weight"].rule == "module_type_configs['torch.nn.modules.linear.Linear'].op_state_spec['weight']"
    assert rows["0.weight"].spec.dtype == torch.int4
    assert rows["1.weight"].rule == "module_name_configs['1'].op_state_spec['*']"
    assert rows["1.weight"].spec is None
    assert rows["2.weight"].rule == "global_config.op_state_spec['weight']"


def test_axis_and_blocks_are_resolved():
    """Transposed convolutions have their channels on axis 1, blocks run along the input."""
    model = nn.Sequential(nn.ConvTranspose1d(8, 4, 3), nn.Conv1d(4, 6, 1))
    per_channel = {r.tensor: r for r in make_plan(model, QuantizerConfig.presets.w8(), torch.randn(1, 8, 5))}
    assert per_channel["0.weight"].spec.granularity == PerChannelGranularity(axis=1)
    assert per_channel["0.weight"].block_size == (8, 1, 3)
    assert per_channel["1.weight"].block_size == (1, 4, 1)
    config = QuantizerConfig.presets.w4_per_block(block_size=2)
    per_block = {r.tensor: r for r in make_plan(model, config, torch.randn(1, 8, 5))}
    assert per_block["0.weight"].spec.granularity == PerBlockGranularity(axis=0, block_size=2)
    assert per_block["0.weight"].block_size == (2, 1, 3)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (QuantizationSpec(dtype="int4"), 64 * 32 * 4 // 8 + 4),
        (QuantizationSpec(dtype="int3", granularity=PerChannelGranularity(axis=0)), 64 * 32 * 3 // 8 + 64 * 4),
        (QuantizationSpec(dtype="uint8", qscheme="asymmetric"), 64 * 32 + 4 + 1),
        (QuantizationSpec(dtype="int8", qformulation="minval"), 64 * 32 + 4 + 4),
        (
            QuantizationSpec(dtype="float4_e2m1fn", granularity=PerBlockGranularity(axis=1, block_size=32)),
            64 * 32 // 2 + 64,
        ),
    ],
)
def test_bytes_are_codes_scales_and_offsets(spec, expected):
    """The prediction is a sum that one can do by hand."""
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
    )
    (row,) = make_plan(nn.Linear(32, 64, bias=False), config, torch.randn(1, 32))
    assert row.dense_bytes == 64 * 32 * 4
    assert row.compressed_bytes == expected


def test_all_errors_come_together():
    """An unresolved axis, an axis out of range and a conflict are one error that lists the three."""

    class Conflict(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.wide = nn.Linear(4, 4)
            self.weight = nn.Parameter(torch.randn(4, 4, 1))

        def forward(self, x):
            y = nn.functional.conv1d(self.wide(self.fc(x))[None].mT, self.weight)
            return nn.functional.conv_transpose1d(y, self.weight)

    config = QuantizerConfig.presets.w8(execution_mode="eager")
    config.set_module_name("fc", ModuleQuantizerConfig.presets.w8(axis=2))
    config.set_module_name(
        "wide", ModuleQuantizerConfig(op_input_spec={0: QuantizationSpec(granularity={"type": "per_channel"})})
    )
    with pytest.raises(PlanError) as caught:
        Quantizer(Conflict(), config).prepare((torch.randn(2, 4),))
    assert {problem.code for problem in caught.value.problems} == {"axis-range", "axis-unresolved", "axis-conflict"}
    assert all(problem.severity == Severity.ERROR for problem in caught.value.problems)
    for where in ("fc.weight", "wide.linear[input]", "weight"):
        assert where in str(caught.value)


def test_bad_entries_of_a_weight_are_named():
    """NaN in a weight would spoil its scale."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[2, 3] = float("nan")
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager"))
    with pytest.warns(ConfigMatchWarning, match=r"1\.weight: 1 of 16 entries are NaN"):
        quantizer.prepare((torch.randn(1, 4),))


def test_plan_prints_and_serialises():
    """The table holds each tensor; the JSON form is plain data."""
    plan = make_plan(nn.Linear(8, 4), QuantizerConfig(), torch.randn(1, 8))
    text = str(plan)
    assert "int8 symmetric per_channel(0)" in text
    assert "weights: 128 -> 48 bytes (37.5%)" in text
    assert [row["tensor"] for row in json.loads(plan.to_json())["rows"]] == [
        "weight",
        "linear[input]",
        "linear[output 0]",
    ]


def test_planning_changes_nothing():
    """plan() can be asked for as often as one likes."""
    model = nn.Linear(8, 4)
    before = set(vars(model))
    make_plan(model, QuantizerConfig(), torch.randn(1, 8))
    assert set(vars(model)) == before
    assert type(model) is nn.Linear
