"""Vector clustering of tensors that are not on the CPU.

A large sample of each group is clustered on the CPU, where leaving bad optima takes many small steps; the device
goes on from there with Lloyd's algorithm over all vectors of all groups.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bitwright.palettization.clustering import _device
from bitwright.palettization.clustering._pieces import NO_WEIGHTS, in_turn
from bitwright.palettization.clustering._threads import run_all
from bitwright.palettization.clustering._vectors_host import palette_of, strata, stream_of, tidy
from bitwright.palettization.clustering.result import ClusterResult

_SAMPLE_PER_CLUSTER = 512
_LEAST_SAMPLE = 1 << 15
_STEPS = 60
_TOLERANCE = 2e-5


def _subsample(values: Tensor, weights: Tensor | None, size: int, seed: int) -> Tensor:
    """``[P, S, D]`` vectors drawn by weight."""
    groups, length, dims = values.shape
    at = np.stack([strata(size, stream_of(seed, group, 0)) for group in range(groups)])
    where = torch.from_numpy(at).to(values.device)
    if weights is None:
        places = (where * length).long()
    else:
        along = weights.double().cumsum(1)
        places = torch.searchsorted(along, where * along[:, -1:], right=True)
    places = places.clamp(max=length - 1)
    return values.gather(1, places.unsqueeze(2).expand(-1, -1, dims))


def _lloyd(points: Tensor, weights: Tensor | None, centroids: Tensor) -> Tensor:
    """Lloyd's algorithm on every group, float64 ``[P, K, D]``."""
    before = centroids.new_full((points.shape[0],), torch.inf)
    for _ in range(_STEPS):
        labels = _device.label_vectors(points, centroids)
        masses, offsets, squares = _device.moments_by_label(points, weights, labels, centroids)
        error = squares.sum((1, 2))
        if not bool((error > 0).any()):
            break
        idle = masses == 0
        centroids = centroids + offsets / torch.where(idle, 1.0, masses).unsqueeze(2)
        if bool(idle.any()):
            centroids = _filled(points, weights, labels, centroids, idle)
        elif not bool((before - error > _TOLERANCE * error).any()):
            break
        before = error
    return centroids


def _filled(points: Tensor, weights: Tensor | None, labels: Tensor, centroids: Tensor, idle: Tensor) -> Tensor:
    """Move the first idle centroid of each group to the point that is worst served."""
    near = centroids.gather(1, labels.long().unsqueeze(2).expand(-1, -1, points.shape[2]))
    far = (points.double() - near).square().sum(2)
    worst = (far if weights is None else far * weights).argmax(1)
    moved = points[torch.arange(points.shape[0], device=points.device), worst].double()
    first = (idle & (idle.long().cumsum(1) == 1)).unsqueeze(2)
    return torch.where(first, moved.unsqueeze(1), centroids)


def _few(values: Tensor, weights: Tensor | None, n_clusters: int) -> Tensor | None:
    """The different vectors of one group, or None where there are more than ``n_clusters``."""
    found = torch.unique(values if weights is None else values[weights > 0], dim=0)
    return found if found.shape[0] <= n_clusters else None


def cluster_on_device(
    values: Tensor, weights: Tensor | None, n_clusters: int, seed: int, restarts: int
) -> ClusterResult:
    """:func:`~.vectors.cluster_vectors` for checked tensors of any device with float64."""
    groups, length, _ = values.shape
    size = max(_SAMPLE_PER_CLUSTER * n_clusters, _LEAST_SAMPLE)
    whole = size >= length
    sample = (values if whole else _subsample(values, weights, size, seed)).cpu()
    loads = None if weights is None or not whole else weights.cpu().numpy()

    def palette(group: int) -> Tensor:
        some = NO_WEIGHTS if loads is None else loads[group]
        found = palette_of(sample[group], some, n_clusters, seed, group, restarts, in_turn)
        return torch.from_numpy(found)

    palettes = torch.stack(run_all(palette, range(groups))).to(values.device)
    if not whole:
        reach = values.abs().amax((1, 2), keepdim=True).double()
        scale = torch.where(reach > 0, 1.0 / reach.clamp_min(1e-300), 1.0)
        better = (_lloyd(values.double() * scale, weights, palettes * scale) / scale).cpu().numpy()
        for group in range(groups):
            few = None
            if torch.unique(palettes[group], dim=0).shape[0] < n_clusters:
                few = _few(values[group], None if weights is None else weights[group], n_clusters)
            found = better[group] if few is None else few.double().cpu().numpy()
            palettes[group] = torch.from_numpy(tidy(found, n_clusters))
    labels = _device.label_vectors(values, palettes)
    return ClusterResult(palettes, labels, _device.errors(values, weights, labels, palettes))
