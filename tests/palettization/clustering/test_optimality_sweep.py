"""Both modes against an independent dynamic program: kinds of weights, with and without importances, 1 to 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

from bitwright.palettization.clustering import cluster_scalar

from .references import error_of

Floats = npt.NDArray[np.float64]

EXACT = 1e-9
ALLOWED = {bits: 1e-5 if bits <= 4 else 1e-4 if bits <= 6 else 5e-4 for bits in range(1, 9)}
ALLOWED_IN_GROUPS = ALLOWED | {8: 1e-3}

KINDS: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.floating]]] = {
    "gaussian": lambda rng, n: 0.02 * rng.normal(size=n),
    "laplace": lambda rng, n: 0.05 * rng.laplace(size=n),
    "student": lambda rng, n: 0.03 * rng.standard_t(3, size=n),
    "constant": lambda rng, n: np.full(n, -0.37),
    "few": lambda rng, n: rng.integers(-20, 20, size=n) * 0.03,
    "half": lambda rng, n: rng.normal(size=n).astype(np.float16),
    "sparse": lambda rng, n: rng.normal(size=n) * (rng.uniform(size=n) < 0.4),
    "tiny": lambda rng, n: 2e-30 * rng.normal(size=n),
    "huge": lambda rng, n: 3e30 * rng.laplace(size=n),
}


@numba.njit
def _fill(left: int, right: int, first: int, last: int, before: Floats, after: Floats, sums: Floats) -> None:
    """``after[stop]`` = least ``before[start]`` + cost of the run from start to stop; best starts ascend with stops."""
    if left > right:
        return
    stop = (left + right) // 2
    best, at = np.inf, first
    for start in range(first, min(stop - 1, last) + 1):
        mass = sums[0, stop] - sums[0, start]
        offset = sums[1, stop] - sums[1, start]
        cost = sums[2, stop] - sums[2, start] - offset * offset / mass
        if before[start] + cost < best:
            best, at = before[start] + cost, start
    after[stop] = best
    _fill(left, stop - 1, first, at, before, after, sums)
    _fill(stop + 1, right, at, last, before, after, sums)


def optimal_errors_by_bits(values: Floats, weights: Floats | None) -> list[float]:
    """Least squared errors with 2, 4, ... 256 entries, layer by layer in float64 (Grønlund et al. 2017, section 2)."""
    points, place = np.unique(values.astype(np.float64), return_inverse=True)
    mass = np.bincount(place, weights).astype(np.float64)
    points, mass = points[mass > 0], mass[mass > 0]
    size = max(np.abs(points).max(), np.finfo(np.float64).tiny)
    centred = points / size - np.average(points / size, weights=mass)
    sums = np.zeros((3, points.size + 1))
    for power in range(3):
        sums[power, 1:] = np.cumsum((mass * centred**power).astype(np.longdouble))
    layer = np.full(points.size + 1, np.inf)
    layer[0] = 0.0
    found, least = [], np.inf
    for count in range(1, 257):
        after = np.full(points.size + 1, np.inf)
        if count <= points.size:
            _fill(1, points.size, 0, points.size - 1, layer, after, sums)
            layer = after
            least = max(min(least, layer[-1]), 0.0)
        else:
            least = 0.0
        if count & (count - 1) == 0 and count > 1:
            found.append(least * size * size)
    return found


def check(values: torch.Tensor, weights: torch.Tensor | None, allowed: dict[int, float], bits: range) -> None:
    """Every group's excess error over the optimum, in both modes."""
    rows = [None] * len(values) if weights is None else [row.double().numpy() for row in weights]
    best = [optimal_errors_by_bits(row.double().numpy(), mass) for row, mass in zip(values, rows, strict=True)]
    for mode in ("exact", "fast"):
        for width in bits:
            result = cluster_scalar(values, 1 << width, weights=weights, mode=mode)
            made = error_of(values.unsqueeze(2), result.decode(), weights)
            power = error_of(values.unsqueeze(2), torch.zeros_like(values).unsqueeze(2), weights)
            optimal = torch.tensor([row[width - 1] for row in best], dtype=torch.float64)
            limit = optimal * (1 + (EXACT if mode == "exact" else allowed[width])) + 1e-15 * power
            assert (made <= limit).all(), (mode, width, (made / optimal - 1).max().item())


def drawn(kind: str, groups: int, length: int, weighted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    rng = np.random.default_rng(7 + len(kind))
    values = torch.from_numpy(np.stack([KINDS[kind](rng, length) for _ in range(groups)]).astype(np.float32))
    weights = (
        torch.from_numpy(rng.exponential(size=(groups, length)).astype(np.float32) ** 3 + 1e-3) if weighted else None
    )
    return values, weights


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_small_sweep(kind: str, weighted: bool) -> None:
    """Groups of some thousand weights, and one row that is long enough for a histogram."""
    check(*drawn(kind, 2, 3000, weighted), ALLOWED_IN_GROUPS, range(1, 9))
    if kind in ("gaussian", "student"):
        check(*drawn(kind, 1, 40_000, weighted), ALLOWED, range(2, 9, 2))


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("groups", "length"), [(1, 300_000), (4, 16_384), (2, 65_536)])
def test_wide_sweep(kind: str, groups: int, length: int, weighted: bool) -> None:
    """One palette for the tensor, and groups as layers of 256 to 4096 inputs have them."""
    allowed = ALLOWED if groups == 1 else ALLOWED_IN_GROUPS
    check(*drawn(kind, groups, length, weighted), allowed, range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_wide_sweep_on_trained_weights(trained_weights: list[torch.Tensor], weighted: bool) -> None:
    """Whole matrices, groups of 16 output channels, and single channels."""
    matrix = trained_weights[0]
    for rows in (len(matrix), 16, 1):
        values = matrix.reshape(len(matrix) // rows, -1)
        weights = values.abs() ** 3 + 1e-4 if weighted else None
        check(values, weights, ALLOWED if rows == len(matrix) else ALLOWED_IN_GROUPS, range(1, 9))
