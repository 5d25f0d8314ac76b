"""Scalar clustering of one long row by counting instead of sorting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.palettization.clustering import _bins, _labels, _octaves
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
_Real = npt.NDArray[np.floating]
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
class _Bins:
    """Where the bins of a planned histogram are.

    Attributes:
        cells: occupied cells, ascending.
        table: see :func:`~._bins.plan_bins`.
        count: how many bins there are.
    """

    cells: npt.NDArray[np.uint32]
    table: npt.NDArray[np.uint32]
    count: int


@dataclass(frozen=True)
class _Atoms:
    """A float32 row as a histogram.

    Attributes:
        values: means of the occupied bins, float64, ascending.
        masses: what they weigh.
        inside: upper bound of the squared error between the values and the means of their bins.
        bins: None where every power of two is cut alike.
    """

    values: _Floats
    masses: _Floats
    inside: float
    bins: _Bins | None


def planned(row: Tensor, weights: _Weights, target: int, sweep: Sweep) -> _Atoms | None:
    """The histogram of a float32 row in about ``target`` bins; None where the row is not finite."""
    codes = codes_of(row)
    cells, counts = _bins.occupied_cells(_count(codes, 16, sweep))
    if any((int(cell) >> 7) & 255 == 255 for cell in (cells[0], cells[-1])):  # infinities and NaN lie outermost
        return None
    masses = _weigh(codes, weights, 16, sweep)[cells] if weights.size > 0 else counts
    table, n_bins = _bins.plan_bins(cells, masses, counts, target)
    filled = _fill(codes, weights, table, n_bins, sweep)
    return _Atoms(*_bins.atoms_of_bins(cells, table, *filled), _Bins(cells, table, n_bins))


def _at_once(row: Tensor, sweep: Sweep) -> _Atoms:
    """The histogram of a float32 row in one pass, with bins of fixed places."""
    codes = codes_of(row)
    piece = min(max(-(-codes.size // torch.get_num_threads()), _READING), _octaves.MOST_AT_ONCE)
    pieces = slices_of(codes.size, piece)
    parts = np.zeros((len(pieces), _octaves.N_BINS), np.uint64)  # whole numbers: any pieces give the same sums
    sweep(lambda some: _octaves.fill_octaves(codes[some], parts[some.start // piece]), pieces)
    return _Atoms(*_octaves.atoms_of_octaves(parts), None)


def _partitioned(
    row: Tensor, weights: _Weights, centroids: _Floats, effort: Effort, sweep: Sweep
) -> tuple[_Atoms, float] | None:
    """Write the centroids of a row's histogram; returns it and the error between its bins, None for a row that is not
    finite."""
    if weights.size == 0 and centroids.size <= _labels.TREE and row.numel() >= _READING:
        found = _at_once(row, sweep)
        if math.isinf(found.inside):
            return None
        _, outside = cluster_atoms(found.values, found.masses, centroids.size, effort.tolerance, centroids)
        if effort.is_surely_fine(outside, found.inside):
            return found, outside
    atoms = planned(row, weights, effort.limit, sweep)  # finer bins would be merged again, which costs accuracy
    if atoms is None:
        return None
    _, outside = cluster_atoms(atoms.values, atoms.masses, centroids.size, effort.tolerance, centroids)
    return atoms, outside


def cluster_patterns(
    row: Tensor,
    weights: _Weights,
    centroids: _Floats,
    labels: _Labels,
    effort: Effort,
    sweep: Sweep,
    measured: bool = True,
) -> float:
    """Cluster a row of a 16-bit dtype, whose patterns are the atoms; writes centroids and labels.

    Returns:
        the squared error, which costs nothing here; infinity where the row is not finite.
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


def _labeller(values: _Real, bins: _Bins | None, centroids: _Floats) -> Callable[[slice, _Labels], None]:
    """What labels a slice of a float32 row in the way that costs least."""
    thresholds = _labels.thresholds_of(centroids, False).astype(np.float32)
    if bins is None or centroids.size <= _labels.TREE:
        return lambda some, labels: _labels.label_by_tree(values[some], thresholds, labels)
    of_cell, crowd = _bins.first_labels(bins.cells, _bins.WHOLE_CELLS, _bins.N_CELLS, thresholds)
    if crowd <= 1:
        return lambda some, labels: _labels.label_by_cell(values[some], of_cell, thresholds, labels)
    first, most = _bins.first_labels(bins.cells, bins.table, bins.count, thresholds)
    return lambda some, labels: _labels.label_by_bins(values[some], bins.table, first, most, thresholds, labels)


def cluster_binned(
    row: Tensor,
    weights: _Weights,
    centroids: _Floats,
    labels: _Labels,
    effort: Effort,
    sweep: Sweep,
    measured: bool = True,
) -> float:
    """Cluster a float32 row by its histogram; writes centroids and labels.

    Returns:
        the squared error (that between the bins where neither ``measured`` nor the promise asks for all of it); NaN
        where the bins turned out too coarse for the promised excess, infinity where the row is not finite.
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
    found = _partitioned(row, weights, centroids, effort, sweep)
    if found is None:
        return math.inf
    atoms, outside = found
    fine = effort.is_surely_fine(outside, atoms.inside)
    values = as_numpy(row)
    label_some = _labeller(values, atoms.bins, centroids)

    def label(piece: slice) -> float:
        error = 0.0
        for start in range(piece.start, piece.stop, _BLOCK):
            block = slice(start, min(start + _BLOCK, piece.stop))
            label_some(block, labels[block])
            if measured or not fine:
                error += _labels.error_of(values[block], weights[block], labels[block], centroids)
        return error

    error = math.fsum(sweep(label, slices_of(labels.size, CHUNK)))
    if fine:
        return error if measured else outside
    return math.nan if effort.is_too_coarse(error, outside) else error


def row_atoms(row: Tensor, weights: _Weights | None) -> tuple[_Floats, _Floats]:
    """Atoms of any finite row: its different values, or the fine histogram of a long float32 row."""
    some = NO_WEIGHTS if weights is None else weights
    if row.numel() >= SHORT and row.dtype in (torch.float16, torch.bfloat16):
        return pattern_atoms(row, some, in_turn)
    if row.numel() >= SHORT and row.dtype == torch.float32:
        found = planned(row, some, 4 * _MANY_BINS, in_turn)
        assert found is not None
        return found.values, found.masses
    values = as_numpy(row)
    if weights is None:
        return atoms_of_sorted(np.sort(values), NO_WEIGHTS)
    order = np.argsort(values)
    return atoms_of_sorted(values[order], weights[order])
