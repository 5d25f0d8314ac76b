"""Ranges that are known from formulas, where the configuration says nothing or something else about an op's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class TestDropout:
    """Dropout hands on what it keeps, in training scaled up."""

    @pytest.mark.parametrize("captured_in_training", [True, False])
    @pytest.mark.parametrize(("function", "high"), [(torch.sigmoid, 1.0), (F.relu6, 6.0), (torch.tanh, 1.0)])
    def test_what_dropout_scales_up_is_not_cut_off(
        self, function: Callable[[torch.Tensor], torch.Tensor], high: float, captured_in_training: bool
    ) -> None:
        """With half of the numbers dropped the others double, where no op behind has a spec either."""
        model = Lambda(lambda s, x: s.d(function(s.l(x))), l=nn.Linear(8, 8), d=nn.Dropout(0.5))
        x = 30 * torch.randn(16, 8)
        quantizer = Quantizer(model.train(captured_in_training), QuantizerConfig(execution_mode="graph"))
        prepared: Any = quantizer.prepare((x,))
        with quantizer.training_mode():
            assert prepared(x).max().item() == pytest.approx(2 * high, rel=0.02)

    def test_zero_stays_the_low_end(self) -> None:
        """Scaling does not move it, so that no number is spent on what is below."""
        model = Lambda(lambda s, x: s.d(torch.sigmoid(s.l(x))), l=nn.Linear(8, 8), d=nn.Dropout(0.5))
        plan = Quantizer(model.eval(), QuantizerConfig(execution_mode="graph")).plan((torch.randn(2, 8),))
        (spec,) = (row.spec for row in plan if row.tensor.startswith("sigmoid[output"))
        assert tuple(spec.float_range) == (0.0, None)
        assert spec.qscheme is QuantizationScheme.ASYMMETRIC


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers_hold_no_masks(layout: torch.layout, mode: str) -> None:
    """Graph networks multiply by a sparse matrix of neighbours; it is read by no reduction, and stays what it is."""
    model = Lambda(lambda s, x: torch.sparse.mm(s.adjacency, s.l(x)), l=nn.Linear(8, 8))
    model.register_buffer("adjacency", torch.eye(16).to_sparse(layout=layout))
    x = torch.randn(16, 8)
    quantizer = Quantizer(model.eval(), QuantizerConfig(execution_mode=mode))
    expected = model(x)
    prepared: Any = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    assert torch.allclose(prepared(x), expected, atol=0.05)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_masks_of_a_byte_a_number_are_masks(mode: str) -> None:
    """No minimum is defined for float8; one scale for scores with its lowest number would round them to zero."""
    dtype = torch.float8_e5m2
    model = Lambda(lambda s, x: torch.softmax(s.l(x) + s.mask.to(x.dtype), -1), l=nn.Linear(8, 8))
    model.register_buffer("mask", torch.tensor([0.0, -57344.0] * 4).to(dtype))
    x = torch.randn(16, 8)
    quantizer = Quantizer(model.eval(), QuantizerConfig(execution_mode=mode))
    expected = model(x)
    prepared: Any = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    assert torch.allclose(prepared(x), expected, atol=0.02)
