"""Scalar palettes drawn from the values that a quantized look-up table can hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.palettization.clustering.inputs import (
    check_clusters,
    check_finite,
    check_values,
    check_weights,
    lively_weights,
)
from bitwright.palettization.clustering.result import ClusterResult, moved_to

__all__ = ["cluster_on_grid"]

_MOST_LEVELS = 4096


def cluster_on_grid(values: Tensor, n_clusters: int, levels: Tensor, *, weights: Tensor | None = None) -> ClusterResult:
    """The palette of least squared error among those whose entries all lie on a grid.

    With the grid ``(code - zero_point) · scale`` over all codes of the look-up table's dtype, this is the best
    quantized palette for that scale, where rounding the centroids of :func:`~.scalar.cluster_scalar` is not.

    Args:
        values: ``[P, N]`` as there; float32 rows of 32,768 values or more are resolved by a histogram.
        n_clusters: entries of each palette, 1 to 256.
        levels: the grid in any order, ``[G]`` for all groups or ``[P, G]``, G at most 4096.
        weights: as there.

    Returns:
        :class:`ClusterResult` whose centroids ascend and lie on the grid; a grid of fewer different levels than
        ``n_clusters`` is taken whole, its last level repeated. Tensors that are not on the CPU are clustered
        there.

    Raises:
        TypeError, ValueError: as there; levels that are not finite floats of a fitting shape.
    """
    values = check_values(values, (2,), "[P, N]")
    check_finite(values)
    some = lively_weights(check_weights(weights, values))
    check_clusters(n_clusters)
    levels = check_values(levels, (1, 2), "[G] or [P, G]", "levels")
    check_finite(levels, "levels")
    if levels.shape[-1] > _MOST_LEVELS or levels.shape[:-1] not in ((), values.shape[:1]):
        raise ValueError(
            f"levels must have shape [G] or [{values.shape[0]}, G] with G at most {_MOST_LEVELS}, "
            f"got {list(levels.shape)}"
        )
    grids = levels.double().cpu().expand(values.shape[0], -1).numpy()
    host = None if some is None else some.cpu()
    return moved_to(_cluster(values.cpu(), host, n_clusters, grids), values.device)


def _cluster(values: Tensor, weights: Tensor | None, n_clusters: int, grids: npt.NDArray[np.float64]) -> ClusterResult:
    from bitwright.palettization.clustering._grid import choose_levels
    from bitwright.palettization.clustering._long_rows import row_atoms
    from bitwright.palettization.clustering._scalar_labels import label_rows, row_errors
    from bitwright.palettization.clustering._threads import run_all

    array = None if weights is None else weights.numpy()
    palettes = np.empty((values.shape[0], n_clusters))

    def choose(row: int) -> None:
        grid = np.unique(grids[row])
        if grid.size > n_clusters:
            chosen = np.empty(n_clusters, np.int64)
            atoms = row_atoms(values[row], None if array is None else array[row])
            choose_levels(*atoms, grid, n_clusters, chosen)
            grid = grid[chosen]
        palettes[row, : grid.size] = grid
        palettes[row, grid.size :] = grid[-1]

    run_all(choose, range(values.shape[0]))
    labels = label_rows(values, palettes)
    errors = row_errors(values, array, palettes, labels)
    return ClusterResult(torch.from_numpy(palettes).unsqueeze(2), torch.from_numpy(labels), torch.from_numpy(errors))
