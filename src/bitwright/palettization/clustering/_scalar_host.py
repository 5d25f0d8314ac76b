"""Scalar clustering on the CPU: which way a row takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.palettization.clustering import _rows
from bitwright.palettization.clustering._effort import EXACT, Effort, effort_for
from bitwright.palettization.clustering._long_rows import cluster_binned, cluster_patterns
from bitwright.palettization.clustering._pieces import CHUNK, NO_WEIGHTS, SHORT, as_numpy, in_turn, row_slices
from bitwright.palettization.clustering._scalar_labels import label_rows, row_errors
from bitwright.palettization.clustering._threads import run_all
from bitwright.palettization.clustering.inputs import check_finite
from bitwright.palettization.clustering.result import ClusterResult

_Floats = npt.NDArray[np.float64]
_Labels = npt.NDArray[np.uint8]
_Weights = npt.NDArray[np.floating]


def solve_rows(values: Tensor, weights: Tensor | None, n_clusters: int, effort: Effort) -> tuple[_Floats, _Floats]:
    """Sort rows and partition them: centroids ``[P, K]`` and the errors outside of merged atoms ``[P]``."""
    rows, length = values.shape
    centroids = np.empty((rows, n_clusters))
    errors = np.empty(rows)

    def solve(piece: slice) -> None:
        block = as_numpy(values[piece])
        some: _Weights = np.empty((0, 0), np.float32)
        if weights is None:
            block = np.sort(block, axis=1)
        else:
            order = np.argsort(block, axis=1)
            block = np.take_along_axis(block, order, 1)
            some = np.take_along_axis(weights[piece].numpy(), order, 1)
        _rows.cluster_sorted_rows(block, some, n_clusters, effort.tolerance, centroids[piece], errors[piece], None)
        unsure = np.flatnonzero(np.isnan(errors[piece]))
        if unsure.size > 0:
            few, better = np.empty((unsure.size, n_clusters)), np.empty(unsure.size)
            chosen = some[unsure] if some.shape[0] > 0 else some
            _rows.cluster_sorted_rows(block[unsure], chosen, n_clusters, effort.tolerance, few, better, True)
            centroids[piece][unsure], errors[piece][unsure] = few, better

    run_all(solve, row_slices(rows, length))
    return centroids, errors


def _cluster_sorted(
    values: Tensor, weights: Tensor | None, n_clusters: int, effort: Effort, measured: bool
) -> tuple[_Floats, _Labels, _Floats]:
    """Centroids ``[P, K]``, labels ``[P, N]`` and errors ``[P]`` by sorting every row."""
    centroids, outside = solve_rows(values, weights, n_clusters, effort)
    labels = label_rows(values, centroids)
    if effort is EXACT and not measured:
        return centroids, labels, outside
    array = None if weights is None else weights.numpy()
    errors = row_errors(values, array, centroids, labels)
    coarse = effort.too_coarse(errors, outside)
    if coarse.size > 0:
        again = torch.from_numpy(coarse)
        some = None if weights is None else weights[again]
        centroids[coarse], _ = solve_rows(values[again], some, n_clusters, EXACT)
        labels[coarse] = label_rows(values[again], centroids[coarse])
        array = None if some is None else some.numpy()
        errors[coarse] = row_errors(values[again], array, centroids[coarse], labels[coarse])
    return centroids, labels, errors


def _cluster_long(
    values: Tensor, weights: Tensor | None, n_clusters: int, effort: Effort, measured: bool
) -> tuple[_Floats, _Labels, _Floats]:
    """The same without sorting: 16-bit dtypes by their patterns, float32 by a histogram."""
    rows, length = values.shape
    centroids = np.empty((rows, n_clusters))
    labels = np.empty((rows, length), np.uint8)
    one_by_one = length >= 2 * CHUNK
    method = cluster_binned if values.dtype == torch.float32 else cluster_patterns

    def cluster(row: int) -> float:
        sweep = run_all if one_by_one else in_turn
        some = NO_WEIGHTS if weights is None else weights[row].numpy()
        return method(values[row], some, centroids[row], labels[row], effort, sweep, measured)

    errors = [cluster(row) for row in range(rows)] if one_by_one else run_all(cluster, range(rows))
    if np.isinf(errors).any():
        check_finite(values)
    unsure = np.flatnonzero(np.isnan(errors))
    found = np.array(errors)
    if unsure.size > 0:
        again = torch.from_numpy(unsure)
        some = None if weights is None else weights[again]
        sorted_out = _cluster_sorted(values[again], some, n_clusters, EXACT, measured)
        centroids[unsure], labels[unsure], found[unsure] = sorted_out
    return centroids, labels, found


def cluster_on_host(
    values: Tensor, weights: Tensor | None, n_clusters: int, mode: str, measured: bool
) -> ClusterResult:
    """:func:`~.scalar.cluster_scalar` for checked CPU tensors."""
    effort = effort_for(n_clusters, mode)
    if values.dtype in (torch.float16, torch.bfloat16):
        counted = values.shape[1] >= SHORT
    else:  # bins lose too much where they hold few values
        counted = values.dtype == torch.float32 and mode == "fast" and values.shape[1] >= 4 * effort.limit
    if not counted or weights is not None:
        check_finite(values)
    method = _cluster_long if counted else _cluster_sorted
    centroids, labels, errors = method(values, weights, n_clusters, effort, measured)
    if not measured:
        errors.fill(np.nan)
    return ClusterResult(torch.from_numpy(centroids).unsqueeze(2), torch.from_numpy(labels), torch.from_numpy(errors))
