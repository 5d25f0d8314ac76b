"""Exact scalar clustering reaches the optimum that a full dynamic program finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.palettization.clustering import assign, cluster_scalar

from .references import DISTRIBUTIONS, error_of, optimal_error_of_many, optimal_errors

COUNTS = [2**bits for bits in range(9)] + [3, 100]


def check_optimal(
    values: torch.Tensor, weights: torch.Tensor | None = None, *, scale: float = 1.0, dtype: type = np.float64
) -> None:
    """Every number of clusters is within 1e-9 of the optimum, and the error told is the error made."""
    mass = None if weights is None else weights[0].double().numpy()
    best = optimal_errors(values[0].double().numpy() / scale, max(COUNTS), mass, dtype)
    for count in COUNTS:
        result = cluster_scalar(values, count, weights=weights, mode="exact")
        made = error_of(values.double().unsqueeze(2) / scale, result.decode() / scale, weights)
        assert made.item() <= best[count - 1] * (1 + 1e-9), count
        assert result.error.item() / scale / scale == pytest.approx(made.item(), rel=1e-6), count
        assert torch.equal(result.indices, assign(values, result.centroids)), count
        assert (result.centroids.diff(dim=1) >= 0).all(), count


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
def test_optimal_for_every_number_of_bits(name: str, weighted: bool) -> None:
    """Within 1e-9 of the optimal squared error for 1 to 8 bits."""
    rng = np.random.default_rng(len(name))
    dtype, length = (np.longdouble, 150) if name == "two modes" else (np.float64, 300)
    values = torch.tensor(DISTRIBUTIONS[name](rng, length), dtype=torch.float32).unsqueeze(0)
    weights = torch.tensor(rng.exponential(size=(1, length)) ** 3, dtype=torch.float32) if weighted else None
    check_optimal(values, weights, scale=values.abs().max().double().item(), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_optimal_for_every_dtype(dtype: torch.dtype) -> None:
    """The values count as they are, whatever their dtype."""
    values = torch.randn((1, 300), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check_optimal((1 + 1e-2 * values).to(dtype))


def test_optimal_beyond_single_precision() -> None:
    """Differences that only float64 can tell apart are clustered all the same."""
    values = 1 + 1e-9 * torch.randn((1, 200), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check_optimal(values, dtype=np.longdouble)


@pytest.mark.parametrize(("name", "count"), [("normal", 16), ("student", 50), ("integers", 4)])
def test_optimal_for_thousands_of_values(name: str, count: int) -> None:
    """Longer rows, against divide and conquer in extended precision."""
    values = DISTRIBUTIONS[name](np.random.default_rng(0), 3000).astype(np.float32)
    result = cluster_scalar(torch.from_numpy(values).unsqueeze(0), count, mode="exact")
    best = optimal_error_of_many(values, count)
    assert result.error.item() == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("count", [100, 300, 400, 700])
def test_number_of_clusters_inside_a_tie(count: int) -> None:
    """Evenly spaced values cost the same per cluster over a range of counts, so no price singles one out."""
    n, count = 1024, min(count, 256)
    result = cluster_scalar(torch.arange(n, dtype=torch.float32).unsqueeze(0), count, mode="exact")
    small, larger = divmod(n, count)
    expected = (count - larger) * small * (small**2 - 1) / 12 + larger * (small + 1) * ((small + 1) ** 2 - 1) / 12
    assert result.error.item() == pytest.approx(expected, rel=1e-12)
    assert result.centroids.unique().numel() == count


def test_optimal_on_trained_weights(trained_weights: list[torch.Tensor]) -> None:
    """Output rows of a trained network as groups, 4 bits."""
    for weight in trained_weights:
        groups = weight[:10]
        result = cluster_scalar(groups, 16, mode="exact")
        for row, error in zip(groups, result.error, strict=True):
            assert error.item() <= optimal_errors(row.double().numpy(), 16)[-1] * (1 + 1e-9)


def test_weights_of_very_different_size() -> None:
    """Values that weigh next to nothing do not disturb those that matter, nor make the result undefined."""
    rng = np.random.default_rng(0)
    values = torch.tensor(rng.normal(size=(1, 200)), dtype=torch.float32)
    weights = torch.tensor(10.0 ** rng.uniform(-12, 6, size=(1, 200)), dtype=torch.float32)
    check_optimal(values, weights, dtype=np.longdouble)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e4, 1e4, width=32), st.integers(0, 5)), min_size=1, max_size=40),
    st.integers(1, 12),
)
def test_optimal_for_any_values(pairs: list[tuple[float, int]], count: int) -> None:
    """Repetitions, zeros of either sign and weights of zero included."""
    values = torch.tensor([[value for value, _ in pairs]], dtype=torch.float32)
    weights = torch.tensor([[float(weight) for _, weight in pairs]])
    if weights.sum() == 0:
        weights += 1
    result = cluster_scalar(values, count, weights=weights, mode="exact")
    best = optimal_errors(values[0].double().numpy() + 0.0, count, weights[0].double().numpy(), np.longdouble)
    slack = 1e-25 * float(values.double().square().max()) * 40
    assert result.error.item() <= best[-1] * (1 + 1e-9) + slack


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("scale", [1e-300, 1e-308, 1e-310, 1e-317])
def test_values_below_the_normal_range(scale: float, mode: str) -> None:
    """Their reciprocal is no number; they are clustered as if they were larger."""
    values = torch.randint(1, 200, (1, 60), generator=torch.Generator().manual_seed(0)).double()
    plain, tiny = cluster_scalar(values, 4, mode=mode), cluster_scalar(values * scale, 4, mode=mode)
    assert torch.equal(tiny.indices, plain.indices)
    torch.testing.assert_close(tiny.centroids / scale, plain.centroids, rtol=1e-5, atol=0)
