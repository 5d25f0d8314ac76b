"""Palettes of vectors: k-means++ and Lloyd's algorithm, reproducible by their own seed."""

from __future__ import annotations

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

__all__ = ["cluster_vectors"]


def cluster_vectors(
    values: Tensor,
    n_clusters: int,
    *,
    weights: Tensor | None = None,
    seed: int | torch.Generator = 0,
    restarts: int = 5,
) -> ClusterResult:
    """Cluster the vectors of every group.

    Seeds are drawn by k-means++ on a subsample, ``restarts`` times; each draw is improved by Lloyd's algorithm
    there, and the best one goes on over larger subsamples to all vectors until the error stops falling. A
    centroid that loses its vectors moves to the one that is worst served. Groups with no more than
    ``n_clusters`` different vectors are exact. D = 1 goes to :func:`~.scalar.cluster_scalar`.

    Args:
        values: ``[P, N, D]``, P groups of N vectors; float16, bfloat16, float32 or float64, of any finite size.
        n_clusters: entries of each palette, 1 to 256.
        weights: importance of each vector, ``[P, N]``, or of each element, ``[P, N, D]`` (summed over the
            vector); not negative. A group whose weights are all zero is clustered as if they were all one.
        seed: a whole number, or a generator that one number is drawn from. No global random state is read or
            changed, and the result does not depend on the number of threads.
        restarts: how many seedings are tried, at least 1.

    Returns:
        :class:`ClusterResult`.

    Raises:
        TypeError: ``values``, ``weights`` or ``seed`` have an unsuitable type.
        ValueError: a wrong shape, NaN or infinite values (with how many), bad weights or restarts.

    Source of the method: Arthur and Vassilvitskii 2007 (seeding); Lloyd 1982.
    """
    values = check_values(values, (3,), "[P, N, D]")
    weights = check_weights(weights, values)
    check_clusters(n_clusters)
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 1:
        raise ValueError(f"restarts must be a whole number of at least 1, got {restarts!r}")
    number = _number_of(seed)
    if values.shape[2] == 1:
        from bitwright.palettization.clustering.scalar import cluster_scalar

        return cluster_scalar(values.squeeze(2), n_clusters, weights=weights)
    check_finite(values)
    weights = lively_weights(weights)
    if values.device.type == "cuda":
        from bitwright.palettization.clustering._vectors_device import cluster_on_device

        return cluster_on_device(values, weights, n_clusters, number, restarts)
    from bitwright.palettization.clustering._vectors_host import cluster_on_host

    host = None if weights is None else weights.cpu()
    return moved_to(cluster_on_host(values.cpu(), host, n_clusters, number, restarts), values.device)


def _number_of(seed: int | torch.Generator) -> int:
    if isinstance(seed, torch.Generator):
        return int(torch.randint(2**62, (), generator=seed, device=seed.device))
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number or a torch.Generator, got {seed!r}")
    return seed
