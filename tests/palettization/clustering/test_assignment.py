"""Nearest entries and the sums over them, against their definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.palettization.clustering import assign, cluster_moments, clustering_error

from .references import error_of, nearest

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENGTHS = [1, 700, 40_000, 140_000]  # by search, by pattern, by bins


@pytest.mark.parametrize("count", [1, 2, 3, 16, 33, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_scalars(count: int, dtype: torch.dtype, length: int) -> None:
    """Sorted palettes and any others, entries that occur twice, values on and beside the midpoints."""
    generator = torch.Generator().manual_seed(count)
    palettes = torch.randn((2, count, 1), generator=generator, dtype=torch.float64).to(dtype)
    palettes[1] = palettes[1].sort(dim=0).values
    palettes[0, -1] = palettes[0, 0]
    values = torch.randn((2, length), generator=generator, dtype=torch.float64).to(dtype)
    middles = (palettes[:, :-1, 0].double() + palettes[:, 1:, 0].double()).div(2).to(dtype)
    edges = torch.cat([middles, palettes[..., 0], torch.nextafter(middles, middles + 1)], 1)[:, :length]
    values[:, : edges.shape[1]] = edges
    found, expected = assign(values, palettes), nearest(values.unsqueeze(2), palettes)
    if dtype != torch.float64:
        assert torch.equal(found, expected)
        return
    # midpoints are float64 themselves: a value beside one may go to an entry that is farther by their rounding
    far = [(values - palettes[..., 0].gather(1, labels.long())).abs() for labels in (found, expected)]
    assert (far[0] - far[1] <= 1e-15 * values.abs().clamp(min=1)).all()


@pytest.mark.parametrize("length", [40, 140_000])
def test_ties_go_to_the_lower_index(length: int) -> None:
    """Halfway between two entries, in either order, and between equal ones."""
    values = torch.tensor([0.5, -0.0, 0.0, 1.5]).repeat(length // 4).unsqueeze(0)
    for palette, expected in (
        ([0.0, 1.0, 2.0], [0, 0, 0, 1]),
        ([2.0, 1.0, 0.0], [1, 2, 2, 0]),
        ([1.0, 0.0, 1.0, 0.0], [0, 1, 1, 0]),
    ):
        found = assign(values, torch.tensor([palette]))
        assert found[0].tolist() == expected * (length // 4)


@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1e30])
def test_scalars_of_any_size(scale: float) -> None:
    """Subnormal and huge values, through the table of bins."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((1, 140_000), generator=generator) * 20 * scale
    palettes = (torch.randn((1, 16, 1), generator=generator) * 20 * scale).sort(dim=1).values
    exact = nearest(values.double().unsqueeze(2) / scale, palettes.double() / scale)
    found = assign(values, palettes)
    off = (values.double() - palettes.double()[0, :, 0][found.long()]).abs()
    best = (values.double() - palettes.double()[0, :, 0][exact.long()]).abs()
    assert (off <= best * (1 + 1e-12)).all()


@pytest.mark.parametrize("dims", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors(dims: int, dtype: torch.dtype) -> None:
    """Nearest in float64, the first of equal entries."""
    generator = torch.Generator().manual_seed(dims)
    values = torch.randn((2, 5000, dims), generator=generator).to(dtype)
    palettes = torch.randn((2, 40, dims), generator=generator).to(dtype)
    palettes[:, 20:30] = palettes[:, :10]
    values[:, :10] = (palettes[:, 30:] + palettes[:, 20:30]) / 2
    assert torch.equal(assign(values, palettes), nearest(values, palettes))


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e200])
def test_vectors_of_any_size(scale: float) -> None:
    """No square overflows or vanishes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((1, 900, 2), generator=generator, dtype=torch.float64)
    palettes = torch.randn((1, 9, 2), generator=generator, dtype=torch.float64)
    assert torch.equal(assign(values * scale, palettes * scale), nearest(values, palettes))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50),
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=9),
)
def test_any_values_and_palettes(values: list[float], palette: list[float]) -> None:
    """The definition, for whatever comes."""
    points, entries = torch.tensor([values]), torch.tensor([palette])
    far = np.abs(points.double().numpy()[0][:, None] - entries.double().numpy()[0][None, :])
    chosen = far[np.arange(len(values)), assign(points, entries)[0].numpy()]
    assert (chosen <= far.min(1) * (1 + 1e-15)).all()


@pytest.mark.parametrize("dims", [0, 1, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_moments(dims: int, weighted: bool) -> None:
    """Σw, Σw·offset and Σw·offset² of each entry; ``[P, N]`` means D = 1."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 300_000, dims) if dims else (2, 300_000)
    values = torch.randn(shape, generator=generator)
    weights = torch.rand((2, 300_000), generator=generator) if weighted else None
    palettes = torch.randn((2, 5, max(dims, 1)), generator=generator)
    indices = assign(values, palettes)
    masses, offsets, squares = cluster_moments(values, indices, palettes, weights=weights)
    points = values if dims else values.unsqueeze(2)
    some = torch.ones((2, 300_000), dtype=torch.float64) if weights is None else weights.double()
    for entry in range(5):
        here = some * (indices == entry)
        off = points.double() - palettes[:, entry : entry + 1].double()
        torch.testing.assert_close(masses[:, entry], here.sum(1))
        torch.testing.assert_close(offsets[:, entry], (off * here.unsqueeze(2)).sum(1), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(squares[:, entry], (off.square() * here.unsqueeze(2)).sum(1))
    decoded = torch.gather(palettes, 1, indices.long().unsqueeze(2).expand(-1, -1, points.shape[2]))
    expected = error_of(points, decoded, weights)
    torch.testing.assert_close(clustering_error(values, indices, palettes, weights=weights), expected)
