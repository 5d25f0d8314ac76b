"""Atoms: sorted distinct values with weights, what the partition works on; made, merged and clustered here."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import called, compiled, inlined
from bitwright.palettization.clustering._paths import (
    _difference_error,
    _product_error,
    cheapest_partition,
)

_Floats = npt.NDArray[np.float64]

_COARSE = 512
_FILL_STEPS = 6
_NOISE = 2.0**-52
_CUBE_ROOT_BIAS = 0x2A9F7893782DA1CE  # two thirds of the exponent bias, less a little for the mantissa
_ONE = np.ones(1)


@called
def cube_roots(entries: _Floats) -> None:
    """Replace non-negative doubles by their cube roots to within 6 %: a third of the bits as an integer."""
    bits = entries.view(np.int64)
    for i in range(bits.size):
        bits[i] = bits[i] // 3 + _CUBE_ROOT_BIAS


@called
def spread_unit(measure: _Floats, caps: _Floats, target: int) -> float:
    """The unit at which Σ min(cap, measure / unit) comes to ``target``, to a few percent.

    What cannot be divided must not eat the whole budget: an outlier's distance is huge, yet it is one step.
    ``caps`` has one entry for all, or one for each.
    """
    total = 0.0
    for entry in measure:
        total += entry
    unit = total / target
    for _ in range(_FILL_STEPS):
        rest = 0.0
        used = 0.0
        for i in range(measure.size):
            cap = caps[i] if caps.size > 1 else caps[0]
            if measure[i] >= cap * unit:
                used += cap
            else:
                rest += measure[i]
        if used == 0.0 or used >= target or rest == 0.0:
            break
        unit = rest / (target - used)
    return unit


@called
def _spacing(values: _Floats, weights: _Floats) -> _Floats:
    """weight^(1/3) · distance^(2/3) between neighbours, whose integral sets the density of an optimal
    quantizer's cells (Panter and Dite 1951)."""
    measure = np.empty(max(values.size - 1, 0))
    for i in range(measure.size):
        gap = values[i + 1] - values[i]
        measure[i] = 0.5 * (weights[i] + weights[i + 1]) * gap * gap
    cube_roots(measure)
    return measure


@called
def _merged(values: _Floats, weights: _Floats, measure: _Floats, unit: float) -> tuple[_Floats, _Floats]:
    """Neighbouring atoms joined until each joint atom spans about one unit; positions are weighted means."""
    size = 1
    along = 0.0
    for i in range(measure.size):
        after = along + min(measure[i] / unit, 1.0)
        size += int(after) > int(along)
        along = after
    positions = np.empty(size)
    masses = np.empty(size)
    along = 0.0
    at = 0
    anchor = values[0]
    mass = weights[0]
    offset = 0.0
    for i in range(measure.size):
        after = along + min(measure[i] / unit, 1.0)
        if int(after) > int(along):
            positions[at] = anchor + offset / mass
            masses[at] = mass
            at += 1
            anchor = values[i + 1]
            mass = 0.0
            offset = 0.0
        mass += weights[i + 1]
        offset += weights[i + 1] * (values[i + 1] - anchor)
        along = after
    positions[at] = anchor + offset / mass
    masses[at] = mass
    return positions, masses


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
def _likely_price(values: _Floats, weights: _Floats, n_clusters: int) -> float:
    """What one more cluster saves where density is smooth: a cell of one unit has the error unit³ / 12, and the
    total falls as 1 / k²."""
    return spread_unit(_spacing(values, weights), _ONE, n_clusters) ** 3 / 6.0


@called
def _solved(
    values: _Floats, weights: _Floats, n_clusters: int, tolerance: float, careful: bool | None
) -> tuple[npt.NDArray[np.int32], float]:
    """Bounds and error of the best partition of more than ``n_clusters`` >= 2 atoms of size around one.

    Unless ``careful`` the error is NaN where rounding may have decided about the partition.
    """
    price = 0.0
    coarse = max(_COARSE, 16 * n_clusters)
    if values.size > 4 * coarse:
        measure = _spacing(values, weights)
        positions, masses = _merged(values, weights, measure, spread_unit(measure, _ONE, coarse))
        if positions.size > n_clusters:
            price = _likely_price(positions, masses, n_clusters)
            _, _, price = cheapest_partition(centred_moments(positions, masses), None, n_clusters, price, 1e-4)
    if price == 0.0:
        price = _likely_price(values, weights, n_clusters)
    if careful is None:
        moments = centred_moments(values, weights)
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
    limit: int,
    tolerance: float,
    centroids: _Floats,
    careful: bool | None,
) -> tuple[int, float]:
    """Fill ``centroids`` ascending with the best ``n_clusters`` for weighted atoms.

    Args:
        values: strictly ascending, finite, at least one; overwritten.
        weights: positive; overwritten.
        n_clusters: number of clusters.
        limit: where there are more than twice as many atoms, they are merged to about this many first.
        tolerance: relative to the optimal error of the (merged) atoms.
        centroids: float64 ``[n_clusters]``, written; the last one is repeated when there are fewer atoms.
        careful: None for float64 arithmetic, True for twice its precision.

    Returns:
        the number of different centroids and the squared error of the (merged) atoms around them, in units of
        the given weights; NaN where the careful arithmetic is needed.
    """
    if values.size <= n_clusters:
        for i in range(centroids.size):
            centroids[i] = values[min(i, values.size - 1)]
        return values.size, 0.0
    exponent = math.frexp(max(abs(values[0]), abs(values[-1])))[1]
    scale = math.ldexp(1.0, -exponent)
    centre = values[values.size // 2] * scale
    heaviest = 0.0
    for weight in weights:
        heaviest = max(heaviest, weight)
    unit_mass = math.ldexp(1.0, math.frexp(heaviest)[1])  # a power of two keeps counts exact
    for i in range(values.size):
        values[i] = values[i] * scale - centre
        weights[i] /= unit_mass
    positions, masses = values, weights
    if positions.size > 2 * limit:
        measure = _spacing(positions, masses)
        positions, masses = _merged(positions, masses, measure, spread_unit(measure, _ONE, limit))
    if n_clusters == 1 or positions.size <= n_clusters:
        bounds = np.empty(min(n_clusters, positions.size) + 1, np.int32)
        for i in range(bounds.size):
            bounds[i] = i
        bounds[-1] = positions.size
        error = 0.0
    else:
        bounds, error = _solved(positions, masses, n_clusters, tolerance, careful)
    used = bounds.size - 1
    for cluster in range(used):
        start = bounds[cluster]
        mass = 0.0
        offset = 0.0
        for i in range(start, bounds[cluster + 1]):
            mass += masses[i]
            offset += masses[i] * (positions[i] - positions[start])
        centroids[cluster] = (positions[start] + offset / mass + centre) / scale
        if n_clusters == 1:
            mean = positions[start] + offset / mass
            for i in range(positions.size):
                error += masses[i] * (positions[i] - mean) ** 2
    for i in range(used, centroids.size):
        centroids[i] = centroids[used - 1]
    return used, error * unit_mass / scale / scale


def cluster_atoms(
    values: _Floats, weights: _Floats, n_clusters: int, limit: int, tolerance: float, centroids: _Floats
) -> tuple[int, float]:
    """:func:`fill_centroids` with the arithmetic that the atoms need; ``values`` and ``weights`` stay as they are."""
    used, error = fill_centroids(values.copy(), weights.copy(), n_clusters, limit, tolerance, centroids, None)
    if math.isnan(error):
        used, error = fill_centroids(values.copy(), weights.copy(), n_clusters, limit, tolerance, centroids, True)
    return used, error
