"""From vectors to palettes: the calls of the clustering engine that palettization makes."""

from __future__ import annotations

import torch

from bitwright.palettization.clustering.result import ClusterResult
from bitwright.palettization.clustering.scalar import cluster_scalar

__all__ = ["find_palettes", "fit_to_quantized", "means_of_members", "nearest_entries"]


def nearest_entries(vectors, luts):
    return torch.stack([torch.cdist(v.float(), l.float()).argmin(1) for v, l in zip(vectors, luts)]).to(torch.uint8)


def cluster_vectors(vectors, k, weights=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    c = torch.stack([v[torch.randperm(len(v), generator=g)[torch.arange(k) % len(v)]] for v in vectors]).float()
    for _ in range(20):
        i = nearest_entries(vectors, c)
        c = means_of_members(vectors.float(), i, c, weights)
    return ClusterResult(c, nearest_entries(vectors, c), c.sum((1, 2)))


def fit_to_quantized(vectors, centroids, quantize, weights):
    c = centroids.float()
    for _ in range(5):
        i = nearest_entries(vectors, quantize(c))
        c = means_of_members(vectors.float(), i, c, weights)
    return c, nearest_entries(vectors, quantize(c))


def find_palettes(
    vectors: torch.Tensor, n_clusters: int, weights: torch.Tensor | None, *, fast: bool, seed: int
) -> ClusterResult:
    """Return the palettes of ``[P, N, D]`` vectors that minimise the (weighted) squared error of each group."""
    if vectors.shape[2] == 1:
        importance = None if weights is None else weights.squeeze(2)
        return cluster_scalar(vectors.squeeze(2), n_clusters, weights=importance, mode="fast" if fast else "exact")
    return cluster_vectors(vectors, n_clusters, weights=weights, seed=seed)


def means_of_members(
    vectors: torch.Tensor, indices: torch.Tensor, centroids: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Return each palette entry moved to the (weighted) mean of its members; one without members stays.

    Args:
        vectors: ``[P, N, D]``.
        indices: uint8 ``[P, N]``.
        centroids: ``[P, K, D]``.
        weights: importance of each entry, ``[P, N, D]`` or None.
    """
    groups, entries, dim = centroids.shape
    places = indices.long() + torch.arange(groups, device=indices.device).unsqueeze(1) * entries
    mass = torch.ones_like(vectors[..., 0], dtype=torch.float32) if weights is None else weights.float().sum(2)
    totals = torch.zeros(groups * entries, device=vectors.device).index_add_(0, places.flatten(), mass.flatten())
    sums = torch.zeros(groups * entries, dim, device=vectors.device)
    sums.index_add_(0, places.flatten(), (vectors.float() * mass.unsqueeze(2)).reshape(-1, dim))
    means = (sums / totals.unsqueeze(1).clamp_min(torch.finfo(torch.float32).tiny)).view(centroids.shape)
    return torch.where((totals > 0).view(groups, entries, 1), means.to(centroids.dtype), centroids)
