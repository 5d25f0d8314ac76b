"""Hypothesis strategies for the kernels: tensors with every kind of difficult value, blocks, grids."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from bitwright.formats import quant_range
from bitwright.kernels import Grid

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9)]
FLOATS = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [
    0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 6e-8, -6e-5,
    65504.0, 65520.0, 3.4028235e38, -3.4028235e38, 448.0, 464.0, 57344.0, 61440.0, 6.0, 0.25, 0.75, 2.5, 5.0, -7.0,
]  # fmt: skip
# Around a vector (16), a long row (256), a tile (512), and what shares a word of the mask.
EDGES = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49, 255, 256, 257, 271, 511, 512, 513, 529]


class Case(NamedTuple):
    """A tensor, its gradient, and how it is quantized."""

    x: torch.Tensor
    gradient: torch.Tensor
    block_size: tuple[int, ...]
    grid: Grid
    scheme: str
    scale_dtype: torch.dtype | None


def divisors(n: int) -> list[int]:
    """All divisors of ``n``."""
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def shapes(draw: Any, most: int = 6000) -> tuple[int, ...]:
    """Shapes of one to five dimensions whose inner ones lie around the edges of vectors and tiles."""
    sizes = [draw(st.sampled_from(EDGES))]
    for _ in range(draw(st.integers(0, 4))):
        room = most // math.prod(sizes)
        if room < 1:
            break
        sizes.insert(draw(st.integers(0, len(sizes))), draw(st.integers(1, min(room, 12))))
    return tuple(sizes)


@st.composite
def block_sizes(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Per tensor, per channel, per token, per block along one axis, or any division."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return shape
    axis = draw(st.integers(0, len(shape) - 1))
    if kind == 1:
        return tuple(1 if d == axis else s for d, s in enumerate(shape))
    if kind == 2:
        return tuple(draw(st.sampled_from(divisors(s))) if d == axis else 1 for d, s in enumerate(shape))
    return tuple(draw(st.sampled_from(divisors(s))) for s in shape)


@st.composite
def values(draw: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random values; halves of a step, wide exponents, one sign; special values among them in some cases."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator)
    kind = draw(st.sampled_from(["normal", "ties", "wide", "positive", "negative", "tiny", "zero"]))
    if kind == "ties":
        x = torch.randint(-40, 40, shape, generator=generator) / 2
    elif kind == "wide":
        x = x * torch.pow(2.0, torch.randint(-149, 127, shape, generator=generator))
    elif kind in ("positive", "negative"):
        x = x.abs() * (1 if kind == "positive" else -1)
    elif kind == "tiny":
        x = x * 1e-40
    elif kind == "zero":
        x = x * 0
    x = x.to(dtype)
    flat = x.view(-1)
    for special in draw(st.lists(st.sampled_from(SPECIAL), max_size=4)):
        flat[draw(st.integers(0, flat.numel() - 1))] = torch.tensor(special, dtype=torch.float64).to(dtype)
    return x


@st.composite
def strided(draw: Any, x: torch.Tensor) -> torch.Tensor:
    """The same values in other strides: permuted, channels last, with holes, from an offset, expanded."""
    kind = draw(st.sampled_from(["contiguous", "contiguous", "permuted", "holes", "offset", "flipped order"]))
    if kind == "permuted":
        order = draw(st.permutations(range(x.ndim)))
        return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])
    if kind == "holes":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7.0, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if kind == "offset":
        base = torch.zeros(x.numel() + 3, dtype=x.dtype)
        base[3:] = x.reshape(-1)
        return base[3:].view(x.shape)
    if kind == "flipped order":
        return x.mT.contiguous().mT if x.ndim > 1 else x
    return x


@st.composite
def grids(draw: Any) -> tuple[Grid, str, torch.dtype | None]:
    """A grid, a scheme that goes with it, and a scale dtype."""
    name = draw(st.sampled_from(INTEGERS * 2 + FLOATS * 5))
    dtype = getattr(torch, name)
    if name in FLOATS:
        return Grid(dtype, *quant_range(dtype)), "symmetric", draw(st.sampled_from([None, torch.float8_e8m0fnu]))
    scheme = draw(st.sampled_from(["symmetric", "asymmetric", "symmetric_with_clipping"]))
    clip = scheme == "symmetric_with_clipping" and name != "int1"
    formulation = draw(st.sampled_from(["zp", "minval"]))
    return Grid(dtype, *quant_range(dtype, clip_symmetric=clip), formulation), scheme, None


@st.composite
def cases(draw: Any, most: int = 6000) -> Case:
    """Everything at once."""
    shape = draw(shapes(most))
    dtype = draw(st.sampled_from(DTYPES))
    x = draw(strided(draw(values(shape, dtype))))
    gradient = draw(strided(draw(values(shape, dtype))))
    return Case(x, gradient, draw(block_sizes(shape)), *draw(grids()))
