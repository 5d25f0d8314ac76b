"""The optimal partition of sorted atoms into k clusters, without a table of n × k entries.

The squared error of a run of sorted points obeys the quadrangle inequality, so the error of the best partition,
as a function of the number of clusters, is convex. Charging a fixed price per cluster therefore reaches every
count at some price, and the cheapest partition at one price is a least-weight path that a queue of candidates
finds in O(n log n) time and O(n) memory (Wilber 1988; Galil and Park 1990). The price is searched so that the
count comes out as k (Aggarwal, Schieber and Tokuyama 1994, for 1-D k-means Grønlund et al. 2017, section 3);
each price also proves a lower bound on the error, and where the count jumps over k, two paths of equal price
are spliced into one with exactly k clusters. The time hardly depends on k.

Arrays: ``moments`` is (n + 1, 4): prefix sums of weight, weight·x, weight·x², and a column for the path lengths.
``residue`` is (n + 1, 3), the low halves of the same sums in double-double arithmetic, or None: then the careful
arithmetic, which few weights need, is not even compiled. Sums start at the middle atom and run outwards, so that
outliers do not blur the bulk.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import called, inlined

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int32]
_Residue = _Floats | None

_MAX_PRICES = 100
_LEAST = 1e-300  # for runs whose weights vanish in the sums
_SPLITTER = 134217729.0  # 2^27 + 1 cuts a double into two halves (Dekker 1971)


@inlined
def _product_error(a: float, b: float, product: float) -> float:
    """What rounding took from ``product = a * b``, exactly (Dekker 1971)."""
    c = _SPLITTER * a
    a_high = c - (c - a)
    a_low = a - a_high
    c = _SPLITTER * b
    b_high = c - (c - b)
    b_low = b - b_high
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


@inlined
def _difference_error(a: float, b: float, difference: float) -> float:
    """What rounding took from ``difference = a - b``, exactly (Knuth, TAOCP 2, 4.2.2)."""
    part = a - difference
    return (a - (difference + part)) + (part - b)


@inlined
def _difference(moments: _Floats, residue: _Floats, start: int, stop: int, column: int) -> tuple[float, float]:
    """A sum over the run as the nearest double and what that leaves."""
    high = moments[stop, column] - moments[start, column]
    low = _difference_error(moments[stop, column], moments[start, column], high)
    low += residue[stop, column] - residue[start, column]
    total = high + low
    return total, low - (total - high)


@called
def _careful_error(moments: _Floats, residue: _Floats, start: int, stop: int) -> float:
    """Squared error of the run in double-double: Σwx² - rΣwx - r(Σwx - rΣw), less what centring at r left."""
    weight, weight_low = _difference(moments, residue, start, stop, 0)
    first, first_low = _difference(moments, residue, start, stop, 1)
    second, second_low = _difference(moments, residue, start, stop, 2)
    weight = max(weight, _LEAST)
    centre = first / weight
    product = centre * weight
    left = (first - product) - _product_error(centre, weight, product) + (first_low - centre * weight_low)
    product = centre * first
    error = (second - product) - _product_error(centre, first, product)
    error += second_low - centre * first_low - centre * left
    error -= left * left / weight
    return max(error, 0.0)


@inlined
def _run_error(moments: _Floats, residue: _Residue, start: int, stop: int) -> float:
    """Squared error of atoms ``start`` to ``stop - 1`` around their mean."""
    if residue is not None:
        return _careful_error(moments, residue, start, stop)
    first = moments[stop, 1] - moments[start, 1]
    weight = max(moments[stop, 0] - moments[start, 0], _LEAST)
    error: float = (moments[stop, 2] - moments[start, 2]) - first * first / weight
    return max(error, 0.0)


@inlined
def _length_via(moments: _Floats, residue: _Residue, start: int, stop: int) -> float:
    length: float = moments[start, 3] + _run_error(moments, residue, start, stop)
    return length


@called
def _first_win(moments: _Floats, residue: _Residue, new: int, old: int, lost: int) -> int:
    """First stop after ``lost`` at which a last run from ``new`` beats one from ``old``; n + 1 if none does.

    Once it wins it wins for good (quadrangle inequality). Steps double from ``lost``, since wins mostly follow
    each other by one.
    """
    n: int = moments.shape[0] - 1
    step = 1
    while True:
        won: int = min(lost + step, n)
        if _length_via(moments, residue, new, won) < _length_via(moments, residue, old, won):
            break
        if won == n:
            return n + 1
        lost = won
        step *= 2
    while won - lost > 1:
        middle = (lost + won) >> 1
        if _length_via(moments, residue, new, middle) < _length_via(moments, residue, old, middle):
            won = middle
        else:
            lost = middle
    return won


@called
def _trace(moments: _Floats, residue: _Residue, price: float, before: _Ints, queue: _Ints, starts: _Ints) -> int:
    """Least-weight path from 0 to n at ``price`` per run: fills column 3 and ``before``; returns the runs.

    ``queue[head : tail + 1]`` holds the starts of last runs that win somewhere ahead, each from ``starts`` on.
    """
    n: int = moments.shape[0] - 1
    moments[0, 3] = 0.0
    head = tail = 0
    queue[0] = 0
    starts[0] = 1
    for stop in range(1, n + 1):
        while head < tail and starts[head + 1] <= stop:
            head += 1
        moments[stop, 3] = _length_via(moments, residue, queue[head], stop) + price
        before[stop] = queue[head]
        if stop == n:
            break
        while True:
            old = queue[tail]
            here = max(starts[tail], stop + 1)
            if _length_via(moments, residue, stop, here) >= _length_via(moments, residue, old, here):
                won = _first_win(moments, residue, stop, old, here)
                if won <= n:
                    tail += 1
                    queue[tail] = stop
                    starts[tail] = won
                break
            if tail == head:
                queue[tail] = stop
                starts[tail] = here
                break
            tail -= 1
    runs = 0
    while stop > 0:
        stop = before[stop]
        runs += 1
    return runs


@called
def _bounds_of(before: _Ints, runs: int) -> _Ints:
    bounds = np.empty(runs + 1, np.int32)
    stop = before.size - 1
    for run in range(runs, 0, -1):
        bounds[run] = stop
        stop = before[stop]
    bounds[0] = 0
    return bounds


@called
def _splice(few: _Ints, many: _Ints, n_clusters: int) -> _Ints:
    """A partition into ``n_clusters`` runs made of the head of ``few`` and the tail of ``many``.

    They are joined where a run of ``few`` covers the run of ``many`` that lies ``len(many) - n_clusters`` places
    later, so that by the quadrangle inequality the two ways of crossing over cost no more than the two paths.
    """
    shift = many.size - 1 - n_clusters
    at = 0
    while not (few[at] <= many[at + shift] and many[at + shift + 1] <= few[at + 1]):
        at += 1
    bounds = np.empty(n_clusters + 1, np.int32)
    for i in range(bounds.size):
        bounds[i] = few[i] if i <= at else many[i + shift]
    return bounds


@called
def _total_error(moments: _Floats, residue: _Residue, bounds: _Ints) -> float:
    total = 0.0
    for run in range(bounds.size - 1):
        total += _run_error(moments, residue, bounds[run], bounds[run + 1])
    return total


@inlined
def _next_price(
    step: int, n_clusters: int, price: float, runs: int, low: tuple[float, int, float], high: tuple[float, int, float]
) -> float:
    """Where to look next; ``low`` and ``high`` are (price, runs, error) on either side, runs 0 where unknown.

    The error falls about as 1 / k², so the price as 1 / k³. Every third time the price of the chord between the
    two sides is taken, which halves the bracket whatever the data and ends exactly at a tie.
    """
    ratio = (runs / n_clusters) ** 3
    least = 1.0 + 0.02 * 4.0 ** min(step, 10)
    if high[1] == 0:
        return price * min(max(ratio, least), 1e6)
    if low[1] == 0:
        return price * max(min(ratio, 1.0 / least), 1e-6)
    if step % 3 == 2:
        return (high[2] - low[2]) / (low[1] - high[1])
    part = math.log(low[1] / n_clusters) / math.log(low[1] / high[1])
    following: float = low[0] ** (1.0 - part) * high[0] ** part
    return following


@called
def _fill_up(bounds: _Ints, n_clusters: int, n: int) -> _Ints:
    """Any partition into ``n_clusters`` runs that refines ``bounds``."""
    filled = np.empty(n_clusters + 1, np.int32)
    missing = n_clusters + 1 - bounds.size
    at = 0
    place = 0
    for bound in range(n + 1):
        given = at < bounds.size and bounds[at] == bound
        if given or missing > 0:
            filled[place] = bound
            place += 1
            at += given
            missing -= not given
    return filled


@called
def cheapest_partition(
    moments: _Floats, residue: _Residue, n_clusters: int, price: float, tolerance: float
) -> tuple[_Ints, float, float]:
    """Best partition of n atoms into ``n_clusters`` runs, 2 <= n_clusters < n, to within ``tolerance``.

    Args:
        moments: prefix sums, see the module; column 3 is overwritten.
        residue: their low halves, or None.
        n_clusters: number of runs.
        price: a first guess of the price, positive.
        tolerance: stop when the error is proved to be within this fraction of the optimum.

    Returns:
        bounds int32 ``[n_clusters + 1]``, the squared error, and the price that was reached.
    """
    n = moments.shape[0] - 1
    before = np.empty(n + 1, np.int32)
    queue = np.empty(n + 1, np.int32)
    starts = np.empty(n + 1, np.int32)
    few = np.empty(2, np.int32)
    few[0] = 0
    few[1] = n
    many = few
    best = few
    error = math.inf
    bound = 0.0
    low = (0.0, 0, 0.0)
    high = (0.0, 0, 0.0)
    for step in range(_MAX_PRICES):
        runs = _trace(moments, residue, price, before, queue, starts)
        bounds = _bounds_of(before, runs)
        found = _total_error(moments, residue, bounds)
        if runs == n_clusters:
            return bounds, found, price
        bound = max(bound, found + price * (runs - n_clusters))
        if runs > n_clusters:
            low, many = (price, runs, found), bounds
        else:
            high, few = (price, runs, found), bounds
        if low[1] > 0 and high[1] > 0:
            joined = _splice(few, many, n_clusters)
            found = _total_error(moments, residue, joined)
            if found < error:
                best, error = joined, found
            if error - bound <= tolerance * error:
                return best, error, price
        following = _next_price(step, n_clusters, price, runs, low, high)
        if low[1] > 0 and high[1] > 0 and not low[0] < following < high[0]:
            following = 0.5 * (low[0] + high[0])
            if not low[0] < following < high[0]:
                break
        price = following
    if math.isinf(error):
        best = _fill_up(few, n_clusters, n)
        error = _total_error(moments, residue, best)
    return best, error, price
