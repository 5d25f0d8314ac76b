"""Scalar clustering of one long row by counting instead of sorting."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.palettization.clustering import _bins, _labels
from bitwright.palettization.clustering._atoms import cluster_atoms
from bitwright.palettization.clustering._effort import EXACT, Effort
from bitwright.palettization.clustering._pieces import (
    CHUNK,
    NO_WEIGHTS,
    SHORT,
    Sweep,
    as_numpy,
    codes_of,
    in_turn,
    slices_of,
)
from bitwright.palettization.clustering._rows import atoms_of_sorted
from bitwright.palettization.clustering._scalar_labels import (
    label_by_patterns,
    label_long_row,
    label_values,
    pattern_labels,
    pattern_values,
)

_Floats = npt.NDArray[np.float64]
_Labels = npt.NDArray[np.uint8]
_Weights = npt.NDArray[np.floating]

_READING = 4 * CHUNK  # values per histogram, whose counts have 24 bits
_BLOCK = 1 << 15
_MANY_BINS = 1 << 15


def _count(codes: npt.NDArray[np.unsignedinteger], shift: int, sweep: Sweep) -> npt.NDArray[np.uint32]:
    """Counts of the cells, ``[parts, 65536]``."""
    pieces = slices_of(codes.size, _READING)
    counts = np.zeros((len(pieces), _bins.N_CELLS), np.uint32)

    def count(piece: slice) -> None:
        _bins.count_cells(codes[piece], shift, counts[piece.start // _READING])

    sweep(count, pieces)
    return counts


def _weigh(codes: npt.NDArray[np.unsignedinteger], weights: _Weights, shift: int, sweep: Sweep) -> _Floats:
    """Sums of the weights in the cells, ``[65536]``."""

    def weigh(piece: slice) -> _Floats:
        masses = np.zeros(_bins.N_CELLS)
        _bins.weigh_cells(codes[piece], weights[piece], shift, masses)
        return masses

    masses: _Floats = np.sum(sweep(weigh, slices_of(codes.size, _READING)), axis=0)
    return masses


def _fill(
    codes: npt.NDArray[np.uint32],
    weights: _Weights,
    table: npt.NDArray[np.uint32],
    n_bins: int,
    sweep: Sweep,
) -> tuple[_Floats, _Floats]:
    """Masses of the bins and sums of mass · lower bits."""
    pieces = slices_of(codes.size, _READING)
    if weights.size == 0:
        bins = np.zeros((len(pieces), n_bins), np.uint64)
        sweep(lambda piece: _bins.fill_bins(codes[piece], table, bins[piece.start // _READING]), pieces)
        return _bins.read_bins(bins)
    masses, sums = np.zeros((2, len(pieces), n_bins))

    def fill(piece: slice) -> None:
        part = piece.start // _READING
        _bins.weigh_bins(codes[piece], weights[piece], table, masses[part], sums[part])

    sweep(fill, pieces)
    return masses.sum(0), sums.sum(0)


def pattern_atoms(row: Tensor, weights: _Weights, sweep: Sweep) -> tuple[_Floats, _Floats]:
    """Different values of a row of a 16-bit dtype, ascending, and what they weigh."""
    codes = codes_of(row)
    masses = _weigh(codes, weights, 0, sweep) if weights.size > 0 else _count(codes, 0, sweep).sum(0)
    used = np.flatnonzero(masses)
    atoms, place = np.unique(pattern_values(row.dtype)[used], return_inverse=True)  # joins the two zeros
    return atoms, np.bincount(place, masses[used]).astype(np.float64)


@dataclass(frozen=True)
class _Binned:
    """A float32 row as a histogram.

    Attributes:
        cells: occupied cells, ascending.
        table: where their bins are, see :func:`~._bins.plan_bins`.
        n_bins: how many there are.
        values: means of the occupied bins, float64, ascending.
        masses: what they weigh.
    """

    cells: npt.NDArray[np.uint32]
    table: npt.NDArray[np.uint32]
    n_bins: int
    values: _Floats
    masses: _Floats


def binned(row: Tensor, weights: _Weights, target: int, sweep: Sweep) -> _Binned | None:
    """The histogram of a float32 row in about ``target`` bins; None where the row is not finite."""
    codes = codes_of(row)
    cells, counts = _bins.occupied_cells(_count(codes, 16, sweep))
    if any((int(cell) >> 7) & 255 == 255 for cell in (cells[0], cells[-1])):  # infinities and NaN lie outermost
        return None
    masses = _weigh(codes, weights, 16, sweep)[cells] if weights.size > 0 else counts
    table, n_bins = _bins.plan_bins(cells, masses, counts, target)
    filled = _fill(codes, weights, table, n_bins, sweep)
    return _Binned(cells, table, n_bins, *_bins.atoms_of_bins(cells, table, *filled))


def cluster_patterns(
    row: Tensor, weights: _Weights, centroids: _Floats, labels: _Labels, effort: Effort, sweep: Sweep
) -> float:
    """Cluster a row of a 16-bit dtype, whose patterns are the atoms; writes centroids and labels.

    Returns:
        the squared error, infinity where the row is not finite.
    """
    atoms, masses = pattern_atoms(row, weights, sweep)
    if not np.isfinite(atoms).all():
        return math.inf
    for attempt in (effort, EXACT):
        _, outside = cluster_atoms(atoms, masses, centroids.size, attempt.tolerance, centroids)
        of_atom = label_values(atoms, centroids)
        error = float(masses @ (atoms - centroids[of_atom]) ** 2)
        if not attempt.is_too_coarse(error, outside):
            break
    label_by_patterns(codes_of(row), pattern_labels(row.dtype, centroids), labels, sweep)
    return error


def cluster_binned(
    row: Tensor, weights: _Weights, centroids: _Floats, labels: _Labels, effort: Effort, sweep: Sweep
) -> float:
    """Cluster a float32 row by its histogram; writes centroids and labels.

    Returns:
        the squared error; NaN where the bins turned out too coarse for the promised excess, infinity where
        the row is not finite.
    """
    few = _bins.few_values(codes_of(row), weights, centroids.size)
    if few.size <= centroids.size:
        if not np.isfinite(few.view(np.float32)).all():
            return math.inf
        points = np.sort(few.view(np.float32)).astype(np.float64)
        centroids[: points.size] = points
        centroids[points.size :] = points[-1]
        label_long_row(row, centroids, labels, sweep)
        return 0.0
    found = binned(row, weights, effort.limit, sweep)  # finer bins would be merged again, which costs accuracy
    if found is None:
        return math.inf
    _, outside = cluster_atoms(found.values, found.masses, centroids.size, effort.tolerance, centroids)
    values = as_numpy(row)
    thresholds = _labels.thresholds_of(centroids, False).astype(np.float32)
    of_cell, crowd = _bins.first_labels(found.cells, _bins.WHOLE_CELLS, _bins.N_CELLS, thresholds)
    if crowd > 1:
        first, most = _bins.first_labels(found.cells, found.table, found.n_bins, thresholds)

    def label(piece: slice) -> float:
        error = 0.0
        for start in range(piece.start, piece.stop, _BLOCK):
            block = slice(start, min(start + _BLOCK, piece.stop))
            if crowd <= 1:
                _labels.label_by_cell(values[block], of_cell, thresholds, labels[block])
            else:
                _labels.label_by_bins(values[block], found.table, first, most, thresholds, labels[block])
            error += _labels.error_of(values[block], weights[block], labels[block], centroids)
        return error

    error = math.fsum(sweep(label, slices_of(labels.size, CHUNK)))
    return math.nan if effort.is_too_coarse(error, outside) else error


def row_atoms(row: Tensor, weights: _Weights | None) -> tuple[_Floats, _Floats]:
    """Atoms of any finite row: its different values, or the fine histogram of a long float32 row."""
    some = NO_WEIGHTS if weights is None else weights
    if row.numel() >= SHORT and row.dtype in (torch.float16, torch.bfloat16):
        return pattern_atoms(row, some, in_turn)
    if row.numel() >= SHORT and row.dtype == torch.float32:
        found = binned(row, some, 4 * _MANY_BINS, in_turn)
        assert found is not None
        return found.values, found.masses
    values = as_numpy(row)
    if weights is None:
        return atoms_of_sorted(np.sort(values), NO_WEIGHTS)
    order = np.argsort(values)
    return atoms_of_sorted(values[order], weights[order])
