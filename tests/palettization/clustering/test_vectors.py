"""Vector palettes: optimal where that can be enumerated, stationary, better than plain restarts, robust to scale."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from bitwright.palettization.clustering import assign, cluster_scalar, cluster_vectors
from bitwright.palettization.clustering._chains import best_chain
from bitwright.palettization.clustering._pieces import NO_WEIGHTS

from .references import error_of, nearest


def normal(groups: int, length: int, dims: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((groups, length, dims), generator=torch.Generator().manual_seed(seed))


def lloyd_of_restarts(points: np.ndarray, count: int, restarts: int, seed: int = 0) -> float:
    """Least squared error of plain Lloyd descents from k-means++ seeds, in float64."""
    rng = np.random.default_rng(seed)
    best = np.inf
    for _ in range(restarts):
        centres = points[rng.integers(len(points), size=1)]
        while len(centres) < count:
            far = ((points[:, None] - centres[None]) ** 2).sum(2).min(1)
            centres = np.vstack([centres, points[rng.choice(len(points), p=far / far.sum())]])
        for _ in range(100):
            far = ((points[:, None] - centres[None]) ** 2).sum(2)
            labels = far.argmin(1)
            moved = np.array([points[labels == k].mean(0) if (labels == k).any() else c for k, c in enumerate(centres)])
            if np.allclose(moved, centres, rtol=0, atol=1e-9):
                break
            centres = moved
        best = min(best, float(((points[:, None] - centres[None]) ** 2).sum(2).min(1).sum()))
    return best


def optimal_split(points: np.ndarray, mass: np.ndarray) -> float:
    """Least squared error of all partitions into two."""
    best = np.inf
    for sides in itertools.product([False, True], repeat=len(points) - 1):
        inside = np.array([False, *sides])
        total = 0.0
        for part in (inside, ~inside):
            if part.any():
                mean = np.average(points[part], axis=0, weights=mass[part])
                total += float((mass[part, None] * (points[part] - mean) ** 2).sum())
        best = min(best, total)
    return best


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dims", [2, 3])
def test_two_entries_are_optimal(dims: int, weighted: bool) -> None:
    """Against the enumeration of all partitions of a dozen vectors."""
    values = normal(6, 12, dims)
    weights = torch.rand((6, 12), generator=torch.Generator().manual_seed(1)) + 0.05 if weighted else None
    found = cluster_vectors(values, 2, weights=weights, restarts=20)
    for group in range(6):
        mass = np.ones(12) if weights is None else weights[group].double().numpy()
        best = optimal_split(values[group].double().numpy(), mass)
        assert found.error[group].item() == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(("length", "dims", "count"), [(3000, 2, 16), (3000, 4, 16), (1500, 4, 64)])
def test_no_worse_than_many_plain_restarts(length: int, dims: int, count: int) -> None:
    """One call comes within a percent of the best of ten descents, which take far longer."""
    values = normal(1, length, dims)
    found = cluster_vectors(values, count).error.item()
    assert found <= 1.01 * lloyd_of_restarts(values[0].double().numpy(), count, 10)


@pytest.mark.parametrize(("length", "count"), [(16, 4), (128, 2)])
def test_few_vectors_get_the_best_of_many_restarts(length: int, count: int) -> None:
    """Their optima lie far apart: with a handful of chains some groups are percents above the best of twenty."""
    values = normal(6, length, 2, seed=length)
    found = cluster_vectors(values, count).error
    for group in range(6):
        best = lloyd_of_restarts(values[group].double().numpy(), count, 20)
        assert found[group].item() <= best * (1 + 1e-3)


@pytest.mark.parametrize("length", [5000, 300_000])
def test_entries_are_the_means_of_their_vectors(length: int) -> None:
    """Lloyd's algorithm has come to rest on all vectors, not on a sample: moving on gains next to nothing."""
    values = normal(1, length, 2)
    found = cluster_vectors(values, 16)
    assert torch.equal(found.indices, assign(values, found.centroids))
    labels = found.indices[0].long()
    sums = torch.zeros((16, 2), dtype=torch.float64).index_add_(0, labels, values[0].double())
    means = sums / torch.bincount(labels, minlength=16).unsqueeze(1)
    moved = error_of(values, means[labels].unsqueeze(0)).item()
    assert moved <= found.error.item() <= moved * (1 + 1e-4)


def test_separate_clouds_are_found() -> None:
    """Sixteen tight clouds of very different sizes, which farthest-first or random seeds miss."""
    generator = torch.Generator().manual_seed(0)
    centres = 10 * torch.randn((16, 3), generator=generator)
    place = torch.repeat_interleave(torch.arange(16), torch.tensor([20 + 40 * k for k in range(16)]))
    values = centres[place] + 0.01 * torch.randn((len(place), 3), generator=generator)
    found = cluster_vectors(values.unsqueeze(0), 16)
    assert found.error.item() < 3 * 0.0002 * len(place)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_error_and_indices_are_those_of_the_entries(dtype: torch.dtype) -> None:
    """In every dtype, weighted and not; entries ascend by their first coordinate."""
    values = normal(2, 900, 2).to(dtype)
    weights = torch.rand((2, 900), generator=torch.Generator().manual_seed(1))
    for some in (None, weights):
        found = cluster_vectors(values, 8, weights=some)
        assert torch.equal(found.indices, nearest(values, found.centroids))
        torch.testing.assert_close(found.error, error_of(values, found.decode(), some), rtol=1e-9, atol=0)
        assert (found.centroids[..., 0].diff(dim=1) >= 0).all()


@pytest.mark.parametrize("scale", [1e-35, 1e-6, 1e4, 1e18, 1e35])
def test_size_of_the_vectors_does_not_matter(scale: float) -> None:
    """Errors beyond a billion, and squares that no float32 can hold."""
    values = normal(1, 2000, 2)
    plain, scaled = cluster_vectors(values, 16), cluster_vectors(values * scale, 16)
    assert scaled.error.item() / scale**2 == pytest.approx(plain.error.item(), rel=1e-3)


@pytest.mark.parametrize("value", [0.0, 2.5, 1e4, -3e38])
def test_constant_vectors(value: float) -> None:
    """One vector gives one entry, repeated."""
    found = cluster_vectors(torch.full((2, 500, 4), value), 16)
    assert found.error.tolist() == [0, 0]
    assert (found.centroids == torch.tensor(value).double()).all()
    assert (found.indices == 0).all()


def test_few_vectors_are_exact() -> None:
    """No more different vectors than entries: no error, and no index refers to a repetition."""
    kinds = torch.tensor([[1.0, 2], [0, 0], [-1, 5], [1, 3]])
    values = kinds[torch.arange(600) % 4].unsqueeze(0)
    found = cluster_vectors(values, 8)
    assert found.error.item() == 0
    assert torch.equal(found.decode().float(), values)
    assert found.indices.max() == 3


def test_weights_decide() -> None:
    """Vectors without weight have no part; elementwise weights are summed over the vector."""
    values = normal(1, 800, 2)
    weights = torch.zeros((1, 800))
    weights[0, :8] = 1
    found = cluster_vectors(values, 8, weights=weights)
    assert found.error.item() == pytest.approx(0, abs=1e-9)
    parts = torch.rand((1, 800, 2), generator=torch.Generator().manual_seed(1))
    by_element, by_vector = cluster_vectors(values, 8, weights=parts), cluster_vectors(values, 8, weights=parts.sum(2))
    assert torch.equal(by_element.centroids, by_vector.centroids)


def test_vectors_of_one_are_scalars() -> None:
    """D = 1 takes the optimal way."""
    values = normal(2, 500, 1)
    assert torch.equal(cluster_vectors(values, 16).centroids, cluster_scalar(values.squeeze(2), 16).centroids)


def test_groups_are_independent() -> None:
    """A group's palette depends on its number and vectors, not on its neighbours."""
    values = normal(3, 700, 2)
    together = cluster_vectors(values, 8)
    others = values.clone()
    others[0] = 5
    assert torch.equal(cluster_vectors(others, 8).centroids[1:], together.centroids[1:])


def test_hardly_different_vectors_fill_the_palette() -> None:
    """A subsample with fewer different vectors than entries: those that it lacks are found among all the others."""
    values = torch.zeros((1, 100_000, 2))
    values[0, :20] = normal(1, 20, 2)[0]
    found = cluster_vectors(values, 16)
    assert len(torch.unique(found.centroids[0], dim=0)) == 16
    assert found.error.item() < 0.3
    far = normal(1, 4096, 2)
    far[0, 0] = 1e12
    assert cluster_vectors(far, 16).centroids.isfinite().all()


@pytest.mark.parametrize("scale", [1e-300, 1e-308, 1e-310, 1e-317])
def test_vectors_below_the_normal_range(scale: float) -> None:
    """Their reciprocal is no number; they are clustered as if they were larger."""
    values = torch.randint(1, 200, (1, 60, 2), generator=torch.Generator().manual_seed(0)).double()
    plain, tiny = cluster_vectors(values, 4), cluster_vectors(values * scale, 4)
    assert torch.equal(tiny.indices, plain.indices)
    torch.testing.assert_close(tiny.centroids / scale, plain.centroids, rtol=1e-5, atol=0)
    assert torch.equal(assign(values * scale, tiny.centroids), plain.indices)


def test_the_best_chain_is_that_of_one_call_or_of_several() -> None:
    """Chains that run in one compiled call, as for small groups, are those that threads run one by one."""
    points = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).numpy()
    states = np.arange(1, 9, dtype=np.uint64)
    alone = [best_chain(points, NO_WEIGHTS, 5, 2, 3, (2, 4), 60, states[turn : turn + 1].copy()) for turn in range(8)]
    centroids, error = best_chain(points, NO_WEIGHTS, 5, 2, 3, (2, 4), 60, states.copy())
    assert len({found for _, found in alone}) > 1
    expected, least = min(alone, key=lambda chain: chain[1])
    assert (error, centroids.tolist()) == (least, expected.tolist())
    distances = ((points[:, None].astype(np.float64) - centroids) ** 2).sum(2).min(1)
    assert distances.sum() == pytest.approx(error, rel=1e-5)
