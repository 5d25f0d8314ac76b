"""Core AI models of batch norms without parameters, or without statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("coreai_torch")

from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.export.operators import check_operators
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

SIZES = {1: (4, 6, 9), 2: (2, 6, 5, 7), 3: (2, 6, 4, 5, 3)}
ENOUGH = {torch.float32: 110, torch.float16: 50, torch.bfloat16: 35}


def _network(dims):
    """A norm of each kind, the first of them right behind a layer."""
    layer, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
    return nn.Sequential(
        layer(6, 6, 1),
        norm(6, affine=False),
        nn.ReLU(),
        norm(6, affine=False),
        nn.Tanh(),
        norm(6, track_running_stats=False),
        nn.Tanh(),
        norm(6, affine=False, track_running_stats=False),
        layer(6, 4, 1),
    )


class Partial(nn.Module):
    """A batch norm with a weight alone, and one with a bias alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(6, 6, 1)
        self.parameter = nn.Parameter(torch.rand(6) + 0.5)
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("variance", torch.rand(6) + 0.5)

    def forward(self, x):
        for name in ("weight", "bias"):
            x = nn.functional.batch_norm(self.layer(x), self.mean, self.variance, **{name: self.parameter})
        return x


def _check(model, x, mode, path):
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    model = model.eval().to(x.dtype)
    assert not check_operators(model, "coreai", (x,))
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode)).prepare((x,)).eval()
    with torch.no_grad():
        expected = ready(x)
    (found,) = run_coreai(export_coreai(ready, (x,), path), (x,))
    assert found.dtype == x.dtype
    assert sqnr(expected.float(), found.float()) > ENOUGH[x.dtype]


@pytest.mark.parametrize("dtype", ENOUGH)
@pytest.mark.parametrize(("dims", "mode"), [(1, "eager"), (2, "eager"), (2, "graph"), (3, "graph")])
def test_batch_norms(dims, mode, dtype, tmp_path):
    """The plan has nothing to say, and the runtime computes what the model does."""
    torch.manual_seed(0)
    _check(_network(dims), torch.randn(SIZES[dims]).to(dtype), mode, tmp_path / "m.aimodel")


def test_batch_norms_of_rows(tmp_path):
    """Inputs without a dimension behind the channels."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(6, affine=False, track_running_stats=statistics) for statistics in (True, False)]
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), *norms, nn.Linear(6, 4))
    _check(model, torch.randn(5, 8), "eager", tmp_path / "m.aimodel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_of_the_parameters(dtype, tmp_path):
    """What is missing is filled in, what is there is used."""
    torch.manual_seed(0)
    _check(Partial(), torch.randn(SIZES[2]).to(dtype), "eager", tmp_path / "m.aimodel")
