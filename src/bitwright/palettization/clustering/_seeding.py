"""k-means++ seeding of vectors. Random numbers are SplitMix64 (Steele, Lea and Flood 2014), one stream per run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import called, reordering

_Floats = npt.NDArray[np.float64]
_Real = npt.NDArray[np.floating]
_Column = npt.NDArray[np.float32]

_BLOCK = 512


@called
def draw(state: npt.NDArray[np.uint64]) -> float:
    """The next uniform number in [0, 1) of a SplitMix64 stream."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    bits = state[0]
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return np.float64(bits >> np.uint64(11)) * 2.0**-53


@called
def _place_of(chances: _Floats, left: float) -> tuple[int, float]:
    """Where the sum of the chances passes ``left``, and how much of it is left there; never where there is none."""
    last, remainder = 0, 0.0
    for i in range(chances.size):
        if chances[i] > 0.0:
            last, remainder = i, left
            if left < chances[i]:
                break
            left -= chances[i]
    return last, remainder


@reordering
def _gather_chances(distances: _Column, weights: _Real, chances: _Floats) -> float:
    """Write the chances of points by their squared distances and weights; returns their sum."""
    total = 0.0
    if weights.size > 0:
        for i in range(distances.size):
            chances[i] = distances[i] * np.float64(weights[i])
            total += chances[i]
    else:
        for i in range(distances.size):
            chances[i] = distances[i]
            total += chances[i]
    return total


@called
def _approach(columns: npt.NDArray[np.float32], start: int, stop: int, centroid: _Column, nearest: _Column) -> None:
    """Lower the squared distances of some points to that from a new centroid where it is nearer."""
    far = np.zeros(stop - start, np.float32)
    for d in range(columns.shape[0]):
        column, here = columns[d, start:stop], centroid[d]
        for i in range(far.size):
            far[i] += (column[i] - here) * (column[i] - here)
    for i in range(far.size):
        nearest[i] = min(nearest[i], far[i])


@reordering
def seed_centroids(
    points: npt.NDArray[np.float32], weights: _Real, n_clusters: int, state: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float32]:
    """k-means++ (Arthur and Vassilvitskii 2007): each next centroid is a point drawn by its weighted squared
    distance to the nearest one so far. Ends early, with fewer rows, when no point is away from a centroid."""
    n, dims = points.shape
    columns = np.ascontiguousarray(points.T)
    centroids = np.empty((n_clusters, dims), np.float32)
    nearest = np.ones(n, np.float32)
    chances = np.empty(n)
    totals = np.zeros(-(-n // _BLOCK))
    for k in range(n_clusters):
        for block in range(totals.size):
            start, stop = block * _BLOCK, min((block + 1) * _BLOCK, n)
            if k > 0:
                _approach(columns, start, stop, centroids[k - 1], nearest[start:stop])
            some = weights[start:stop] if weights.size > 0 else weights
            totals[block] = _gather_chances(nearest[start:stop], some, chances[start:stop])
        if not totals.sum() > 0.0:
            return centroids[:k].copy()
        block, left = _place_of(totals, draw(state) * totals.sum())
        start = block * _BLOCK
        place, _ = _place_of(chances[start : min(start + _BLOCK, n)], left)
        for d in range(dims):
            centroids[k, d] = points[start + place, d]
        if k == 0:
            nearest[:] = np.inf
    return centroids
