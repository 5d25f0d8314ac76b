"""Results depend on the input and the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bitwright.palettization.clustering import ClusterResult, cluster_scalar, cluster_vectors


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_same(one: ClusterResult, other: ClusterResult) -> None:
    assert torch.equal(one.centroids, other.centroids)
    assert torch.equal(one.indices, other.indices)
    assert torch.equal(one.error, other.error)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(1, 1_200_000), (3, 70_000), (50, 700)])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_scalar_palettes_with_any_number_of_threads(shape: tuple[int, int], weighted: bool) -> None:
    """Long rows in pieces, long rows side by side, and many short rows."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(1)) if weighted else None
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(cluster_scalar(values, 24, weights=weights))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(1, 70_000, 2), (3, 5_000, 4)])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_vector_palettes_with_any_number_of_threads(shape: tuple[int, int, int], weighted: bool) -> None:
    """One group in pieces, and groups side by side."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(shape[:2], generator=torch.Generator().manual_seed(1)) if weighted else None
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(cluster_vectors(values, 8, weights=weights))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_seeds() -> None:
    """A seed gives one result, a generator one after the other, and global generators are left alone."""
    values = torch.randn((1, 3000, 2), generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    assert_same(cluster_vectors(values, 32, seed=7), cluster_vectors(values, 32, seed=7))
    assert not torch.equal(cluster_vectors(values, 32, seed=7).centroids, cluster_vectors(values, 32, seed=8).centroids)
    generator = torch.Generator().manual_seed(3)
    first, second = (cluster_vectors(values, 32, seed=generator) for _ in range(2))
    assert not torch.equal(first.centroids, second.centroids)
    assert_same(first, cluster_vectors(values, 32, seed=torch.Generator().manual_seed(3)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()
