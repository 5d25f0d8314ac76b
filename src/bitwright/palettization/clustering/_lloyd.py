"""Kernels for palettes of vectors: Lloyd's algorithm, labels and errors. Points come as rows ``[N, D]``."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bitwright.kernels.cpu.compiling import called, compiled
from bitwright.palettization.clustering._nearest import BLOCK, block_for, find_nearest, padded, turn_over

_Floats = npt.NDArray[np.float64]
_Real = npt.NDArray[np.floating]
_Labels = npt.NDArray[np.uint8]

_HASH_SIZE = 1024


@compiled
def label_vectors(points: _Real, scale: float, centroids: _Real, labels: _Labels) -> None:
    """Index of the nearest row of ``centroids [K, D]`` to ``scale · points [N, D]``, in the centroids' dtype."""
    centre = np.zeros(points.shape[1])
    entries = padded(centroids)
    block = block_for(entries)
    nearest = np.empty(BLOCK, np.int32)
    for start in range(0, points.shape[0], BLOCK):
        size = min(BLOCK, points.shape[0] - start)
        turn_over(points, start, size, centre, scale, block)
        find_nearest(block, entries, nearest)
        for i in range(size):
            labels[start + i] = nearest[i]


@compiled
def gather_step(
    points: _Real,
    weights: _Real,
    centre: _Floats,
    scale: float,
    centroids: _Real,
    masses: _Floats,
    sums: _Floats,
) -> tuple[float, float, int]:
    """One pass of Lloyd's algorithm: add each point to the nearest centroid's mass and sum.

    Args:
        points: ``[N, D]``; they are centred and scaled on the way, and so are the sums.
        weights: ``[N]``, or empty.
        centre: float64 ``[D]``, subtracted.
        scale: factor after that.
        centroids: ``[K, D]`` of centred and scaled points.
        masses: ``[K]``, added to.
        sums: ``[K, D]``, added to.

    Returns:
        the squared error, and the largest weighted squared distance with its point's index.
    """
    dims = points.shape[1]
    entries = padded(centroids)
    block = block_for(entries)
    nearest = np.empty(BLOCK, np.int32)
    error = 0.0
    worst = -1.0
    place = 0
    for start in range(0, points.shape[0], BLOCK):
        size = min(BLOCK, points.shape[0] - start)
        turn_over(points, start, size, centre, scale, block)
        find_nearest(block, entries, nearest)
        for i in range(size):
            weight = np.float64(weights[start + i]) if weights.size > 0 else 1.0
            k = nearest[i]
            masses[k] += weight
            for d in range(dims):
                sums[k, d] += weight * (np.float64(points[start + i, d]) - centre[d]) * scale
            part = weight * np.float64(block[i])
            error += part
            if part > worst:
                worst = part
                place = start + i
    return error, worst, place


@compiled
def error_of_vectors(points: _Real, weights: _Real, labels: _Labels, centroids: _Floats) -> float:
    """Σ weight · |point - centroid|² in float64; ``weights`` may be empty."""
    total = 0.0
    for i in range(points.shape[0]):
        part = 0.0
        for d in range(points.shape[1]):
            off = np.float64(points[i, d]) - centroids[labels[i], d]
            part += off * off
        total += part * (np.float64(weights[i]) if weights.size > 0 else 1.0)
    return total


@called
def moved_centroids(centroids: npt.NDArray[np.float32], masses: _Floats, sums: _Floats) -> int:
    """Move centroids to the means of their points; returns one without points, or -1."""
    empty = -1
    for k in range(centroids.shape[0]):
        if masses[k] > 0.0:
            for d in range(centroids.shape[1]):
                centroids[k, d] = sums[k, d] / masses[k]
        else:
            empty = k
    return empty


@compiled
def run_lloyd(
    points: npt.NDArray[np.float32],
    weights: _Real,
    centroids: npt.NDArray[np.float32],
    steps: int,
    tolerance: float,
) -> float:
    """Lloyd's algorithm in place, until a step lowers the error by less than ``tolerance`` of it.

    A centroid that lost its points moves to the point that is worst served. Returns the error before the last
    move.
    """
    centre = np.zeros(points.shape[1])
    before = math.inf
    error = math.inf
    for _ in range(steps):
        masses = np.zeros(centroids.shape[0])
        sums = np.zeros(centroids.shape)
        error, worst, place = gather_step(points, weights, centre, 1.0, centroids, masses, sums)
        empty = moved_centroids(centroids, masses, sums)
        if empty >= 0 and worst > 0.0:
            for d in range(centroids.shape[1]):
                centroids[empty, d] = points[place, d]
        elif before - error <= tolerance * error:
            break
        before = error
    return error


@compiled
def few_vectors(points: _Real, weights: _Real, most: int) -> npt.NDArray[np.int64]:
    """Rows that are the first of their kind among those of positive weight; stops at ``most + 1`` of them."""
    dims = points.shape[1]
    table = np.full(_HASH_SIZE, np.int64(-1))
    found = np.empty(most + 1, np.int64)
    size = 0
    row = np.empty(dims, np.float64)
    bits = row.view(np.uint64)
    for i in range(points.shape[0]):
        if weights.size > 0 and not weights[i] > 0.0:
            continue
        code = np.uint64(0)
        for d in range(dims):
            row[d] = points[i, d] + 0.0  # negative zero is zero
            code = (code ^ bits[d]) * np.uint64(0x9E3779B97F4A7C15)
            code ^= code >> np.uint64(29)
        slot = np.int64(code & np.uint64(_HASH_SIZE - 1))
        while table[slot] >= 0:
            same = True
            for d in range(dims):
                same = same and points[table[slot], d] == points[i, d]
            if same:
                break
            slot = (slot + 1) & (_HASH_SIZE - 1)
        if table[slot] < 0:
            table[slot] = i
            found[size] = i
            size += 1
            if size > most:
                break
    return found[:size]
