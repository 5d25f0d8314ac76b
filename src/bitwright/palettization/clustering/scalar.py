"""Scalar palettes: the 1-D k-means optimum of every row, exact or proved to be close."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from bitwright.palettization.clustering.inputs import (
    check_clusters,
    check_values,
    check_weights,
    lively_weights,
)
from bitwright.palettization.clustering.result import ClusterResult, moved_to

__all__ = ["cluster_scalar"]


def cluster_scalar(
    values: Tensor,
    n_clusters: int,
    *,
    weights: Tensor | None = None,
    mode: Literal["fast", "exact"] = "fast",
    measured: bool = True,
) -> ClusterResult:
    """Cluster every row of a tensor into a scalar palette of least squared error.

    Args:
        values: ``[P, N]``, P groups of N weights; float16, bfloat16, float32 or float64, of any finite size.
        n_clusters: entries of each palette, 1 to 256.
        weights: importance of each value, ``[P, N]``, not negative. A group whose weights are all zero is
            clustered as if they were all one.
        mode: ``"exact"`` finds the optimum (to 1e-12 of the squared error in the arithmetic used) in
            O(n log n) time and O(n) memory for n different values. ``"fast"`` finds the optimum of a histogram
            that follows the values, and labels the values themselves; its excess error is below 1e-5 for up to
            16 entries, 1e-4 for up to 64 and 5e-4 beyond, and the exact mode takes over where the histogram
            cannot promise that. Groups with no more than ``n_clusters`` different values are exact in either.
        measured: whether the result's ``error`` is wanted; without it a pass over the values is saved on CPUs, and
            the error is NaN.

    Returns:
        :class:`ClusterResult` with D = 1.

    Raises:
        TypeError: ``values`` or ``weights`` have an unsuitable dtype.
        ValueError: a wrong shape, NaN or infinite values (with how many), bad weights, or an unknown mode.

    Source of the method: Aggarwal, Schieber and Tokuyama 1994 and Grønlund et al. 2017 (arXiv 1701.07204), §3.
    """
    values = check_values(values, (2,), "[P, N]")
    weights = check_weights(weights, values)
    check_clusters(n_clusters)
    if mode not in ("fast", "exact"):
        raise ValueError(f'mode must be "fast" or "exact", got {mode!r}')
    weights = lively_weights(weights)
    if values.device.type == "cuda":
        from bitwright.palettization.clustering._scalar_device import cluster_on_device

        return cluster_on_device(values, weights, n_clusters, mode)
    from bitwright.palettization.clustering._scalar_host import cluster_on_host

    host = None if weights is None else weights.cpu()
    return moved_to(cluster_on_host(values.cpu(), host, n_clusters, mode, measured), values.device)
