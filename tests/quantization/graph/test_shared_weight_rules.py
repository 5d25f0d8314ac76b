"""Who decides about a weight that several calls of a graph read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.config.spec import CompressionTargetTensor
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.config import OpQuantizerConfig
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase


class Twice(nn.Module):
    """One weight, read by two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        return F.linear(F.linear(x, self.weight), self.weight)


def only_weight(dtype):
    return {
        "op_state_spec": None if dtype is None else {"weight": QuantizationSpec(dtype=dtype)},
        "op_input_spec": None,
        "op_output_spec": None,
    }


@pytest.mark.parametrize("name", ["linear", "linear_1"])
@pytest.mark.parametrize(("dtype", "expected"), [(None, []), ("int4", [torch.int4])])
def test_a_rule_that_names_one_call_beats_the_default_of_the_other(name, dtype, expected):
    """The first call as well as the last one, to leave the weight alone as well as to quantize it otherwise."""
    named = None if dtype is None else OpQuantizerConfig(**only_weight(dtype))
    entry = ModuleQuantizerConfig(**only_weight("int8"), op_name_config={name: named})
    prepared = Quantizer(Twice(), QuantizerConfig(global_config=entry)).prepare((torch.randn(2, 5),))
    found = [
        module.dtype
        for module in prepared.modules()
        if isinstance(module, FakeQuantizeImplBase) and module.quantization_target == CompressionTargetTensor.WEIGHT
    ]
    assert found == expected


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("strong", ["first", "second"])
@pytest.mark.parametrize(("states", "expected"), [({"bias": QuantizationSpec(dtype="int8")}, 1), ({}, 1), (None, 0)])
def test_a_stronger_owner_that_does_not_name_a_tied_weight_leaves_it_to_the_others(mode, strong, states, expected):
    """No key is no opinion, None is one."""
    weak = "second" if strong == "first" else "first"
    rules = {
        weak: ModuleQuantizerConfig(**only_weight("int4")),
        strong: ModuleQuantizerConfig(**(only_weight(None) | {"op_state_spec": states})),
    }
    config = QuantizerConfig(global_config=None, module_name_configs=rules, execution_mode=mode)
    prepared = Quantizer(Tied(), config).prepare((torch.randn(2, 5),))
    found = [module.dtype for module in prepared.modules() if isinstance(module, FakeQuantizeImplBase)]
    assert found == [torch.int4] * expected
