"""Nearest entry of a vector palette for every vector of a CPU tensor, all groups at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.palettization.clustering import _lloyd
from bitwright.palettization.clustering._pieces import NO_WEIGHTS, as_numpy, slices_of
from bitwright.palettization.clustering._threads import run_all

_Floats = npt.NDArray[np.float64]
_Labels = npt.NDArray[np.uint8]

_PIECE = 1 << 15


def _tasks(groups: int, length: int) -> list[tuple[int, slice]]:
    return [(group, piece) for group in range(groups) for piece in slices_of(length, _PIECE)]


def label_groups(values: Tensor, palettes: _Floats) -> _Labels:
    """Indices uint8 ``[P, N]`` of the nearest rows of ``palettes [P, K, D]`` to ``values [P, N, D]``.

    Distances are compared in float64 after scaling by a power of two, so that no square overflows.
    """
    groups, length, _ = values.shape
    labels = np.empty((groups, length), np.uint8)
    low, high = torch.aminmax(values.view(groups, -1), dim=1)
    widest = torch.maximum(high.double().abs(), low.double().abs()).numpy()
    reach = np.maximum(np.abs(palettes).max((1, 2)), widest)
    scales = np.ldexp(1.0, -np.frexp(np.where(reach > 0, np.maximum(reach, 1e-300), 1.0))[1])

    def label(task: tuple[int, slice]) -> None:
        group, piece = task
        scale = float(scales[group])
        _lloyd.label_vectors(as_numpy(values[group, piece]), scale, palettes[group] * scale, labels[group, piece])

    run_all(label, _tasks(groups, length))
    return labels


def vector_errors(
    values: Tensor, weights: npt.NDArray[np.floating] | None, palettes: _Floats, labels: _Labels
) -> _Floats:
    """Squared errors ``[P]`` of labelled vectors."""

    def error(task: tuple[int, slice]) -> float:
        group, piece = task
        some = NO_WEIGHTS if weights is None else weights[group, piece]
        points = as_numpy(values[group, piece])
        return _lloyd.error_of_vectors(points, some, labels[group, piece], palettes[group])

    groups, length = labels.shape
    errors = run_all(error, _tasks(groups, length))
    totals: _Floats = np.array(errors, np.float64).reshape(groups, -1).sum(1)
    return totals
