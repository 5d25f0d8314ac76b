"""Weights whose numbers cannot be read as they are stored: sparse ones, and those of a byte a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.errors import ConfigMatchWarning
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.planning import Severity
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.lambda_module import Lambda

X = torch.randn(3, 8)
COMPRESSORS: dict[str, Callable[[nn.Module], Any]] = {
    "quantizer, eager": lambda model: Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")),
    "quantizer, graph": lambda model: Quantizer(model, QuantizerConfig.presets.w8(execution_mode="graph")),
    "palettizer": lambda model: KMeansPalettizer(model, KMeansPalettizerConfig()),
    "pruner": lambda model: MagnitudePruner(model, MagnitudePrunerConfig()),
}


def stored(weight: torch.Tensor) -> nn.Module:
    """A linear layer of a weight that is stored in some way, followed by one of an ordinary weight."""
    model = Lambda(lambda s, x: s.last(F.linear(x, s.weight.to(x.dtype))), last=nn.Linear(8, 4))
    model.weight = nn.Parameter(weight, requires_grad=False)
    return model.eval()


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_a_byte_a_number_are_left_alone(dtype: torch.dtype, compressor: str) -> None:
    """They are small already; the plan says so, and the other weights are compressed."""
    model = stored(torch.randn(8, 8).to(dtype))
    made = COMPRESSORS[compressor](model)
    plan = made.plan((X,))
    (problem,) = plan.problems
    assert (problem.code, problem.where, problem.severity) == ("float8-weight", "weight", Severity.WARNING)
    assert str(dtype) in problem.message
    assert "bfloat16" in problem.message
    assert [placement.state.name for placement in plan.placements] == ["last.weight"]
    with pytest.warns(ConfigMatchWarning, match="float8-weight"):
        prepared = made.prepare((X,))
    assert prepared.weight.dtype is dtype
    assert prepared(X).shape == (3, 4)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_weights_are_refused(layout: torch.layout, compressor: str) -> None:
    """The plan names them and says how to go on."""
    plan = COMPRESSORS[compressor](stored(torch.eye(8).to_sparse(layout=layout))).plan((X,))
    (problem,) = plan.problems
    assert (problem.code, problem.where, problem.severity) == ("sparse-layout", "weight", Severity.ERROR)
    assert ".to_dense()" in problem.message
