"""Nearest centroids: squared distances of a block of vectors to four centroids at a time.

A block holds its vectors turned over, so that vector registers run over points, and everything that is computed for
them lies in the same array at fixed distances: the compiler then knows without asking that nothing overlaps. Four
centroids share what is loaded for a pair of coordinates, which is what limits a loop over one centroid.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import called

_Floats = npt.NDArray[np.float64]
_Real = npt.NDArray[np.floating]
_Labels = npt.NDArray[np.int32]

BLOCK = 256
"""Points of a block."""

_SIZE = np.uint64(BLOCK)  # unsigned: a signed index could count from the end, which loops would have to check
_SECOND = np.uint64(1) * _SIZE
_FIRST_FAR = np.uint64(2) * _SIZE
_SECOND_FAR = np.uint64(3) * _SIZE
_THIRD_FAR = np.uint64(4) * _SIZE
_FOURTH_FAR = np.uint64(5) * _SIZE
_COORDINATES = np.uint64(6)


@called
def padded(centroids: _Real) -> _Real:
    """Centroids ``[K, D]`` with an even number of coordinates and a multiple of four rows; those added are far away."""
    count, dims = centroids.shape
    made = np.full((-(-count // 4) * 4, dims + dims % 2), np.inf, centroids.dtype)
    made[:count, dims:] = 0.0
    made[:count, :dims] = centroids
    return made


@called
def block_for(centroids: _Real) -> _Real:
    """Room for a block that is compared with padded centroids."""
    return np.zeros((int(_COORDINATES) + centroids.shape[1]) * BLOCK, centroids.dtype)


@called
def turn_over(points: _Real, start: int, size: int, centre: _Floats, scale: float, block: _Real) -> None:
    """Write ``scale · (points[start : start + size] - centre)`` into the coordinates of ``block``."""
    for d in range(points.shape[1]):
        row = (_COORDINATES + np.uint64(d)) * _SIZE
        for i in range(size):
            block[row + np.uint64(i)] = (points[start + i, d] - centre[d]) * scale


@called
def _measure(block: _Real, centroids: _Real, k: int) -> None:
    """Write the squared distances to the padded centroids k to k + 3 into their rows of the block."""
    for d in range(0, centroids.shape[1], 2):
        row = (_COORDINATES + np.uint64(d)) * _SIZE
        a, a_other = centroids[k, d], centroids[k, d + 1]
        b, b_other = centroids[k + 1, d], centroids[k + 1, d + 1]
        c, c_other = centroids[k + 2, d], centroids[k + 2, d + 1]
        e, e_other = centroids[k + 3, d], centroids[k + 3, d + 1]
        if d == 0:
            for i in range(_SIZE):
                x, y = block[row + i], block[row + _SIZE + i]
                block[_FIRST_FAR + i] = (x - a) * (x - a) + (y - a_other) * (y - a_other)
                block[_SECOND_FAR + i] = (x - b) * (x - b) + (y - b_other) * (y - b_other)
                block[_THIRD_FAR + i] = (x - c) * (x - c) + (y - c_other) * (y - c_other)
                block[_FOURTH_FAR + i] = (x - e) * (x - e) + (y - e_other) * (y - e_other)
        else:
            for i in range(_SIZE):
                x, y = block[row + i], block[row + _SIZE + i]
                block[_FIRST_FAR + i] += (x - a) * (x - a) + (y - a_other) * (y - a_other)
                block[_SECOND_FAR + i] += (x - b) * (x - b) + (y - b_other) * (y - b_other)
                block[_THIRD_FAR + i] += (x - c) * (x - c) + (y - c_other) * (y - c_other)
                block[_FOURTH_FAR + i] += (x - e) * (x - e) + (y - e_other) * (y - e_other)


@called
def find_nearest(block: _Real, centroids: _Real, labels: _Labels) -> None:
    """Squared distance to (the first row of ``block``) and index of the nearest padded centroid of each point; the
    lower index on a tie."""
    for i in range(_SIZE):
        block[i] = np.inf
        labels[i] = 0
    for k in range(0, centroids.shape[0], 4):
        _measure(block, centroids, k)
        for i in range(_SIZE):
            best, label = block[i], labels[i]
            far = block[_FIRST_FAR + i]
            label = np.int32(k) if far < best else label
            best = min(far, best)
            far = block[_SECOND_FAR + i]
            label = np.int32(k + 1) if far < best else label
            best = min(far, best)
            far = block[_THIRD_FAR + i]
            label = np.int32(k + 2) if far < best else label
            best = min(far, best)
            far = block[_FOURTH_FAR + i]
            label = np.int32(k + 3) if far < best else label
            best = min(far, best)
            block[i], labels[i] = best, label


@called
def find_two_nearest(block: _Real, centroids: _Real, labels: _Labels) -> None:
    """Like :func:`find_nearest`, with the squared distance to the second nearest in the second row of ``block``."""
    for i in range(_SIZE):
        block[i] = np.inf
        block[_SECOND + i] = np.inf
        labels[i] = 0
    for k in range(0, centroids.shape[0], 4):
        _measure(block, centroids, k)
        for i in range(_SIZE):
            best, second, label = block[i], block[_SECOND + i], labels[i]
            far = block[_FIRST_FAR + i]
            label = np.int32(k) if far < best else label
            second = min(second, max(far, best))
            best = min(far, best)
            far = block[_SECOND_FAR + i]
            label = np.int32(k + 1) if far < best else label
            second = min(second, max(far, best))
            best = min(far, best)
            far = block[_THIRD_FAR + i]
            label = np.int32(k + 2) if far < best else label
            second = min(second, max(far, best))
            best = min(far, best)
            far = block[_FOURTH_FAR + i]
            label = np.int32(k + 3) if far < best else label
            second = min(second, max(far, best))
            best = min(far, best)
            block[i], block[_SECOND + i], labels[i] = best, second, label
