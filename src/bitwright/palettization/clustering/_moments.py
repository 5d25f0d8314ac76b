"""Sums over the points of each palette entry, for CPU tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bitwright.palettization.clustering import _labels
from bitwright.palettization.clustering._pieces import NO_WEIGHTS, as_numpy, slices_of
from bitwright.palettization.clustering._threads import run_all

_Floats = npt.NDArray[np.float64]

_PIECE = 1 << 17


def moments_of_groups(
    values: Tensor,
    weights: npt.NDArray[np.floating] | None,
    labels: npt.NDArray[np.uint8],
    palettes: _Floats,
) -> tuple[_Floats, _Floats, _Floats]:
    """Masses ``[P, K]``, offsets and squares ``[P, K, D]`` of ``values [P, N, D]`` around ``palettes``."""
    groups, length, dims = values.shape
    count = palettes.shape[1]
    pieces = slices_of(length, _PIECE)

    def gather(task: tuple[int, slice]) -> tuple[_Floats, _Floats, _Floats]:
        group, piece = task
        some = NO_WEIGHTS if weights is None else weights[group, piece]
        found = np.zeros(count), np.zeros((count, dims)), np.zeros((count, dims))
        points = as_numpy(values[group, piece])
        _labels.moments_by_label(points, some, labels[group, piece], palettes[group], *found)
        return found

    parts = run_all(gather, [(group, piece) for group in range(groups) for piece in pieces])
    masses, offsets, squares = (np.stack([part[i] for part in parts]) for i in range(3))
    shape = (groups, len(pieces), count)
    return (
        masses.reshape(shape).sum(1),
        offsets.reshape(*shape, dims).sum(1),
        squares.reshape(*shape, dims).sum(1),
    )
