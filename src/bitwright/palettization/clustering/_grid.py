"""The best palette whose entries lie on a given grid, by dynamic programming over the grid."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import called, compiled, inlined
from bitwright.palettization.clustering._atoms import centred_moments

_Floats = npt.NDArray[np.float64]


@inlined
def _around(moments: _Floats, start: int, stop: int, level: float) -> float:
    """Squared error of atoms ``start`` to ``stop - 1`` around ``level``."""
    weight = moments[stop, 0] - moments[start, 0]
    first = moments[stop, 1] - moments[start, 1]
    error: float = (moments[stop, 2] - moments[start, 2]) - level * (2.0 * first - level * weight)
    return error


@called
def _gaps(values: _Floats, moments: _Floats, levels: _Floats) -> _Floats:
    """Error ``[G + 1, G + 1]`` of the atoms between two neighbouring entries, i < j, at levels i - 1 and j - 1.

    Row 0 stands for the atoms below the first entry, so ``[0, j]`` is what lies below level j - 1; what lies
    above the last entry is left to the caller.
    """
    count = levels.size
    at = np.searchsorted(values, levels)
    errors = np.zeros((count + 1, count + 1))
    for j in range(count):
        errors[0, j + 1] = _around(moments, 0, at[j], levels[j])
        for i in range(j):
            middle = at[i] + np.searchsorted(values[at[i] : at[j]], 0.5 * (levels[i] + levels[j]), side="right")
            errors[i + 1, j + 1] = _around(moments, at[i], middle, levels[i])
            errors[i + 1, j + 1] += _around(moments, middle, at[j], levels[j])
    return errors


@compiled
def choose_levels(
    values: _Floats, weights: _Floats, levels: _Floats, n_clusters: int, chosen: npt.NDArray[np.int64]
) -> int:
    """Fill ``chosen`` with the ascending places of the ``n_clusters`` levels of least squared error.

    Args:
        values: atoms, strictly ascending; overwritten.
        weights: their positive weights.
        levels: the grid, strictly ascending.
        n_clusters: entries to choose, at most the number of levels.
        chosen: int64 ``[n_clusters]``, written.

    The best last-but-one entry moves up with the last one and with their number (quadrangle inequality, Knuth
    1971), which leaves O(G²) candidates for G levels.
    """
    centre = values[values.size // 2]
    exponent = math.frexp(max(abs(values[0] - centre), abs(values[-1] - centre), 1e-300))[1]
    scale = math.ldexp(1.0, -exponent)
    for i in range(values.size):
        values[i] = (values[i] - centre) * scale
    moments = centred_moments(values, weights)
    grid = (levels - centre) * scale
    errors = _gaps(values, moments, grid)
    count = levels.size
    at = np.searchsorted(values, grid)
    best = errors[0].copy()
    before = np.zeros((n_clusters + 1, count + 2), np.int64)
    for k in range(2, n_clusters + 1):
        row = np.full(count + 1, math.inf)
        before[k, count + 1] = count
        for j in range(count, k - 1, -1):
            low = max(before[k - 1, j], k - 1)
            high = min(before[k, j + 1], j - 1)
            for i in range(low, max(high, low) + 1):
                error = best[i] + errors[i, j]
                if error < row[j]:
                    row[j] = error
                    before[k, j] = i
        best = row
    last = n_clusters
    least = math.inf
    for j in range(n_clusters, count + 1):
        error = best[j] + _around(moments, at[j - 1], values.size, grid[j - 1])
        if error < least:
            least = error
            last = j
    for k in range(n_clusters, 0, -1):
        chosen[k - 1] = last - 1
        last = before[k, last]
    return n_clusters
