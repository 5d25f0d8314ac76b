"""Ranges that are known from formulas, where the configuration says nothing or something else about an op's result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import QuantizationScheme
from tests.lambda_module import Lambda


def scheme_read(between: Callable[[torch.Tensor], torch.Tensor], producer: dict[str, str] | None) -> QuantizationScheme:
    """The scheme with which a linear layer that asks for a symmetric one reads what is between it and another."""
    output = {} if producer is None else {"*": producer}
    first, second = ModuleQuantizerConfig(op_output_spec=output), ModuleQuantizerConfig()
    config = QuantizerConfig(module_name_configs={"m": second, "l": first})
    model = Lambda(lambda s, x: s.m(between(s.l(x))), l=nn.Linear(4, 4), m=nn.Linear(4, 4))
    plan = Quantizer(model.eval(), config).plan((torch.randn(2, 4),))
    sites = ("linear[output", "relu[output", "linear_1[input")
    row = [row for row in plan if row.tensor.startswith(sites)][-1]
    assert isinstance(row.spec, QuantizationSpec)
    return row.spec.qscheme


@pytest.mark.parametrize("producer", [None, {"qscheme": "symmetric"}])
def test_a_formula_counts_without_a_spec_for_the_result(producer: dict[str, str] | None) -> None:
    """What comes out of a ReLU has no negative numbers, whether or not its own output has a spec."""
    assert scheme_read(F.relu, producer) is QuantizationScheme.ASYMMETRIC


def test_a_view_hands_on_formulas_and_no_wishes() -> None:
    """A reader behind a view keeps its own scheme, also where a stronger part asks for another in front of it."""
    view = {"qscheme": "asymmetric"}
    assert scheme_read(lambda x: x.unsqueeze(0), view) is QuantizationScheme.SYMMETRIC
    assert scheme_read(lambda x: x, view) is QuantizationScheme.ASYMMETRIC
