"""Palettes that are quantized: refitting lowers the error, and never raises it."""

from __future__ import annotations

import itertools

import pytest
import torch

from bitwright.palettization.clustering import (
    cluster_on_grid,
    cluster_scalar,
    cluster_vectors,
    refit_to_quantized,
)

from .references import DISTRIBUTIONS, error_of, nearest


def to_steps(levels: int):
    """Round to ``levels`` evenly spaced values around zero, with a scale for each group."""

    def quantize(luts: torch.Tensor) -> torch.Tensor:
        scale = luts.abs().amax((1, 2), keepdim=True).clamp(min=1e-30) / levels
        return (luts / scale).round().clamp(-levels, levels) * scale

    return quantize


def to_grid(levels: torch.Tensor):
    """Round to the nearest of fixed levels."""
    return lambda luts: levels.double()[(luts.double().unsqueeze(-1) - levels.double()).abs().argmin(-1)]


@pytest.mark.parametrize("levels", [7, 127])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_refit_is_never_worse(levels: int, dims: int, weighted: bool) -> None:
    """In no group worse than rounding the palette, with the indices kept or assigned anew."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((4, 900, dims), generator=generator)
    weights = torch.rand((4, 900), generator=generator) if weighted else None
    points = values.squeeze(2) if dims == 1 else values
    found = (cluster_scalar if dims == 1 else cluster_vectors)(points, 16, weights=weights)
    refit = refit_to_quantized(points, found, to_steps(levels), weights=weights)
    rounded = to_steps(levels)(found.centroids)
    for indices in (found.indices, nearest(values, rounded)):
        decoded = rounded.gather(1, indices.long().unsqueeze(2).expand(-1, -1, dims))
        assert (refit.error <= error_of(values, decoded, weights) * (1 + 1e-12)).all()
    assert torch.equal(refit.indices, nearest(values, refit.lut))
    decoded = refit.lut.gather(1, refit.indices.long().unsqueeze(2).expand(-1, -1, dims))
    torch.testing.assert_close(refit.error, error_of(values, decoded, weights), rtol=1e-9, atol=0)
    torch.testing.assert_close(refit.lut, to_steps(levels)(refit.centroids), rtol=1e-12, atol=0)


def test_refit_gains_where_codes_are_few() -> None:
    """With 15 codes for 16 entries of a skewed palette, rounding merges entries and refitting puts them to use."""
    values = torch.randn((1, 5000), generator=torch.Generator().manual_seed(0)) ** 3
    found = cluster_scalar(values, 16)
    rounded = to_steps(7)(found.centroids)
    naive = error_of(values.unsqueeze(2), rounded.gather(1, found.indices.long().unsqueeze(2)))
    assert refit_to_quantized(values, found, to_steps(7)).error.item() < 0.9 * naive.item()


def test_each_group_takes_the_best_of_several() -> None:
    """The choice is made group by group."""
    values = torch.stack([torch.linspace(-1, 1, 400), torch.linspace(-8, 8, 400)])
    grids = [to_grid(torch.linspace(-1, 1, 9)), to_grid(torch.linspace(-8, 8, 9))]
    refit = refit_to_quantized(values, cluster_scalar(values, 8), grids)
    assert refit.choice.tolist() == [0, 1]
    alone = [refit_to_quantized(values, cluster_scalar(values, 8), grid).error for grid in grids]
    torch.testing.assert_close(refit.error, torch.minimum(*alone))


def test_quantization_without_loss_changes_nothing() -> None:
    """The optimum stays where it is."""
    values = torch.randn((2, 700), generator=torch.Generator().manual_seed(0))
    found = cluster_scalar(values, 16, mode="exact")
    refit = refit_to_quantized(values, found, lambda luts: luts)
    torch.testing.assert_close(refit.error, found.error, rtol=1e-9, atol=0)


def test_quantize_must_keep_the_shape() -> None:
    """Both shapes are named."""
    values = torch.randn((1, 50), generator=torch.Generator().manual_seed(0))
    found = cluster_scalar(values, 4)
    with pytest.raises(ValueError, match=r"shape it got, \[1, 4, 1\], got \[1, 4\]"):
        refit_to_quantized(values, found, lambda luts: luts.squeeze(2))
    with pytest.raises(ValueError, match="non-empty"):
        refit_to_quantized(values, found, [])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", ["normal", "student", "offset", "few", "tiny", "huge", "two modes"])
def test_grid_palettes_are_optimal(name: str, weighted: bool) -> None:
    """Against the enumeration of all choices of 4 of 9 levels."""
    import numpy as np

    rng = np.random.default_rng(0)
    values = torch.tensor(DISTRIBUTIONS[name](rng, 60), dtype=torch.float32).unsqueeze(0)
    weights = torch.tensor(rng.exponential(size=(1, 60)), dtype=torch.float32) if weighted else None
    levels = torch.linspace(values.min().item(), values.max().item(), 9, dtype=torch.float64)
    found = cluster_on_grid(values, 4, levels, weights=weights)
    choices = torch.stack([levels[list(chosen)] for chosen in itertools.combinations(range(9), 4)])
    size = float(values.abs().max())
    off = (values.double().view(1, -1, 1) - choices.unsqueeze(1)).div(size).square().amin(2)
    best = (off if weights is None else off * weights.double()).sum(1).min().item()
    decoded = found.decode()
    assert torch.isin(found.centroids, levels).all()
    made = error_of(values.double().unsqueeze(2) / size, decoded / size, weights).item()
    assert made == pytest.approx(best, rel=1e-9, abs=1e-24)
    assert found.error.item() / size / size == pytest.approx(made, rel=1e-6, abs=1e-24)


def test_grid_of_its_own_for_each_group() -> None:
    """Levels ``[P, G]``, in any order and with repetitions; a grid smaller than the palette is taken whole."""
    values = torch.randn((2, 300), generator=torch.Generator().manual_seed(0))
    levels = torch.tensor([[1.0, -1, 0, 1], [0.5, 0.25, -0.5, -2]])
    found = cluster_on_grid(values, 3, levels)
    assert found.centroids[0, :, 0].tolist() == [-1, 0, 1]
    assert torch.isin(found.centroids[1], levels[1].double()).all()
    whole = cluster_on_grid(values[:1], 8, levels[:1])
    assert whole.centroids[0, :, 0].tolist() == [-1, 0, 1, 1, 1, 1, 1, 1]


def test_grid_palettes_of_long_rows() -> None:
    """From the histogram of a long row the same levels are chosen as from every value."""
    values = torch.randn((1, 50_000), generator=torch.Generator().manual_seed(0))
    levels = torch.linspace(-4, 4, 255)
    binned, sorted_row = cluster_on_grid(values, 16, levels), cluster_on_grid(values.double(), 16, levels)
    assert binned.error.item() == pytest.approx(sorted_row.error.item(), rel=1e-6)


def test_a_grid_palette_beats_rounding() -> None:
    """The best palette on a grid is no worse than the refitted rounding of the best palette."""
    values = torch.randn((1, 4000), generator=torch.Generator().manual_seed(0)) ** 3
    levels = torch.linspace(-30, 30, 31)
    refit = refit_to_quantized(values, cluster_scalar(values, 16), to_grid(levels))
    assert cluster_on_grid(values, 16, levels).error.item() <= refit.error.item() * (1 + 1e-9)
