"""Operators that coreai-torch translates wrongly for some arguments, or not at all: right in the runtime."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("coreai_torch")

from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.export.operators import check_operators
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

ROWS = torch.arange(20.0).view(5, 4)


def _put(x, place, values, *, accumulate=False):
    place = place if isinstance(place, tuple) else (place,)
    return x.index_put(place, torch.as_tensor(values), accumulate=accumulate)


def _set(x, place, values):
    x = x.clone()
    x[place] = values
    return x


ALL = slice(None)
WRITES = {
    "a row for all places": lambda x, i: _put(x, (torch.tensor([0, 1]), torch.tensor([1, 2])), ROWS[0]),
    "a number": lambda x, i: _set(x, (torch.tensor([0, 1]), torch.tensor([1, 2])), 1.0),
    "one place, a row": lambda x, i: _set(x, torch.tensor([1]), ROWS[1]),
    "one place, all rows": lambda x, i: _set(x, torch.tensor([1]), ROWS[None]),
    "second dimension, a number": lambda x, i: _set(x, (ALL, i[0]), 0.5),
    "second dimension, a matrix of places": lambda x, i: _set(x, (ALL, i), ROWS[0]),
    "last dimension": lambda x, i: _set(x, (ALL, ALL, torch.tensor([0, 2])), torch.arange(10.0).view(2, 5, 1)),
    "two dimensions behind another": lambda x, i: _set(x, (ALL, i[1], torch.tensor([0, 1, 2, 3, 0])), ROWS.T[:2, :5]),
    "two dimensions around another": lambda x, i: _set(x, (i[0, :2], ALL, torch.tensor([0, 3])), ROWS.T[:2]),
    "from the end": lambda x, i: _set(x, (ALL, torch.tensor([-1, -2])), ROWS[1]),
    "added": lambda x, i: _put(x, i[0].clamp(max=1), ROWS.expand(5, 5, 4), accumulate=True),
    "added by index_add": lambda x, i: x.index_add(1, i[1], ROWS.expand(2, 5, 4)),
    "added by scatter_add": lambda x, i: x.scatter_add(1, i[..., None].expand(2, 5, 4), ROWS.expand(2, 5, 4)),
    "where something holds": lambda x, i: _set(x, x > 0, 0.5),
    "rows of a mask, a row": lambda x, i: _set(x, i > 0, ROWS[2]),
    "rows of a mask, a row of one": lambda x, i: _set(x, i > 0, ROWS[2:3]),
    "rows of a mask, each its own": lambda x, i: _set(x, i > 0, ROWS),
    "rows of a mask, added": lambda x, i: _put(x, i > 0, ROWS[3], accumulate=True),
    "rows of a mask, each its own added": lambda x, i: _put(x, i > 0, ROWS, accumulate=True),
    "an empty mask": lambda x, i: _set(x, i > 9, ROWS[2]),
    "second dimension of a mask, a row": lambda x, i: _set(x, (ALL, i[0] > 0), ROWS[2]),
    "second dimension of a mask, rows": lambda x, i: _set(x, (ALL, i[0] > 0), ROWS[:3]),
    "second dimension of a mask, each its own": lambda x, i: _set(x, (ALL, i[0] > 0), torch.arange(24.0).view(2, 3, 4)),
}
READS = {
    "a fixed mask": lambda x, i: x[:, torch.tensor([True, False, True, False, False])],
    "a mask of rows": lambda x, i: x[i > 0].sum(0),
    "a mask of the second dimension": lambda x, i: x[:, i[0] > 0].sum(1),
    "along a dimension": lambda x, i: torch.take_along_dim(x, i[..., None], 1),
}
ARITHMETIC = {
    "added with a factor": lambda x, i: torch.add(x, x.flip(1), alpha=-3.125),
    "subtracted with a factor": lambda x, i: torch.sub(x, x.flip(1), alpha=2),
    "a number added with a factor": lambda x, i: torch.add(x, 3, alpha=0.5),
    "a remainder": lambda x, i: torch.remainder(x, 0.75),
    "a product with a vector": lambda x, i: torch.addmv(x[0, :, 0], x[0], x[1, 0], beta=0.5, alpha=2),
}
CASES = WRITES | READS | ARITHMETIC


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x, places):
        return self.function(self.layer(x), places) * 2


@pytest.mark.parametrize("name", CASES)
def test_right_in_the_runtime(name, tmp_path):
    torch.manual_seed(0)
    example = torch.randn(2, 5, 4), torch.tensor([[0, 1, 0, 3, 4], [4, 0, 0, 0, 2]])
    model = Model(CASES[name]).eval()
    assert not check_operators(model, "coreai", example)
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare(example).eval()
    with torch.no_grad():
        expected = ready(*example)
    (actual,) = run_coreai(export_coreai(ready, example, tmp_path / "model.aimodel"), example)
    assert actual.shape == expected.shape
    assert sqnr(expected, actual) > 110
