"""Fast scalar clustering keeps the excess error that it promises, and what else holds for both modes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitwright.palettization.clustering import assign, cluster_scalar, clustering_error

from .references import DISTRIBUTIONS

PROMISED = {2: 1e-5, 8: 1e-5, 16: 1e-5, 64: 1e-4, 256: 5e-4}
LONG = 70_000  # by histogram; shorter rows are sorted
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def drawn(name: str, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = DISTRIBUTIONS[name](np.random.default_rng(len(name)), length)
    return torch.tensor(values, dtype=torch.float64).to(dtype).unsqueeze(0)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
def test_excess_of_long_rows(name: str, weighted: bool) -> None:
    """A histogram resolves every distribution, or the exact mode takes over."""
    values = drawn(name, LONG)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(values.shape, generator=generator) ** 4 if weighted else None
    for count in (8, 256) if weighted else PROMISED:
        fast = cluster_scalar(values, count, weights=weights).error.item()
        exact = cluster_scalar(values, count, weights=weights, mode="exact").error.item()
        assert exact * (1 - 1e-9) <= fast <= exact * (1 + PROMISED[count]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_excess_for_every_dtype(dtype: torch.dtype) -> None:
    """16-bit values are counted by pattern, float64 is sorted."""
    values = drawn("student", 40_000, torch.float32).clamp(-1e4, 1e4).to(dtype)
    for count in (16, 256):
        fast = cluster_scalar(values, count).error.item()
        exact = cluster_scalar(values, count, mode="exact").error.item()
        assert exact * (1 - 1e-9) <= fast <= exact * (1 + PROMISED[count]), count


@pytest.mark.parametrize("length", [20_000, 33_000])
def test_excess_of_groups(length: int) -> None:
    """Sorted rows that are merged, and rows just long enough for the histogram."""
    values = torch.randn((3, length), generator=torch.Generator().manual_seed(0))
    for count in (16, 64, 256):
        fast, exact = (cluster_scalar(values, count, mode=mode).error for mode in ("fast", "exact"))
        assert (fast <= exact * (1 + PROMISED[count])).all(), count


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student", "lognormal"])
@pytest.mark.parametrize("length", [8000, 16_384])
def test_rows_are_as_good_as_the_best_though_few_cuts_are_looked_at(kind: str, length: int) -> None:
    """In some rows of samples the best partition has one more run in a tail than its equals among coarse ones."""
    rng = np.random.default_rng(11)
    rows = {
        "gaussian": lambda: rng.normal(size=(40, length)),
        "laplace": lambda: rng.laplace(size=(40, length)),
        "student": lambda: rng.standard_t(3, size=(40, length)),
        "lognormal": lambda: rng.lognormal(0, 2, size=(40, length)),
    }[kind]()
    values = torch.from_numpy(rows.astype(np.float32))
    for n_clusters, allowed in ((3, 1e-5), (16, 1e-5), (64, 1e-4), (256, 5e-4)):
        best = cluster_scalar(values, n_clusters, mode="exact").error
        excess = cluster_scalar(values, n_clusters).error / best - 1
        assert excess.max() <= allowed, (n_clusters, excess.max())


def test_excess_where_many_values_are_few_numbers() -> None:
    """Denormal float32 numbers lie on a grid; where a bit more may lie inside of atoms, the excess is 1.0012e-5."""
    rng = np.random.RandomState(392)
    for choices in (5, 8, 5):
        rng.choice(choices)
    values = torch.from_numpy((rng.randn(1, 90_000) * 1e-41).astype(np.float32))
    errors = []
    for mode in ("fast", "exact"):
        found = cluster_scalar(values, 8, mode=mode)
        decoded = found.centroids[0, :, 0].double()[found.indices[0].long()]
        errors.append(((decoded - values.double()) * 2.0**100).square().sum())
    assert errors[0] <= errors[1] * (1 + 1e-5)


def test_excess_on_trained_weights(trained_weights: list[torch.Tensor]) -> None:
    """Weights of a trained network, in one group, 1 to 8 bits."""
    values = torch.cat([weight.flatten() for weight in trained_weights]).repeat(6)
    values = (values + 1e-4 * torch.randn(values.shape, generator=torch.Generator().manual_seed(0))).unsqueeze(0)
    for bits in range(1, 9):
        fast, exact = (cluster_scalar(values, 2**bits, mode=mode).error.item() for mode in ("fast", "exact"))
        assert fast <= exact * (1 + (1e-5 if bits <= 4 else 1e-4 if bits <= 6 else 5e-4)), bits


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [50, LONG])
def test_few_values_are_exact_and_padded(mode: str, dtype: torch.dtype, length: int) -> None:
    """With fewer values than entries the last one is repeated, and no index refers to a repetition."""
    values = torch.tensor([-1.5, -0.0, 0.0, 2.0, 2.25], dtype=dtype).repeat(length // 5).unsqueeze(0)
    result = cluster_scalar(values, 16, mode=mode)
    expected = torch.tensor([-1.5, 0.0, 2.0] + [2.25] * 13, dtype=torch.float64)
    assert torch.equal(result.centroids[0, :, 0], expected)
    assert result.error.item() == 0
    assert result.indices.max() == 3
    assert torch.equal(result.decode().squeeze(2), values.double())


@pytest.mark.parametrize("value", [0.0, 3.5, 1e-30, -1e30])
@pytest.mark.parametrize("length", [1, 40, LONG])
def test_constant_values(value: float, length: int) -> None:
    """One value gives one entry, without error."""
    result = cluster_scalar(torch.full((2, length), value), 256)
    assert result.error.tolist() == [0, 0]
    assert (result.centroids == torch.tensor(value).double()).all()
    assert (result.indices == 0).all()


@pytest.mark.parametrize("power", [-100, -40, 60])
@pytest.mark.parametrize("length", [3000, LONG])
def test_size_of_the_values_does_not_matter(power: int, length: int) -> None:
    """Weights of 2^-100 are served like weights of one."""
    values = torch.randn((1, length), generator=torch.Generator().manual_seed(0))
    plain, scaled = cluster_scalar(values, 64), cluster_scalar(values * 2.0**power, 64)
    assert (scaled.error / 4.0**power).item() == pytest.approx(plain.error.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [900, LONG])
def test_labels_are_the_nearest_and_the_error_is_theirs(dtype: torch.dtype, length: int) -> None:
    """Indices are those of ``assign``, whichever way the row took."""
    values = torch.randn((2, length), generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = torch.rand((2, length), generator=torch.Generator().manual_seed(1))
    for some in (None, weights):
        result = cluster_scalar(values, 37, weights=some)
        assert torch.equal(result.indices, assign(values, result.centroids))
        made = clustering_error(values, result.indices, result.centroids, weights=some)
        torch.testing.assert_close(result.error, made, rtol=1e-9, atol=0)


def test_groups_are_independent() -> None:
    """A group is clustered the same alone and among others, also when others need the exact mode."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((4, LONG), generator=generator)
    values[1] = 1 + 1e-5 * values[1]
    values[2] = 0
    together = cluster_scalar(values, 16)
    for row in range(4):
        alone = cluster_scalar(values[row : row + 1], 16)
        assert torch.equal(alone.centroids[0], together.centroids[row])
        assert torch.equal(alone.indices[0], together.indices[row])


@pytest.mark.parametrize("length", [500, LONG])
def test_values_without_weight_only_get_labels(length: int) -> None:
    """Entries serve what weighs something; a group that weighs nothing is clustered without weights."""
    values = torch.arange(length, dtype=torch.float32).unsqueeze(0) % 400
    weights = (values < 8).float()
    result = cluster_scalar(values, 8, weights=weights)
    assert result.error.item() == 0
    assert result.centroids.flatten().tolist() == list(range(8))
    assert torch.equal(result.indices, values.clamp(max=7).to(torch.uint8))
    idle = cluster_scalar(values, 8, weights=torch.zeros_like(values))
    assert torch.equal(idle.centroids, cluster_scalar(values, 8).centroids)


def test_views_and_gradients() -> None:
    """Any strides, and tensors that require gradients."""
    values = torch.randn((300, 4), generator=torch.Generator().manual_seed(0), requires_grad=True)
    result = cluster_scalar(values.t(), 8)
    assert torch.equal(result.indices, cluster_scalar(values.detach().t().clone(), 8).indices)
    assert not result.centroids.requires_grad


def test_more_values_than_one_reading() -> None:
    """Counts of several histograms are added."""
    values = torch.randn((1, 2_300_000), generator=torch.Generator().manual_seed(0)).half().float()
    result = cluster_scalar(values, 16)
    exact = cluster_scalar(values.half(), 16, mode="exact")
    assert result.error.item() <= exact.error.item() * (1 + 1e-5)
    assert torch.equal(result.indices, assign(values, result.centroids))
