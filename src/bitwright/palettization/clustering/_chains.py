"""Several descents over the same vectors in one compiled call: calls cost more than the work in small groups."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import compiled
from bitwright.palettization.clustering._breathing import breathe
from bitwright.palettization.clustering._lloyd import run_lloyd
from bitwright.palettization.clustering._seeding import seed_centroids

__all__ = ["best_chain"]

_Real = npt.NDArray[np.floating]


@compiled
def best_chain(
    points: npt.NDArray[np.float32],
    weights: _Real,
    n_clusters: int,
    seedings: int,
    trial: int,
    breaths: tuple[int, int],
    steps: int,
    states: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.float32], float]:
    """The best of several chains; each takes the best of some seedings and improves it.

    Args:
        points: ``[N, D]``, centred and scaled.
        weights: ``[N]``, or empty.
        n_clusters: entries of the palette, K.
        seedings: how many k-means++ draws a chain begins with.
        trial: steps of Lloyd's algorithm that tell good draws from bad ones.
        breaths: centroids that breathing begins with, and the steps between two changes of their number.
        steps: of Lloyd's algorithm at the end of a chain, until nothing moves; 0 for none.
        states: ``[T]``, the random stream of each chain; advanced.

    Returns:
        centroids ``[K, D]`` and their squared error; of equal ones the first.
    """
    best = np.empty((n_clusters, points.shape[1]), np.float32)
    least = np.inf
    for turn in range(states.size):
        state = states[turn : turn + 1]
        chosen, error = best, np.inf
        for _ in range(seedings):
            seeds = seed_centroids(points, weights, n_clusters, state)
            centroids = np.empty((n_clusters, points.shape[1]), np.float32)
            for k in range(n_clusters):
                centroids[k] = seeds[min(k, len(seeds) - 1)]
            found = run_lloyd(points, weights, centroids, trial, 1e-3)
            if found < error:
                chosen, error = centroids, found
        chosen, error = breathe(points, weights, chosen, error, breaths[0], breaths[1], state)
        if steps > 0:  # to the end: chains that have not come to rest rank wrongly
            error = run_lloyd(points, weights, chosen, steps, 0.0)
        if turn == 0 or error < least:
            best, least = chosen, error
    return best, least
