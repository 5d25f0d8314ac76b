"""Where a partition may cut: evenly over all atoms first, then ever finer near the bounds that came out.

A cut costs a look in every path that is traced, but few of the places between atoms are near the bounds of a good
partition. Some dozens of cuts per run, spread as the density wants them, find the bounds to within a part of a run, and
all places around those find them exactly. There may be a better partition far from these bounds, mostly one that has
moved a run from one tail to the other. So a last path is traced over finer cuts everywhere and the places near the
bounds: what it does not improve is as good as the best, to within what those cuts lose, about 0.2 / (cuts per run)² of
the error.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import called
from bitwright.palettization.clustering._paths import cheapest_partition

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int32]

_COARSE = 1e-5
_FINE = 1e-7
_LEAST = 2048
_PER_RUN = 160
_MANY = 6144  # cuts from which on there are fewer per run, since more error is allowed
_PER_RUN_OF_MANY = 32
_DENSER = 4
_FINER = 16
_REACH = 2  # cuts to either side of a bound between which the next ones are finer
_ROUNDS = 8
_CHECKS = 3
_SUSPICIOUS = 0.1  # cuts that lose more than this at first were too coarse to trust
_FILL_STEPS = 6
_CUBE_ROOT_BIAS = 0x2A9F7893782DA1CE  # two thirds of the exponent bias, less a little for the mantissa


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
    before = math.inf
    for _ in range(_FILL_STEPS):
        rest = 0.0
        used = 0.0
        for i in range(measure.size):
            cap = caps[i] if caps.size > 1 else caps[0]
            full = measure[i] >= cap * unit
            used += cap if full else 0.0
            rest += 0.0 if full else measure[i]
        if used == 0.0 or used >= target or rest == 0.0 or unit > 0.98 * before:
            break
        before = unit
        unit = rest / (target - used)
    return unit


@called
def _strides(values: _Floats, moments: _Floats, stride: int) -> _Floats:
    """weight^(1/3) · distance^(2/3) from every ``stride``-th atom to the next of these.

    Its integral sets the density of an optimal quantizer's cells (Panter and Dite 1951).
    """
    n = values.size
    measure = np.empty((n + stride - 1) // stride)
    for piece in range(measure.size):
        start = piece * stride
        stop = min(start + stride, n)
        width = values[min(stop, n - 1)] - values[start]
        measure[piece] = (moments[stop, 0] - moments[start, 0]) * width * width
    cube_roots(measure)
    return measure


@called
def likely_price(values: _Floats, moments: _Floats, n_clusters: int) -> float:
    """What one more cluster saves where density is smooth: a cell of one unit has the error unit³ / 12, and the
    total falls as 1 / k²."""
    stride = max(1, values.size // (8 * n_clusters))
    return spread_unit(_strides(values, moments, stride), np.full(1, float(stride)), n_clusters) ** 3 / 6.0


@called
def _even_cuts(values: _Floats, moments: _Floats, target: int) -> _Ints:
    """About ``target`` cuts where an optimal quantizer would want them: ascending from 0 to the number of atoms."""
    n = values.size
    stride = max(1, n // target)
    measure = _strides(values, moments, stride)
    unit = spread_unit(measure, np.full(1, float(stride)), target)
    cuts = np.zeros(n + 1, np.int32)
    size = 1
    along = 0.0
    for piece in range(measure.size):
        after = along + min(measure[piece] / unit, float(stride))
        new = int(after) - int(along)
        along = after
        start = piece * stride
        length = min(stride, n - start)
        for turn in range(new):
            at = start + (turn + 1) * length // new
            if cuts[size - 1] < at < n:
                cuts[size] = at
                size += 1
    cuts[size] = n
    return cuts[: size + 1].copy()


@called
def _joined(some: _Ints, others: _Ints) -> _Ints:
    """The cuts of both, ascending."""
    cuts = np.empty(some.size + others.size, np.int32)
    size = i = j = 0
    while i < some.size or j < others.size:
        if j == others.size or (i < some.size and some[i] <= others[j]):
            cut = some[i]
            i += 1
        else:
            cut = others[j]
            j += 1
        if size == 0 or cut > cuts[size - 1]:
            cuts[size] = cut
            size += 1
    return cuts[:size].copy()


@called
def _finer_cuts(cuts: _Ints, places: _Ints) -> _Ints:
    """Sixteen times as many cuts within some cuts of ``cuts[places]``, no others, but for the two ends."""
    near = np.zeros((2 * _REACH * _FINER + 1) * places.size + 2, np.int32)
    size = 1
    at = 0
    for place in places[1:-1]:
        first = max(place - _REACH, at)
        at = min(place + _REACH, cuts.size - 1)
        for cell in range(first, at):
            length = cuts[cell + 1] - cuts[cell]
            for part in range(_FINER):
                cut = cuts[cell] + part * length // _FINER
                if cut > near[size - 1]:
                    near[size] = cut
                    size += 1
        if near[size - 1] < cuts[at] < cuts[-1]:
            near[size] = cuts[at]
            size += 1
    near[size] = cuts[-1]
    return near[: size + 1].copy()


@called
def _partition(
    moments: _Floats, cuts: _Ints, n_clusters: int, price: float, tolerance: float
) -> tuple[_Ints, float, float]:
    """:func:`~._paths.cheapest_partition` of the atoms between cuts; its bounds are places in ``cuts``."""
    between = np.empty((cuts.size, 4))
    for i in range(cuts.size):
        for column in range(3):
            between[i, column] = moments[cuts[i], column]
    places, error, price = cheapest_partition(between, None, n_clusters, price, tolerance)
    return places, error, price


@called
def _resolved(cuts: _Ints, places: _Ints) -> bool:
    """Whether the places next to all bounds were looked at."""
    missed = 0
    for place in places[1:-1]:
        missed += cuts[place - 1] != cuts[place] - 1 or cuts[place + 1] != cuts[place] + 1
    return missed == 0


@called
def refined_partition(values: _Floats, moments: _Floats, n_clusters: int) -> tuple[_Ints, float, float, bool]:
    """A partition of many atoms that no shift of its bounds by some part of a run improves.

    Args:
        values: ascending ``[n]``, many more than ``n_clusters`` >= 2.
        moments: their prefix sums, see :mod:`._paths`.
        n_clusters: number of runs.

    Returns:
        bounds int32 ``[n_clusters + 1]``, the squared error, the price that was reached, and whether the partition may
        be trusted to be as good as the best.
    """
    target = max(min(_PER_RUN * n_clusters, max(_MANY, _PER_RUN_OF_MANY * n_clusters)), _LEAST)
    price = likely_price(values, moments, n_clusters)
    cuts = _even_cuts(values, moments, target // _DENSER)
    everywhere = _even_cuts(values, moments, target)
    if cuts.size <= 2 * n_clusters:
        return cuts, np.inf, price, False
    places, error, price = _partition(moments, cuts, n_clusters, price, _COARSE)
    at_first = error
    found = cuts[places]
    trusted = False
    for _ in range(_CHECKS):
        for _ in range(_ROUNDS):
            if _resolved(cuts, places):
                break
            cuts = _finer_cuts(cuts, places)
            places, error, _ = _partition(moments, cuts, n_clusters, price, _FINE)
        found = cuts[places]
        cuts = _joined(cuts, everywhere)
        places, error, price = _partition(moments, cuts, n_clusters, price, _FINE)
        trusted = bool(np.all(cuts[places] == found))
        if trusted:
            break
    return cuts[places], error, price, trusted and error >= (1.0 - _SUSPICIOUS) * at_first
