"""Palettes of many rows at once, each row sorted; used for short rows and wherever nothing may be rounded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import compiled
from bitwright.palettization.clustering._atoms import fill_centroids

_Floats = npt.NDArray[np.float64]


@compiled
def atoms_of_sorted(row: npt.NDArray[np.floating], weights: npt.NDArray[np.floating]) -> tuple[_Floats, _Floats]:
    """Different values and their counts, or sums of weights; values of no weight are left out."""
    size = 1
    for i in range(1, row.size):
        size += row[i] != row[i - 1]
    values = np.empty(size)
    masses = np.zeros(size)
    at = 0
    values[0] = row[0]
    for i in range(row.size):
        if row[i] != values[at]:
            if masses[at] > 0.0:
                at += 1
            values[at] = row[i]
        masses[at] += weights[i] if weights.size > 0 else 1.0
    if masses[at] == 0.0 and at > 0:
        at -= 1
    return values[: at + 1], masses[: at + 1]


@compiled
def cluster_sorted_rows(
    rows: npt.NDArray[np.floating],
    weights: npt.NDArray[np.floating],
    n_clusters: int,
    tolerance: float,
    centroids: _Floats,
    errors: _Floats,
    careful: bool | None,
) -> None:
    """Cluster ascending rows ``[R, N]``; see :func:`~._atoms.fill_centroids` for tolerance and ``careful``.

    ``weights`` is ``[R, N]`` in the same order with a positive sum in each row, or has no rows. Writes
    ``centroids [R, n_clusters]`` and the errors, ``errors [R]``.
    """
    for i in range(rows.shape[0]):
        some = weights[i] if weights.shape[0] > 0 else weights.reshape(-1)
        values, masses = atoms_of_sorted(rows[i], some)
        _, errors[i] = fill_centroids(values, masses, n_clusters, tolerance, centroids[i], careful)
