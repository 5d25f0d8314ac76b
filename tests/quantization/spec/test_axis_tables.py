"""Default weight axes looked up by module class."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization._axis_defaults import (
    _PER_BLOCK_WEIGHT_AXIS_DEFAULTS,
    _PER_CHANNEL_WEIGHT_AXIS_DEFAULTS,
    _apply_defaults,
)
from bitwright.quantization._eager.quantizer import EagerQuantizer
from bitwright.quantization._graph.quantizer import GraphQuantizer
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity, PerTensorGranularity

MODULES = [
    (nn.Linear(4, 6), torch.randn(2, 4)),
    (nn.Embedding(6, 4), torch.tensor([1, 3])),
    (nn.Conv1d(4, 6, 2), torch.randn(1, 4, 5)),
    (nn.ConvTranspose2d(4, 6, 2), torch.randn(1, 4, 5, 5)),
]


class Box(SimpleNamespace):
    """Something with a granularity that can be a key."""

    __hash__ = object.__hash__


@pytest.mark.parametrize(("module", "x"), MODULES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("blocks", [False, True])
def test_the_tables_agree_with_what_prepare_does(module, x, blocks):
    """The axis of the prepared weight is the one of the table."""
    granularity = PerBlockGranularity(block_size=2) if blocks else PerChannelGranularity(axis=None)
    entry = ModuleQuantizerConfig(
        op_state_spec={"weight": QuantizationSpec(granularity=granularity)}, op_input_spec=None, op_output_spec=None
    )
    config = QuantizerConfig(global_config=entry, execution_mode="eager")
    kind = type(module)
    prepared = Quantizer(nn.Sequential(copy.deepcopy(module)), config).prepare((x,))
    table = _PER_BLOCK_WEIGHT_AXIS_DEFAULTS if blocks else _PER_CHANNEL_WEIGHT_AXIS_DEFAULTS
    assert prepared[0].parametrizations.weight[0].granularity.axis == table[kind]


def test_axes_are_filled_in_by_consumers():
    """Modules that have a default decide; explicit axes and other granularities stay."""
    channel, block = (
        Box(granularity=PerChannelGranularity(axis=None)),
        Box(granularity=PerBlockGranularity(block_size=2)),
    )
    fixed, tensor = Box(granularity=PerChannelGranularity(axis=1)), Box(granularity=PerTensorGranularity())
    _apply_defaults(
        {
            channel: [(None, "a"), (nn.ConvTranspose1d, "b")],
            block: [(nn.Linear, "c")],
            fixed: [(nn.Linear, "d")],
            tensor: [(None, "e")],
        }
    )
    assert [box.granularity.axis for box in (channel, block, fixed)] == [1, 1, 1]
    assert tensor.granularity == PerTensorGranularity()


def test_axes_that_cannot_be_filled_in():
    """Consumers that disagree, and weights without a consumer that has a default, are errors that name them."""
    with pytest.raises(ValueError, match=r"Conflicting default axes.*'p': 0, 'q': 1"):
        _apply_defaults({Box(granularity=PerChannelGranularity()): [(nn.Linear, "p"), (nn.ConvTranspose3d, "q")]})
    with pytest.raises(ValueError, match=r"unresolved axis=None remain: \[\['r', 's'\]\]"):
        _apply_defaults({Box(granularity=PerChannelGranularity()): [(None, "r"), (nn.ReLU, "s")]})


def test_quantizers_of_one_mode():
    """They are the quantizer under other names; the names of a graph's quantized ops can be listed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    prepared = GraphQuantizer(model, QuantizerConfig()).prepare((torch.randn(2, 4),))
    assert GraphQuantizer.get_compressible_op_names(prepared) == ["linear", "relu", "linear_1"]
    eager = EagerQuantizer(model, QuantizerConfig(execution_mode="eager"))
    assert eager.prepare((torch.randn(2, 4),)) is model
