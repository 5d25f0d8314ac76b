"""Positions whose digits decide: what they are cast to, compared with, divided by and looked up in stays float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bitwright.casting import cast_fp32_to_fp16
from tests.matrix import each_value

from .programs import check_metadata, dtype, export, find, node_dtypes, run, sqnr

ATEN = torch.ops.aten
POSITIONS = torch.tensor([2501, 4999, 4997, 5001])
ONES = torch.ones(1, 5000, dtype=torch.int64)


class Wrapped(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("edges", torch.tensor([2499.0, 2501.0, 4997.0, 4999.0]))
        self.register_buffer("causal", torch.full((4, 4), torch.finfo(torch.float32).min).triu(1))
        self.fc = nn.Linear(4, 4)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, *inputs)


def _relative_bucket(self: Wrapped, i: torch.Tensor) -> torch.Tensor:
    """The logarithmic buckets of T5, which leave no room for rounding when there are many."""
    scaled = torch.log((i[:, None] - i[None]).abs().clamp(min=1).float() / 8) / math.log(16) * 1000
    return scaled.to(torch.long)


EXACT = {
    "count": (lambda self, m: (m.float().cumsum(1) * m).long() + 1, ONES),
    "count-from-zero": (lambda self, m: m.float().cumsum(1).long() - 1, ONES),
    "count-of-a-mask": (lambda self, m: m.float().cumsum(1).long(), ONES.bool()),
    "sum-of-a-mask": (lambda self, m: m.float().sum(1) == 5001.0, ONES.bool()),
    "bucket": (_relative_bucket, POSITIONS),
    "less-than-a-length": (
        lambda self, i: torch.arange(5000, dtype=torch.float32)[None] < i.float()[:, None],
        POSITIONS,
    ),
    "equal": (lambda self, i: i.float() == 4999.0, POSITIONS),
    "integers-with-floats": (lambda self, i: self.edges < i, POSITIONS),
    "remainder": (lambda self, i: i.float() % 7, POSITIONS),
    "fmod": (lambda self, i: torch.fmod(i.float(), 7.0), POSITIONS),
    "divide": (lambda self, i: torch.div(i.float(), 8.0, rounding_mode="floor").long(), POSITIONS),
    "divided-place": (lambda self, i: torch.div(i.float(), 8.0, rounding_mode="trunc") == i // 8, POSITIONS),
    "searchsorted": (lambda self, i: torch.searchsorted(torch.arange(5000).float(), i.float()), POSITIONS),
    "bucketize": (lambda self, i: torch.bucketize(i.float(), self.edges), POSITIONS),
    "argmax": (lambda self, m: (m.float() * torch.arange(5000)).argmax(1), ONES),
}


@pytest.mark.parametrize(("name", "target"), each_value(list(EXACT), [torch.float16, torch.bfloat16]))
def test_decisions_about_positions_are_exact(name: str, target: torch.dtype) -> None:
    """Every one of them lands on a neighbour when positions pass through 16 bits."""
    function, given = EXACT[name]
    program = export(Wrapped(function), given)
    expected = run(program, given)[0]
    cast_fp32_to_fp16(program, dtype=target)
    check_metadata(program, given)
    assert torch.equal(run(program, given)[0].to(expected.dtype), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x, i: torch.where(x > 0, x, x * 0.5),
        lambda self, x, i: torch.where(self.fc(x * i) > 0, 1.0, 0.5) * x,
        lambda self, x, i: (self.edges[i % 4] > 0.5) * x,
        lambda self, x, i: (x.gather(1, i) > 0.5) * x,
        lambda self, x, i: (x * i % 1.5) + x,
        lambda self, x, i: (x.softmax(-1) * i).argmax(-1, keepdim=True) * x,
        lambda self, x, i: (i.to(torch.uint8).float() @ torch.eye(4) > 0.5) * x,
    ],
    ids=["activation", "layer", "table", "gather", "remainder", "argmax", "bytes"],
)
def test_decisions_about_activations_are_cast(function: Callable[..., torch.Tensor]) -> None:
    """Integers choose or scale them; that makes no positions of them."""
    x, i = torch.rand(4, 4), torch.arange(4).repeat(4, 1)
    program = cast_fp32_to_fp16(export(Wrapped(function), x, i))
    assert node_dtypes(program)[torch.float32] == 0


def test_mask_made_of_integers_stays_finite() -> None:
    """What is compared is exact; the smallest number of float32 is not narrowed to an infinity on the way."""

    def masked(self: Wrapped, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(torch.float32).min
        kept = m.float()
        additive = (1.0 - kept) * lowest
        causal = torch.full((4, 4), lowest).triu(1)
        causal = causal.masked_fill(causal + m[None] == 0, lowest)
        stored = (self.causal + m[None]).masked_fill(self.causal + m[None] == 0, lowest)
        masks = (additive, causal, stored)
        return sum(((x + mask).softmax(-1) for mask in masks), (kept == 0) * x)

    x, m = torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    program = export(Wrapped(masked), x, m)
    reference = run(program, x, m)[0]
    cast_fp32_to_fp16(program)
    assert sqnr(reference, run(program, x.half(), m)[0]) > 50


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x, m: (mask := m.float()).mul_(x) * (mask == 0),
        lambda self, x, m: (mask := m.float()).view(-1).mul_(x) * (mask == 0),
        lambda self, x, m: ((mask := m.float()) * 2).mul_(x) * (mask == 0),
    ],
    ids=["itself", "view", "product"],
)
def test_positions_that_are_written_in_place_are_still_cast(function: Callable[..., torch.Tensor]) -> None:
    """No write across the border of the cast comes about."""
    x, m = torch.tensor([0.5, 0.0, 2.0, 1.0]), torch.ones(4, dtype=torch.int64)
    program = export(Wrapped(function), x, m, decompose=False)
    expected = run(program, x, m)[0]
    cast_fp32_to_fp16(program)
    assert dtype(find(program, ATEN.mul_.Tensor)) == torch.float16
    assert torch.equal(run(program, x.half(), m)[0].float(), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_buffer_of_positions_keeps_its_digits_where_others_read_it_too(tied: bool, shared: bool) -> None:
    """Under one name or two, of which export uses one."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.linspace(0.3, 2.9, 4))
            if tied:
                self.register_buffer("original", self.frequencies)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            phases = torch.arange(3000).float()[:, None] * self.frequencies
            return torch.sin(phases), x * self.frequencies if shared else x + 1

    x = torch.rand(4)
    program = export(Rotary(), x)
    expected = run(program, x)
    cast_fp32_to_fp16(program)
    check_metadata(program, x.half())
    for exact, result in zip(expected, run(program, x.half()), strict=True):
        assert result.dtype == torch.float16
        assert torch.allclose(result.float(), exact, atol=1e-2)
