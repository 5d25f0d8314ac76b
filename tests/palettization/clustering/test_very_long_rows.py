"""Rows of millions of float32 values, whose histogram takes one pass where fixed bins are fine enough."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitwright.palettization.clustering import cluster_scalar, clustering_error
from bitwright.palettization.clustering._octaves import N_BINS, atoms_of_octaves, fill_octaves

from .references import nearest

LENGTH = (1 << 21) + 3


def row(kind: str) -> torch.Tensor:
    values = 0.02 * torch.randn(LENGTH, generator=torch.Generator().manual_seed(0))
    if kind == "near one":  # so close together that fixed bins are too coarse
        values = 1.5 + 1e-3 * values
    if kind == "with outliers":
        values[:: LENGTH // 5] = torch.tensor([1e30, -3e4, 5.0, -1e-40, 2.0])
    if kind == "with zeros":
        values[::3] = 0.0
        values[1::3] *= -0.0
    return values.unsqueeze(0)


@pytest.mark.parametrize(
    ("kind", "count"), [("gaussian", 2), ("gaussian", 11), ("near one", 16), ("with outliers", 16), ("with zeros", 16)]
)
def test_excess(kind: str, count: int) -> None:
    """Within the promise of the fast mode, whichever histogram served; indices are the nearest, the error is theirs."""
    values = row(kind)
    best = cluster_scalar(values, count, mode="exact").error.item()
    found = cluster_scalar(values, count)
    assert best * (1 - 1e-9) <= found.error.item() <= best * (1 + 1e-5)
    assert found.error.item() == pytest.approx(clustering_error(values, found.indices, found.centroids).item())
    some = slice(0, 5000)
    assert torch.equal(found.indices[:, some], nearest(values[:, some].unsqueeze(2), found.centroids))


@pytest.mark.parametrize("threads", [1, 5])
def test_threads_do_not_matter(threads: int) -> None:
    """Pieces follow the number of threads, but their sums are whole numbers."""
    before = torch.get_num_threads()
    values = torch.cat([row("gaussian")] * 2, dim=1)
    try:
        torch.set_num_threads(2)
        expected = cluster_scalar(values, 16)
        torch.set_num_threads(threads)
        found = cluster_scalar(values, 16)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found.centroids, expected.centroids)
    assert torch.equal(found.indices, expected.indices)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(broken: float) -> None:
    """One such value among millions."""
    values = row("gaussian")
    values[0, -2] = broken
    with pytest.raises(ValueError, match=r"1 (NaN|infinite)|and 1 infinite"):
        cluster_scalar(values, 16)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_errors_that_nobody_wants_are_nan(mode: str) -> None:
    """Palettes and indices are the same."""
    for values in (row("gaussian"), row("gaussian")[:, :3000]):
        plain, bare = (cluster_scalar(values, 16, mode=mode, measured=measured) for measured in (True, False))
        assert torch.equal(plain.centroids, bare.centroids)
        assert torch.equal(plain.indices, bare.indices)
        assert bare.error.isnan().all()


def test_bins_hold_means_and_bound_the_error_inside() -> None:
    """Against float64: counts and means of the bins, and an upper bound that is not far from the truth."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(size=20_001), [0.0, -0.0, 1e-42, -3e38]]).astype(np.float32)
    parts = np.zeros((2, N_BINS), np.uint64)
    fill_octaves(values[:7001].view(np.uint32), parts[0])
    fill_octaves(values[7001:].view(np.uint32), parts[1])
    means, counts, bound = atoms_of_octaves(parts)
    assert (np.diff(means) > 0).all()
    assert counts.sum() == values.size
    assert means @ counts == pytest.approx(values.astype(np.float64).sum(), rel=1e-12)
    bins = values.view(np.uint32) >> 13
    truth = sum(values[bins == one].astype(np.float64).var() * (bins == one).sum() for one in np.unique(bins))
    assert truth <= bound <= 6 * truth
