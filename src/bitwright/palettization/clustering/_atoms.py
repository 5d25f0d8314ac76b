"""Atoms: sorted distinct values with weights, what the partition works on; made and clustered here."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import called, compiled, inlined
from bitwright.palettization.clustering._cuts import likely_price, refined_partition
from bitwright.palettization.clustering._paths import (
    _difference_error,
    _product_error,
    cheapest_partition,
)

_Floats = npt.NDArray[np.float64]

_MANY = 2048  # atoms, from which on a partition is sought in two stages
_LOOSE = 1e-7  # tolerance from which on the two stages are enough
_NOISE = 2.0**-52


@called
def centred_moments(values: _Floats, weights: _Floats) -> _Floats:
    """Prefix sums (n + 1, 4) that are zero at the middle and run outwards."""
    n = values.size
    moments = np.zeros((n + 1, 4))
    middle = n // 2
    for i in range(middle, n):
        term = weights[i] * values[i]
        moments[i + 1, 0] = moments[i, 0] + weights[i]
        moments[i + 1, 1] = moments[i, 1] + term
        moments[i + 1, 2] = moments[i, 2] + term * values[i]
    for i in range(middle - 1, -1, -1):
        term = weights[i] * values[i]
        moments[i, 0] = moments[i + 1, 0] - weights[i]
        moments[i, 1] = moments[i + 1, 1] - term
        moments[i, 2] = moments[i + 1, 2] - term * values[i]
    return moments


@inlined
def _accumulate(
    moments: _Floats, residue: _Floats, source: int, target: int, column: int, term: float, low: float
) -> None:
    total = moments[source, column] + term
    residue[target, column] = residue[source, column] + low + _difference_error(moments[source, column], -term, total)
    moments[target, column] = total


@called
def _careful_moments(values: _Floats, weights: _Floats) -> tuple[_Floats, _Floats]:
    """:func:`centred_moments` in double-double: high halves (n + 1, 4) and low halves (n + 1, 3)."""
    n = values.size
    moments = np.zeros((n + 1, 4))
    residue = np.zeros((n + 1, 3))
    middle = n // 2
    for turn in range(n):
        if turn < n - middle:
            i = middle + turn
            source, target, sign = i, i + 1, 1.0
        else:
            i = n - 1 - turn
            source, target, sign = i + 1, i, -1.0
        weight = sign * weights[i]
        first = weight * values[i]
        first_low = _product_error(weight, values[i], first)
        second = first * values[i]
        second_low = _product_error(first, values[i], second) + first_low * values[i]
        _accumulate(moments, residue, source, target, 0, weight, 0.0)
        _accumulate(moments, residue, source, target, 1, first, first_low)
        _accumulate(moments, residue, source, target, 2, second, second_low)
    return moments, residue


@called
def _solved(
    values: _Floats, weights: _Floats, n_clusters: int, tolerance: float, careful: bool | None
) -> tuple[npt.NDArray[np.int32], float]:
    """Bounds and error of the best partition of more than ``n_clusters`` >= 2 atoms of size around one.

    Unless ``careful`` the error is NaN where rounding may have decided about the partition.
    """
    moments = centred_moments(values, weights)
    bounds = np.zeros(1, np.int32)
    error = math.inf
    trusted = False
    if values.size > max(_MANY, 32 * n_clusters):
        bounds, error, price, trusted = refined_partition(values, moments, n_clusters)
    else:
        price = likely_price(values, moments, n_clusters)
    if careful is None:
        if not trusted or tolerance < _LOOSE:
            bounds, error, _ = cheapest_partition(moments, None, n_clusters, price, tolerance)
        noise = _NOISE * (moments[-1, 2] - moments[0, 2])
        if noise > 0.01 * max(tolerance, 1e-9) * error:
            error = math.nan
    else:
        moments, residue = _careful_moments(values, weights)
        bounds, error, _ = cheapest_partition(moments, residue, n_clusters, price, tolerance)
    return bounds, error


@compiled
def fill_centroids(
    values: _Floats,
    weights: _Floats,
    n_clusters: int,
    tolerance: float,
    centroids: _Floats,
    careful: bool | None,
) -> tuple[int, float]:
    """Fill ``centroids`` ascending with the best ``n_clusters`` for weighted atoms.

    Args:
        values: strictly ascending, finite, at least one; overwritten.
        weights: positive; overwritten.
        n_clusters: number of clusters.
        tolerance: relative to the optimal error of the atoms; a loose one need not be proved.
        centroids: float64 ``[n_clusters]``, written; the last one is repeated when there are fewer atoms.
        careful: None for float64 arithmetic, True for twice its precision.

    Returns:
        the number of different centroids and the squared error of the atoms around them, in units of the given
        weights; NaN where the careful arithmetic is needed.
    """
    if values.size <= n_clusters:
        for i in range(centroids.size):
            centroids[i] = values[min(i, values.size - 1)]
        return values.size, 0.0
    exponent = math.frexp(max(abs(values[0]), abs(values[-1]), 1e-300))[1]  # 2^1024 is no number
    scale = math.ldexp(1.0, -exponent)
    centre = values[values.size // 2] * scale
    heaviest = 0.0
    for weight in weights:
        heaviest = max(heaviest, weight)
    unit_mass = math.ldexp(1.0, math.frexp(heaviest)[1])  # a power of two keeps counts exact
    for i in range(values.size):
        values[i] = values[i] * scale - centre
        weights[i] /= unit_mass
    if n_clusters == 1:
        bounds = np.zeros(2, np.int32)
        bounds[1] = values.size
        error = 0.0
    else:
        bounds, error = _solved(values, weights, n_clusters, tolerance, careful)
    used = bounds.size - 1
    for cluster in range(used):
        start = bounds[cluster]
        mass = 0.0
        offset = 0.0
        for i in range(start, bounds[cluster + 1]):
            mass += weights[i]
            offset += weights[i] * (values[i] - values[start])
        centroids[cluster] = (values[start] + offset / mass + centre) / scale
        if n_clusters == 1:
            mean = values[start] + offset / mass
            for i in range(values.size):
                error += weights[i] * (values[i] - mean) ** 2
    for i in range(used, centroids.size):
        centroids[i] = centroids[used - 1]
    return used, error * unit_mass / scale / scale


def cluster_atoms(
    values: _Floats, weights: _Floats, n_clusters: int, tolerance: float, centroids: _Floats
) -> tuple[int, float]:
    """:func:`fill_centroids` with the arithmetic that the atoms need; ``values`` and ``weights`` stay as they are."""
    used, error = fill_centroids(values.copy(), weights.copy(), n_clusters, tolerance, centroids, None)
    if math.isnan(error):
        used, error = fill_centroids(values.copy(), weights.copy(), n_clusters, tolerance, centroids, True)
    return used, error
