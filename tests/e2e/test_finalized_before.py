"""Models that were finalized for Core AI and are compressed again: activations can be, weights cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.errors import PlanError
from bitwright.palettization import KMeansPalettizer
from bitwright.pruning import MagnitudePruner
from bitwright.quantization import Quantizer, QuantizerConfig

pytest.importorskip("coreai_torch")

MODES = ["eager", "graph"]
INPUTS = (torch.randn(4, 32),)


def finalized(kind: str, mode: str) -> nn.Module:
    """Two linear layers whose weights are finalized."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    if mode == "graph":
        model = torch.export.export(model, INPUTS).module()
    made: dict[str, Callable[[nn.Module], Any]] = {
        "palette": KMeansPalettizer,
        "masks": MagnitudePruner,
        "integers": lambda model: Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode)),
    }
    compressor = made[kind](model)
    compressor.prepare(INPUTS)
    result: nn.Module = compressor.finalize()
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["palette", "masks", "integers"])
def test_quantizing_tells_that_the_weights_stay(kind: str, mode: str) -> None:
    """One problem for all of them, none where the configuration leaves weights out."""
    model = finalized(kind, mode)
    (problem,) = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode)).plan(INPUTS).problems
    assert problem.code == "finalized-weight"
    assert "2 op(s)" in problem.message
    assert "before finalize" in problem.message
    off = QuantizerConfig(execution_mode=mode, global_config={"op_state_spec": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Quantizer(model, off).plan(INPUTS).problems


@pytest.mark.parametrize("compressor", [KMeansPalettizer, MagnitudePruner])
def test_other_weights_of_a_finalized_graph_are_refused(compressor: type[Any]) -> None:
    """The graph has lost the names of its weights; the ops that read them have theirs."""
    with pytest.raises(PlanError, match=r"\[order\] linear_1\.weight.*finalized"):
        compressor(finalized("integers", "graph")).prepare(INPUTS)
