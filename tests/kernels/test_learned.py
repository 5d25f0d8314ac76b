"""Gradients of learned steps and offsets: the fused pass against their definition, in any layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bitwright import kernels
from bitwright.kernels import Grid

# Shape, block: one step, rows, short rows, channels last, blocks along both, and more elements than one chunk has.
LAYOUTS = [
    ((33,), (33,)),
    ((6, 32), (1, 32)),
    ((32, 1, 3, 3), (1, 1, 3, 3)),
    ((5, 7, 19), (5, 7, 1)),
    ((8, 64), (1, 16)),
    ((6, 10), (3, 5)),
    ((3, 20_000), (3, 20_000)),
    ((4, 40, 300), (4, 1, 300)),
]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(shape: tuple[int, ...], block: tuple[int, ...], formulation: str) -> tuple[torch.Tensor, ...]:
    """Tensor, gradient, scale, zero point and minval."""
    generator = torch.Generator().manual_seed(len(shape))
    counts = tuple(size // part for size, part in zip(shape, block, strict=True))
    x, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
    scale = torch.rand(counts, generator=generator) * 0.3 + 0.05
    point = torch.randint(-8, 8, counts, generator=generator).int()
    shift = torch.rand(counts, generator=generator) * 0.1 if formulation == "minval" else 0.0
    return x, gradient, scale, point, (-8 - point) * scale + shift


def spread(per_block: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One number for each element, float64."""
    for dim in range(x.ndim):
        per_block = per_block.repeat_interleave(x.shape[dim] // per_block.shape[dim], dim)
    return per_block.double()


def gathered(values: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """Sums over blocks."""
    for dim, size in enumerate(block):
        values = values.unflatten(dim, (-1, size)).sum(dim + 1)
    return values


@pytest.mark.parametrize("formulation", ["zp", "minval"])
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize(("shape", "block"), LAYOUTS)
def test_sums_are_those_of_the_definition(
    shape: tuple[int, ...], block: tuple[int, ...], anchored: bool, formulation: str
) -> None:
    """LSQ eq. 3 and LSQ+ eq. 4 and 6, in float64."""
    grid = Grid(torch.int8, -8, 7, formulation)
    x, gradient, *parameters = made(shape, block, formulation)
    with torch.no_grad():
        found = kernels.learned_gradient(gradient, x, *parameters, block_size=block, grid=grid, anchored=anchored)
    s, point, low = (spread(part, x) for part in parameters)
    zero = low + 8 * s if formulation == "minval" else -point * s
    v, g = x.double(), gradient.double()
    inside = (v > zero - 8 * s) & (v < zero + 7 * s)
    rounded = (
        ((v - low) / s).round().clamp(0, 15) * s + low
        if formulation == "minval"
        else ((v / s).round() + point).clamp(-8, 7) * s - point * s
    )
    moved = torch.where(inside, rounded - v, rounded - (zero if anchored else 0.0))
    assert torch.equal(found[0], gradient * inside)
    tolerance = {"rtol": 1e-4, "atol": 2e-5 * (x.numel() / parameters[0].numel()) ** 0.5}
    torch.testing.assert_close(found[1].double(), gathered(g * moved, block), **tolerance)
    torch.testing.assert_close(found[2].double(), gathered(g * ~inside, block), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "block"), LAYOUTS)
def test_any_layout_dtype_and_number_of_threads(
    shape: tuple[int, ...], block: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The same bits with one thread and two, and the reference's numbers, whatever the order in memory."""
    grid = Grid(torch.int8, -8, 7, "zp")
    x, gradient, *parameters = made(shape, block, "zp")
    x, gradient = x.to(dtype), gradient.to(dtype).transpose(0, -1).contiguous().transpose(0, -1)
    found = []
    for threads, form in ((1, "auto"), (2, "auto"), (1, "reference")):
        torch.set_num_threads(threads)
        before = kernels.set_form(form)
        with torch.no_grad():
            found.append(kernels.learned_gradient(gradient, x, *parameters, block_size=block, grid=grid, anchored=True))
        kernels.set_form(before)
    one, two, reference = found
    for mine, other in zip(one, two, strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(one[0], reference[0])
    for mine, theirs in zip(one[1:], reference[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5 * (x.numel() / theirs.numel()) ** 0.5)


def test_gradients_that_stand_for_many() -> None:
    """``is_grads_batched`` gives what one gradient after the other gives."""
    made = torch.tensor([0.02]), torch.tensor([0], dtype=torch.int32), torch.tensor([-2.56])
    options = {"block_size": (4, 16), "grid": Grid(torch.int8, -128, 127), "anchored": False}
    x = torch.linspace(-4, 4, 64).reshape(4, 16)

    class Learned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return kernels.learned_gradient(gradient, x, *made, **options)[0]

    leaf = x.clone().requires_grad_()
    y = Learned.apply(leaf)
    gradients = torch.arange(192.0).reshape(3, 4, 16)
    (found,) = torch.autograd.grad(y, leaf, gradients, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(y, leaf, gradient, retain_graph=True)[0] for gradient in gradients]
    assert torch.equal(found, torch.stack(expected))
