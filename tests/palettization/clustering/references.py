"""Independent truths for clustering, and the values it is tried on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.floating]
Draw = Callable[[np.random.Generator, int], Floats]

DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, n: 0.02 * rng.normal(size=n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "student": lambda rng, n: rng.standard_t(2, size=n),
    "uniform": lambda rng, n: rng.uniform(size=n),
    "lognormal": lambda rng, n: rng.lognormal(0, 2, size=n),
    "offset": lambda rng, n: 1 + 1e-3 * rng.normal(size=n),
    "two modes": lambda rng, n: np.sign(rng.normal(size=n)) + 1e-4 * rng.normal(size=n),
    "outlier": lambda rng, n: np.append(rng.normal(size=n - 1), 1e6),
    "integers": lambda rng, n: rng.integers(-200, 200, size=n).astype(float),
    "few": lambda rng, n: rng.integers(0, 30, size=n) * 0.1,
    "sparse": lambda rng, n: rng.normal(size=n) * (rng.uniform(size=n) < 0.2),
    "tiny": lambda rng, n: 1e-30 * rng.normal(size=n),
    "huge": lambda rng, n: 1e30 * rng.normal(size=n),
    "subnormal": lambda rng, n: 1e-41 * rng.normal(size=n),
}


def run_errors(values: Floats, weights: Floats) -> Floats:
    """Squared error of every run ``[start, stop]`` of sorted points, by Welford's update; infinity off it."""
    n = values.size
    errors = np.full((n + 1, n + 1), np.inf, dtype=values.dtype)
    mean, mass, spread = (np.zeros(n, dtype=values.dtype) for _ in range(3))
    for stop in range(n):
        here = slice(0, stop + 1)
        off = values[stop] - mean[here]
        grown = mass[here] + weights[stop]
        spread[here] += weights[stop] * off * off * mass[here] / grown
        mean[here] += off * weights[stop] / grown
        mass[here] = grown
        errors[here, stop + 1] = spread[here]
    return errors


def optimal_errors(values: Floats, most: int, weights: Floats | None = None, dtype: type = np.float64) -> list[float]:
    """Least squared errors of partitions of a few hundred points into 1 to ``most`` clusters, by a full table."""
    points, place = np.unique(values, return_inverse=True)
    mass = np.bincount(place, weights).astype(dtype)
    points, mass = points[mass > 0].astype(dtype), mass[mass > 0]
    errors = run_errors(points, mass)
    best = errors[0].copy()
    found = [float(best[-1])]
    for _ in range(1, most):
        best = (best[:, None] + errors).min(0)
        best[0] = np.inf
        found.append(min(float(best[-1]), found[-1]))
    return found


def optimal_error_of_many(values: Floats, n_clusters: int) -> float:
    """The same for thousands of points, by divide and conquer over each layer (Grønlund et al. 2017)."""
    points = np.sort(values.astype(np.longdouble))
    points -= points[points.size // 2]
    first = np.concatenate([[0], np.cumsum(points)])
    second = np.concatenate([[0], np.cumsum(points * points)])
    n = points.size

    def costs(starts: npt.NDArray[np.intp], stop: int) -> Floats:
        part = first[stop] - first[starts]
        return second[stop] - second[starts] - part * part / (stop - starts)

    best = np.full(n + 1, np.inf, dtype=np.longdouble)
    best[0] = 0
    for _ in range(n_clusters):
        layer = np.full(n + 1, np.inf, dtype=np.longdouble)
        todo = [(1, n, 0, n - 1)]
        while todo:
            low, high, left, right = todo.pop()
            if low > high:
                continue
            middle = (low + high) // 2
            starts = np.arange(left, min(middle - 1, right) + 1)
            totals = best[starts] + costs(starts, middle)
            at = int(np.argmin(totals))
            layer[middle] = totals[at]
            todo += [(low, middle - 1, left, int(starts[at])), (middle + 1, high, int(starts[at]), right)]
        best = layer
    return float(best[n])


def nearest(values: torch.Tensor, palettes: torch.Tensor) -> torch.Tensor:
    """Index of the nearest entry in float64, the first of equals; ``[P, N, D]`` and ``[P, K, D]``."""
    far = sum((values[:, :, None, d].double() - palettes[:, None, :, d].double()) ** 2 for d in range(values.shape[2]))
    return torch.from_numpy(np.argmin(far.numpy(), axis=2)).to(torch.uint8)


def error_of(values: torch.Tensor, decoded: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Weighted squared error of every group in float64; ``[P, N, D]``."""
    off = (values.double() - decoded.double()).square().sum(2)
    return (off if weights is None else off * weights.double()).sum(1)
