"""Averages of codes in exported programs: additions in PyTorch's order, so that ties are rounded alike."""

from __future__ import annotations

import platform

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.export.averages import average_in_order
from bitwright.export.targets import TARGETS
from tests.measures import sqnr

from .models import BYTES, ENDING_IN_AVERAGES, W8, prepared

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="sums in lanes of other widths")


class Averages(nn.Module):
    """Means of parts of one rounded tensor, and one of a tensor that was not rounded."""

    def forward(self, x):
        rounded = torch.relu(torch.round(x * 50) / 3.0 * 0.037)
        over_rows = [rounded[:, : 3 * n].unflatten(1, (3, n)).mean(-1) for n in (2, 5, 8, 49, 100, 300)]
        over_columns = [rounded[:, : n * m].unflatten(1, (n, m)).mean(1) for n, m in ((17, 6), (16, 32), (49, 40))]
        images = rounded[:, :144].unflatten(1, (4, 6, 6))
        pools = F.adaptive_avg_pool2d(images, 1), F.adaptive_avg_pool1d(images.flatten(2), 1), images.mean((1, 2), True)
        turned, last = images.permute(0, 3, 1, 2), images.to(memory_format=torch.channels_last)
        pools += turned.mean(1), turned.mean((-1, -2)), turned.flatten(2).mean(2, True), last.mean((2, 3)), last.mean(1)
        return (*over_rows, *over_columns, *pools, F.adaptive_avg_pool2d(images, 2), x.mean(-1))


def _means(program):
    return [node for node in program.graph.nodes if "mean" in str(node.target) or "pool" in str(node.target)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_programs_compute_the_same_bits(dynamic):
    """PyTorch's own means are the truth; nothing is quantized behind them, so every bit is seen."""
    torch.manual_seed(0)
    x, model = torch.randn(3, 2000), Averages()
    shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    average_in_order(program)
    assert len(_means(program)) == 2
    for ready in (program, program.run_decompositions()):
        for inputs in (x, torch.randn(5, 2000)) if dynamic else (x,):
            for number, (expected, found) in enumerate(zip(model(inputs), ready.module()(inputs), strict=True)):
                assert torch.equal(expected, found), number


@pytest.mark.parametrize("name", ["coreai", pytest.param("aot-inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("case", list(ENDING_IN_AVERAGES))
def test_networks_that_end_in_averages_have_the_same_codes(case, name, mode, tmp_path):
    """Input and output of a pool have one scale, so one of 16 averages lies between two codes."""
    target = TARGETS[name]
    if target.missing() is not None:
        pytest.skip(target.missing())
    torch.manual_seed(0)
    model, sizes, memory_format = ENDING_IN_AVERAGES[case]
    x = torch.randn(sizes).to(memory_format=memory_format)
    _, ready = prepared(model().eval(), x, W8, BYTES, mode)
    path = target.write(ready, (x,), tmp_path / f"model{target.suffix}", {}, None)
    assert sqnr(ready(x), target.run(path, (x,))[0]) > 100
