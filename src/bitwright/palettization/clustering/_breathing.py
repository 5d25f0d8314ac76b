"""Breathing k-means: how a palette of vectors leaves a local optimum of Lloyd's algorithm."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import called, compiled
from bitwright.palettization.clustering._lloyd import run_lloyd
from bitwright.palettization.clustering._nearest import BLOCK, block_for, find_two_nearest, padded, turn_over
from bitwright.palettization.clustering._seeding import draw

_Floats = npt.NDArray[np.float64]
_Real = npt.NDArray[np.floating]


@called
def _stakes(
    points: npt.NDArray[np.float32], weights: _Real, centroids: npt.NDArray[np.float32]
) -> tuple[_Floats, _Floats]:
    """What each centroid leaves as error ``[K]``, and by how much the error would rise without it ``[K]``."""
    n_clusters, dims = centroids.shape
    errors = np.zeros(n_clusters)
    losses = np.zeros(n_clusters)
    entries = padded(centroids)
    block = block_for(entries)
    nearest = np.empty(BLOCK, np.int32)
    centre = np.zeros(dims)
    for start in range(0, points.shape[0], BLOCK):
        size = min(BLOCK, points.shape[0] - start)
        turn_over(points, start, size, centre, 1.0, block)
        find_two_nearest(block, entries, nearest)
        for i in range(size):
            weight = np.float64(weights[start + i]) if weights.size > 0 else 1.0
            errors[nearest[i]] += weight * block[i]
            losses[nearest[i]] += weight * (block[BLOCK + i] - block[i])
    return errors, losses


@called
def _ascending(entries: _Floats) -> npt.NDArray[np.int64]:
    """Places of a few entries in ascending order, equal ones by place."""
    order = np.empty(entries.size, np.int64)
    for i in range(entries.size):
        at = i
        while at > 0 and entries[order[at - 1]] > entries[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
    return order


@called
def _expendable(centroids: npt.NDArray[np.float32], losses: _Floats, count: int) -> npt.NDArray[np.bool_]:
    """Which ``count`` centroids to drop: those of least loss, but no two that stand in for each other."""
    order = _ascending(losses)
    dropped = np.zeros(order.size, np.bool_)
    kept = np.zeros(order.size, np.bool_)
    left = count
    n_kept = 0
    for k in order:
        if left == 0 or kept[k]:
            continue
        dropped[k] = True
        left -= 1
        nearest = -1
        least = np.inf
        for other in range(order.size):
            far = 0.0
            for d in range(centroids.shape[1]):
                far += (centroids[k, d] - centroids[other, d]) ** 2
            if far < least and not dropped[other]:
                least = far
                nearest = other
        if n_kept < order.size - count and not kept[nearest]:
            kept[nearest] = True
            n_kept += 1
    for k in order:
        if left > 0 and not dropped[k]:
            dropped[k] = True
            left -= 1
    return dropped


@compiled
def breathe(
    points: npt.NDArray[np.float32],
    weights: _Real,
    centroids: npt.NDArray[np.float32],
    error: float,
    breath: int,
    steps: int,
    state: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.float32], float]:
    """Leave a local optimum of Lloyd's algorithm (breathing k-means, Fritzke 2020, arXiv 2006.15666).

    ``breath`` centroids are added where the error is largest, Lloyd's algorithm runs, the ones least missed are
    dropped, and it runs again; what does not lower the error is undone and ``breath`` halved.

    Returns:
        centroids of the same shape and their squared error.
    """
    n_clusters, dims = centroids.shape
    spread = 0.01 * math.sqrt(error / points.size)
    while breath > 0:
        errors, _ = _stakes(points, weights, centroids)
        worst = _ascending(-errors)
        grown = np.empty((n_clusters + breath, dims), np.float32)
        for k in range(n_clusters + breath):
            added = k >= n_clusters
            source = worst[k - n_clusters] if added else k
            for d in range(dims):
                away = spread * (2.0 * draw(state) - 1.0) if added else 0.0
                grown[k, d] = centroids[source, d] + away
        run_lloyd(points, weights, grown, steps, 1e-3)
        _, losses = _stakes(points, weights, grown)
        dropped = _expendable(grown, losses, breath)
        trial = np.empty((n_clusters, dims), np.float32)
        place = 0
        for k in range(n_clusters + breath):
            if not dropped[k]:
                for d in range(dims):
                    trial[place, d] = grown[k, d]
                place += 1
        found = run_lloyd(points, weights, trial, steps, 1e-3)
        if found < error * (1.0 - 1e-3):
            centroids, error = trial, found
        else:
            breath //= 2
    return centroids, error
