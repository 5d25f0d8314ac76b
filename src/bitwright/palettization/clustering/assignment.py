"""Nearest palette entries, and what the points of each entry add up to."""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.palettization.clustering.inputs import (
    check_centroids,
    check_finite,
    check_indices,
    check_values,
    check_weights,
)

__all__ = ["assign", "cluster_moments", "clustering_error"]

_SHAPE = "[P, N] or [P, N, D]"


def assign(values: Tensor, centroids: Tensor) -> Tensor:
    """Index of the nearest palette entry of every point.

    Distances are those of the given numbers in float64; of equally near entries the lower index wins. Scalars are
    compared with midpoints rounded to float64, which float64 values within one unit of a midpoint can notice.

    Args:
        values: ``[P, N]`` or ``[P, N, D]``, finite floats.
        centroids: ``[P, K, D]`` (or ``[P, K]`` for scalars) in any order, repetitions allowed, K at most 256.

    Returns:
        uint8 ``[P, N]``.

    Raises:
        TypeError: a dtype other than float16, bfloat16, float32 and float64.
        ValueError: shapes that do not fit, NaN or infinity.
    """
    values = check_values(values, (2, 3), _SHAPE)
    check_finite(values)
    palettes = check_centroids(centroids, values)
    if palettes.shape[2] == 1:
        return _assign_scalars(values.reshape(values.shape[:2]), palettes.squeeze(2))
    if values.device.type == "cuda":
        from bitwright.palettization.clustering import _device

        return _device.label_vectors(values, palettes)
    from bitwright.palettization.clustering._vector_labels import label_groups

    return torch.from_numpy(label_groups(values.cpu(), palettes.cpu().numpy())).to(values.device)


def _assign_scalars(values: Tensor, palettes: Tensor) -> Tensor:
    if values.device.type == "cuda":
        from bitwright.palettization.clustering import _device

        return _device.label_scalars(values, palettes)
    from bitwright.palettization.clustering._scalar_labels import label_rows

    return torch.from_numpy(label_rows(values.cpu(), palettes.cpu().numpy())).to(values.device)


def cluster_moments(
    values: Tensor, indices: Tensor, centroids: Tensor, *, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the points of every palette entry, relative to the entry.

    Entry + offsets / masses is the mean of its points; squares / masses their mean square distance from it.

    Args:
        values: ``[P, N]`` or ``[P, N, D]``.
        indices: uint8 ``[P, N]``.
        centroids: ``[P, K, D]`` (or ``[P, K]``).
        weights: ``[P, N]``, or of the shape of ``values``; not negative.

    Returns:
        masses ``[P, K]``, offsets ``[P, K, D]`` and squares ``[P, K, D]``: Σ weight, Σ weight · (point - entry)
        and Σ weight · (point - entry)², float64.

    Raises:
        TypeError, ValueError: as :func:`assign`; indices that point outside of the palette.
    """
    values = check_values(values, (2, 3), _SHAPE)
    check_finite(values)
    some = check_weights(weights, values)
    palettes = check_centroids(centroids, values)
    check_indices(indices, values, palettes.shape[1])
    points = values if values.dim() == 3 else values.unsqueeze(2)
    if values.device.type == "cuda":
        from bitwright.palettization.clustering import _device

        return _device.moments_by_label(points, some, indices, palettes)
    from bitwright.palettization.clustering._moments import moments_of_groups

    host = None if some is None else some.cpu().numpy()
    found = moments_of_groups(points.cpu(), host, indices.cpu().numpy(), palettes.cpu().numpy())
    masses, offsets, squares = (torch.from_numpy(array).to(values.device) for array in found)
    return masses, offsets, squares


def clustering_error(values: Tensor, indices: Tensor, centroids: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Σ (weight ·) |point - entry|² of every group, float64 ``[P]``; arguments as :func:`cluster_moments`."""
    return cluster_moments(values, indices, centroids, weights=weights)[2].sum((1, 2))
