"""Nearest entry of a scalar palette for every value of a CPU tensor, all rows at once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.palettization.clustering import _bins, _labels
from bitwright.palettization.clustering._pieces import (
    CHUNK,
    NO_WEIGHTS,
    SHORT,
    Sweep,
    as_numpy,
    codes_of,
    in_turn,
    row_slices,
    slices_of,
)
from bitwright.palettization.clustering._threads import run_all

_Floats = npt.NDArray[np.float64]
_Labels = npt.NDArray[np.uint8]

_TABLE_PAYS = 1 << 17


@dataclass(frozen=True)
class _Ladder:
    """A palette sorted, without repetitions.

    Attributes:
        values: ascending, float64.
        thresholds: float64 per entry; label l holds values in (thresholds[l - 1], thresholds[l]].
        places: where each entry stood first in the palette; None where nothing moved.
    """

    values: _Floats
    thresholds: _Floats
    places: _Labels | None


def _ladder(palette: _Floats, wide: bool) -> _Ladder:
    """Sort a palette; a tie between neighbours goes to the one that stood first."""
    values, places = np.unique(palette, return_index=True)
    thresholds = _labels.thresholds_of(values, wide)
    if np.all(np.diff(places) > 0):
        moved = not np.array_equal(places, np.arange(places.size))
        return _Ladder(values, thresholds, places.astype(np.uint8) if moved else None)
    middles = 0.5 * values[:-1] + 0.5 * values[1:]
    turned = np.flatnonzero((places[1:] < places[:-1]) & (thresholds[:-1] == middles))
    dtype = np.float64 if wide else np.float32
    below = np.nextafter(thresholds[turned].astype(dtype), dtype(-np.inf))
    thresholds[turned] = below
    return _Ladder(values, thresholds, places.astype(np.uint8))


def _moved(labels: _Labels, ladder: _Ladder) -> None:
    if ladder.places is not None:
        labels[:] = ladder.places[labels]


def label_by_patterns(codes: npt.NDArray[np.unsignedinteger], of_code: _Labels, labels: _Labels, sweep: Sweep) -> None:
    """Look 16-bit patterns up in a table of labels."""
    sweep(
        lambda piece: _labels.label_by_code(codes[piece], of_code, labels[piece]),
        slices_of(labels.size, CHUNK),
    )


@functools.cache
def pattern_values(dtype: torch.dtype) -> _Floats:
    """The value of every pattern of a 16-bit dtype, float64 ``[65536]``."""
    patterns = torch.arange(_bins.N_CELLS, dtype=torch.int32).to(torch.int16)
    values: _Floats = patterns.view(dtype).double().numpy()
    return values


def label_values(values: _Floats, palette: _Floats) -> _Labels:
    """Labels of a few float64 values."""
    ladder = _ladder(palette, wide=True)
    labels = np.empty(values.size, np.uint8)
    _labels.label_by_search(values, ladder.thresholds, labels)
    _moved(labels, ladder)
    return labels


def pattern_labels(dtype: torch.dtype, palette: _Floats) -> _Labels:
    """The label of every pattern of a 16-bit dtype."""
    return label_values(np.nan_to_num(pattern_values(dtype)), palette)


def label_long_row(row: Tensor, palette: _Floats, labels: _Labels, sweep: Sweep) -> None:
    """Write the nearest entry of ``palette [K]`` to every value of ``row [N]``."""
    if row.dtype in (torch.float16, torch.bfloat16):
        label_by_patterns(codes_of(row), pattern_labels(row.dtype, palette), labels, sweep)
        return
    values = as_numpy(row)
    ladder = _ladder(palette, wide=row.dtype == torch.float64)
    thresholds = ladder.thresholds.astype(values.dtype)
    if row.dtype == torch.float32 and row.numel() >= _TABLE_PAYS:
        table, n_bins = _bins.plan_bins_for(thresholds)
        first, most = _bins.first_labels(_bins.finite_cells(), table, n_bins, thresholds)

    def label(piece: slice) -> None:
        if row.dtype == torch.float32 and row.numel() >= _TABLE_PAYS:
            _labels.label_by_bins(values[piece], table, first, most, thresholds, labels[piece])
        else:
            _labels.label_by_search(values[piece], thresholds, labels[piece])
        _moved(labels[piece], ladder)

    sweep(label, slices_of(labels.size, CHUNK))


def _ordered(palettes: _Floats) -> bool:
    """Whether every palette ascends, but for repetitions of its last entry."""
    fresh = palettes[:, :-1] != palettes[:, -1:]
    return bool(np.all(np.where(fresh, palettes[:, 1:] > palettes[:, :-1], palettes[:, 1:] == palettes[:, -1:])))


def label_rows(values: Tensor, palettes: _Floats) -> _Labels:
    """Indices uint8 ``[P, N]`` of the nearest entries of ``palettes [P, K]`` (any order) to ``values [P, N]``."""
    rows, length = values.shape
    labels = np.empty((rows, length), np.uint8)
    if length < SHORT and _ordered(palettes):

        def label_all(piece: slice) -> None:
            _labels.label_ordered_rows(as_numpy(values[piece]), palettes[piece], labels[piece])

        run_all(label_all, row_slices(rows, length))
        return labels
    if length >= 2 * CHUNK:
        for i in range(rows):
            label_long_row(values[i], palettes[i], labels[i], run_all)
        return labels

    def label(piece: slice) -> None:
        block = values[piece]
        if length < SHORT:
            block = torch.from_numpy(as_numpy(block))
        for i in range(block.shape[0]):
            label_long_row(block[i], palettes[piece][i], labels[piece][i], in_turn)

    run_all(label, row_slices(rows, length))
    return labels


def row_errors(values: Tensor, weights: npt.NDArray[np.floating] | None, palettes: _Floats, labels: _Labels) -> _Floats:
    """Squared errors ``[P]`` of labelled rows."""

    def error(task: tuple[int, slice]) -> float:
        row, piece = task
        some = NO_WEIGHTS if weights is None else weights[row, piece]
        return _labels.error_of(as_numpy(values[row, piece]), some, labels[row, piece], palettes[row])

    rows, length = labels.shape
    pieces = slices_of(length, CHUNK)
    errors = run_all(error, [(row, piece) for row in range(rows) for piece in pieces])
    totals: _Floats = np.array(errors, np.float64).reshape(rows, len(pieces)).sum(1)
    return totals
