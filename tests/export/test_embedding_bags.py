"""Embedding bags, which torch.onnx writes as loops that ONNX Runtime refuses now and then, and which others lack."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from bitwright.export.operators import check_operators
from bitwright.export.targets import TARGETS
from bitwright.quantization import Quantizer, QuantizerConfig

FORMS = ("bags of one length", "offsets", "factors", "offsets and factors")
CASES = [
    case
    for case in itertools.product(("sum", "mean", "max"), FORMS, (None, 3), (False, True))
    if (case[0] == "sum" or "factors" not in case[1]) and (not case[3] or "offsets" in case[1])
]


class Bags(nn.Module):
    """Bags, and a layer that reads them."""

    def __init__(self, how, padding_idx, last):
        super().__init__()
        self.bags = nn.EmbeddingBag(12, 32, mode=how, padding_idx=padding_idx, include_last_offset=last)
        self.layer = nn.Linear(32, 4)

    def forward(self, indices, offsets=None, factors=None):
        rows = self.bags(indices, offsets, factors)
        return self.layer(rows), rows


def _inputs(form, last):
    indices = torch.randint(0, 12, (4, 3))
    if "offsets" not in form:
        return (indices, None, torch.rand(4, 3)) if "factors" in form else (indices,)
    offsets = torch.tensor([0, 2, 2, 5, 12] if last else [0, 2, 2, 5, 12, 12])  # two of them are empty
    flat = indices.flatten()
    return (flat.int(), offsets.int(), torch.rand(12)) if "factors" in form else (flat, offsets)


FEW = [case for case in CASES if case[2:] in ((3, False), (None, True)) and case[1] != "offsets and factors"]
PLAIN = [case for case in CASES if case[0] == "sum" and case[2:] == (None, False)]
QUICK = [*FEW, *PLAIN, ("sum", "offsets and factors", 3, True)]


@pytest.mark.parametrize(
    ("target", "how", "form", "padding_idx", "last"),
    [
        *(pytest.param("onnx", *case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES),
        *((target, *case) for target in ("coreai", "executorch") for case in FEW),
    ],
)
def test_embedding_bags(target, how, form, padding_idx, last, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    torch.manual_seed(0)
    model, inputs = Bags(how, padding_idx, last).eval(), _inputs(form, last)
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare(inputs)
    path = TARGETS[target].write(ready, inputs, tmp_path / f"m{TARGETS[target].suffix}", {}, None)
    found = TARGETS[target].run(path, tuple(one for one in inputs if one is not None))
    for expected, output in zip(ready(*inputs), found, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


class LastLeftOut(nn.Module):
    """Counts the index that does not count from the end, as ``torch.embedding_bag`` lets one do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8))

    def forward(self, indices, offsets):
        return torch.embedding_bag(self.weight, indices, offsets, False, 1, False, None, False, -1)[0]


@pytest.mark.parametrize("target", ["onnx", "coreai", "executorch"])
def test_indices_that_count_from_the_end_are_left_out(target, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    torch.manual_seed(0)
    model, inputs = LastLeftOut().eval(), (torch.tensor([3, 11, 11, 2]), torch.tensor([0, 2]))
    path = TARGETS[target].write(model, inputs, tmp_path / f"m{TARGETS[target].suffix}", {}, None)
    torch.testing.assert_close(TARGETS[target].run(path, inputs)[0], model.weight[[3, 2]].detach())


@pytest.mark.parametrize("target", ["onnx", "coreai"])
def test_bags_of_several_numbers(target, tmp_path):
    """With dynamic shapes as many bags and indices as one likes."""
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    torch.manual_seed(0)
    model, inputs = Bags("mean", None, False).eval(), _inputs("offsets", False)
    free = {0: torch.export.Dim.DYNAMIC}
    assert not check_operators(model, target, inputs, dynamic_shapes=(free, free))
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare(inputs)
    path = TARGETS[target].write(ready, inputs, tmp_path / f"m{TARGETS[target].suffix}", {}, (free, free))
    others = torch.randint(0, 12, (20,)), torch.tensor([0, 4, 17])
    for expected, output in zip(ready(*others), TARGETS[target].run(path, others), strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
