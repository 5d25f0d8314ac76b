"""Labels: the index of the nearest centroid of every value, and the error that remains."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import compiled, inlined, reordering

_Floats = npt.NDArray[np.float64]
_Labels = npt.NDArray[np.uint8]

_BLOCK = 4096
_SEARCHED = 512
TREE = 16
"""Most entries of a palette for :func:`label_by_tree`."""
_COMPARED = 32


@compiled
def thresholds_of(centroids: _Floats, wide: bool) -> _Floats:
    """Midpoints between neighbours of an ascending palette, infinity from its last different entry on.

    A value belongs to label l when it lies above threshold l - 1 and not above threshold l, so ties go to the
    lower index. Unless ``wide``, midpoints are rounded down to float32: no float32 lies between.
    """
    n = centroids.size
    thresholds = np.full(n, math.inf)
    for i in range(n - 1):
        if centroids[i] == centroids[n - 1]:
            break
        middle = 0.5 * centroids[i] + 0.5 * centroids[i + 1]
        if not wide:
            narrow = np.float32(middle)
            if np.float64(narrow) > middle:
                narrow = np.nextafter(narrow, np.float32(-math.inf))
            middle = np.float64(narrow)
        thresholds[i] = middle
    return thresholds


@reordering
def squared_error(values: npt.NDArray[np.floating], labels: _Labels, centroids: _Floats) -> float:
    """Σ (value - centroid)² over a short run of values."""
    total = 0.0
    for i in range(values.size):
        off = np.float64(values[i]) - centroids[labels[i]]
        total += off * off
    return total


@reordering
def weighted_squared_error(
    values: npt.NDArray[np.floating],
    weights: npt.NDArray[np.floating],
    labels: _Labels,
    centroids: _Floats,
) -> float:
    """Σ weight · (value - centroid)² over a short run of values."""
    total = 0.0
    for i in range(values.size):
        off = np.float64(values[i]) - centroids[labels[i]]
        total += np.float64(weights[i]) * off * off
    return total


@compiled
def error_of(
    values: npt.NDArray[np.floating],
    weights: npt.NDArray[np.floating],
    labels: _Labels,
    centroids: _Floats,
) -> float:
    """Squared error of labelled values, weighted unless ``weights`` is empty."""
    total = 0.0
    for start in range(0, values.size, _BLOCK):
        stop = min(start + _BLOCK, values.size)
        if weights.size > 0:
            total += weighted_squared_error(values[start:stop], weights[start:stop], labels[start:stop], centroids)
        else:
            total += squared_error(values[start:stop], labels[start:stop], centroids)
    return total


@compiled
def label_by_tree(values: npt.NDArray[np.floating], thresholds: npt.NDArray[np.floating], labels: _Labels) -> None:
    """Binary search among up to 16 thresholds by selections alone, so that vector registers fill.

    Thresholds and values have one dtype; those that are missing count as infinite, the sixteenth always does.
    """
    t = np.full(TREE, np.inf, thresholds.dtype)
    t[: thresholds.size] = thresholds
    t0, t1, t2, t3, t4, t5, t6, t7 = t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    t8, t9, t10, t11, t12, t13, t14 = t[8], t[9], t[10], t[11], t[12], t[13], t[14]
    for i in range(values.size):
        value = values[i]
        eight = value > t7
        four = value > (t11 if eight else t3)
        middle = (t13 if four else t9) if eight else (t5 if four else t1)
        two = value > middle
        upper = (t14 if two else t12) if four else (t10 if two else t8)
        lower = (t6 if two else t4) if four else (t2 if two else t0)
        one = value > (upper if eight else lower)
        labels[i] = 8 * np.int32(eight) + 4 * np.int32(four) + 2 * np.int32(two) + np.int32(one)


@compiled
def label_by_search(values: npt.NDArray[np.floating], thresholds: npt.NDArray[np.floating], labels: _Labels) -> None:
    """Count the thresholds below each value, for a block of values at a time so that vector registers fill.

    Some thresholds are compared one by one, more by binary search. They have the dtype of the values.
    """
    if thresholds.size <= TREE:
        label_by_tree(values, thresholds, labels)
        return
    widest = 1
    while widest < thresholds.size:
        widest *= 2
    padded = np.empty(widest, thresholds.dtype)
    for i in range(widest):
        padded[i] = thresholds[i] if i < thresholds.size else np.inf
    places = np.empty(_SEARCHED, np.int32)
    for start in range(0, values.size, _SEARCHED):
        size = min(_SEARCHED, values.size - start)
        for i in range(size):
            places[i] = 0
        if widest <= _COMPARED:
            block = values[start : start + size]
            for threshold in padded[:-1]:
                for i in range(block.size):
                    places[i] += np.int32(block[i] > threshold)
        step = widest // 2 if widest > _COMPARED else 0
        while step > 0:
            for i in range(size):
                place = places[i]
                places[i] = place + step if values[start + i] > padded[place + step - 1] else place
            step >>= 1
        for i in range(size):
            labels[start + i] = places[i]


@compiled
def label_ordered_rows(rows: npt.NDArray[np.floating], palettes: _Floats, labels: npt.NDArray[np.uint8]) -> None:
    """Labels ``[R, N]`` of ``rows [R, N]`` in ``palettes [R, K]`` that ascend, the last entry maybe repeated."""
    for i in range(rows.shape[0]):
        thresholds = thresholds_of(palettes[i], rows.itemsize == 8).astype(rows.dtype)
        label_by_search(rows[i], thresholds, labels[i])


@inlined
def _start(code: np.uint32, table: npt.NDArray[np.uint32], first: _Labels) -> np.uint8:
    entry = table[code >> np.uint32(16)]
    label: np.uint8 = first[(entry >> np.uint32(5)) + ((code & np.uint32(0xFFFF)) >> (entry & np.uint32(31)))]
    return label


@compiled
def label_by_bins(
    values: npt.NDArray[np.float32],
    table: npt.NDArray[np.uint32],
    first: _Labels,
    most: int,
    thresholds: npt.NDArray[np.float32],
    labels: _Labels,
) -> None:
    """The bin of a value gives the label to start from; up to ``most`` thresholds in the bin move it on."""
    codes = values.view(np.uint32)
    done = 0
    if most <= 1:
        quarter = values.size // 4
        for i in range(quarter):
            for stream in range(4):
                place = i + stream * quarter
                label = _start(codes[place], table, first)
                labels[place] = label + (values[place] > thresholds[label])
        done = 4 * quarter
    for i in range(done, values.size):
        label = _start(codes[i], table, first)
        while values[i] > thresholds[label]:
            label += 1
        labels[i] = label


@compiled
def label_by_cell(
    values: npt.NDArray[np.float32], first: _Labels, thresholds: npt.NDArray[np.float32], labels: _Labels
) -> None:
    """Like :func:`label_by_bins` where no cell (the upper 16 bits) holds more than one threshold: one look-up less."""
    codes = values.view(np.uint32)
    quarter = values.size // 4
    for i in range(quarter):
        for stream in range(4):
            place = i + stream * quarter
            label = first[codes[place] >> np.uint32(16)]
            labels[place] = label + (values[place] > thresholds[label])
    for i in range(4 * quarter, codes.size):
        label = first[codes[i] >> np.uint32(16)]
        labels[i] = label + (values[i] > thresholds[label])


@compiled
def label_by_code(codes: npt.NDArray[np.uint16], of_code: _Labels, labels: _Labels) -> None:
    """Labels of 16-bit values from a table over all patterns."""
    for i in range(codes.size):
        labels[i] = of_code[codes[i]]


@compiled
def moments_by_label(
    points: npt.NDArray[np.floating],
    weights: npt.NDArray[np.floating],
    labels: _Labels,
    centroids: _Floats,
    masses: _Floats,
    offsets: _Floats,
    squares: _Floats,
) -> None:
    """Add weight (or one), weight · (point - centroid) and weight · (point - centroid)² to each label's rows.

    ``points`` is ``[N, D]``, ``masses`` ``[K]``, the others ``[K, D]``.
    """
    for i in range(labels.size):
        label = labels[i]
        weight = np.float64(weights[i]) if weights.size > 0 else 1.0
        masses[label] += weight
        for d in range(points.shape[1]):
            off = np.float64(points[i, d]) - centroids[label, d]
            offsets[label, d] += weight * off
            squares[label, d] += weight * off * off
