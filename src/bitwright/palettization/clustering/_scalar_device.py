"""Scalar clustering of tensors that are not on the CPU.

The device sorts, merges values into atoms and assigns; the partition itself is sequential and small, and is
solved on the CPU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.palettization.clustering import _device
from bitwright.palettization.clustering._atoms import cluster_atoms
from bitwright.palettization.clustering._effort import EXACT, Effort, effort_for
from bitwright.palettization.clustering._scalar_host import solve_rows
from bitwright.palettization.clustering._threads import run_all
from bitwright.palettization.clustering.inputs import check_finite
from bitwright.palettization.clustering.result import ClusterResult

_Floats = npt.NDArray[np.float64]

_FILL_STEPS = 6


def _along(values: Tensor, weights: Tensor | None, target: int) -> Tensor:
    """How many atoms lie below each ascending value, ``[P, N]``: see ``_spacing`` and ``spread_unit``."""
    gaps = values.diff(dim=1)
    mass = 1.0 if weights is None else 0.5 * (weights[:, 1:] + weights[:, :-1])
    measure = (gaps.square() * mass).pow(1.0 / 3.0)
    unit = measure.sum(1, keepdim=True) / target
    for _ in range(_FILL_STEPS):
        full = measure >= unit
        rest = torch.where(full, 0.0, measure).sum(1, keepdim=True)
        left = (target - full.sum(1, keepdim=True)).clamp(min=1)
        unit = torch.where(rest > 0, rest / left, unit)
    steps = (measure / torch.where(unit > 0, unit, 1.0)).clamp(max=1.0)
    return torch.cat([torch.zeros_like(values[:, :1]), steps.cumsum(1)], 1)


def _atoms(values: Tensor, weights: Tensor | None, target: int) -> tuple[_Floats, _Floats]:
    """Values merged into at most about ``target`` atoms: positions and masses ``[P, B]``, some without mass."""
    ordered, order = values.double().sort(dim=1)
    mass = None if weights is None else weights.double().gather(1, order)
    centre = ordered[:, ordered.shape[1] // 2, None]
    scale = (ordered[:, -1:] - ordered[:, :1]).clamp(min=torch.finfo(torch.float64).tiny)
    places = (ordered - centre) / scale
    along = _along(places, mass, target).floor()
    last = int(along[:, -1].max()) + 1
    edges = torch.arange(last + 1, device=values.device, dtype=torch.float64).expand(values.shape[0], -1)
    edges = torch.searchsorted(along, edges.contiguous())
    sums = []
    for term in (torch.ones_like(places) if mass is None else mass, places if mass is None else places * mass):
        prefix = torch.nn.functional.pad(term.cumsum(1), (1, 0))
        sums.append(prefix.gather(1, edges).diff(dim=1))
    found = sums[1] / torch.where(sums[0] > 0, sums[0], 1.0) * scale + centre
    return found.cpu().numpy(), sums[0].cpu().numpy()


def _solve(values: Tensor, weights: Tensor | None, n_clusters: int, effort: Effort) -> tuple[_Floats, _Floats]:
    """Centroids ``[P, K]`` and the errors between atoms ``[P]``."""
    if effort is EXACT or values.shape[1] <= 2 * effort.limit:
        host = None if weights is None else weights.cpu()
        return solve_rows(values.cpu(), host, n_clusters, EXACT)
    positions, masses = _atoms(values, weights, effort.limit)
    centroids, outside = np.empty((positions.shape[0], n_clusters)), np.empty(positions.shape[0])

    def solve(row: int) -> None:
        # rounding may leave two neighbours in the wrong order
        atoms, place = np.unique(positions[row][masses[row] > 0], return_inverse=True)
        weight = np.bincount(place, masses[row][masses[row] > 0]).astype(np.float64)
        _, outside[row] = cluster_atoms(atoms, weight, n_clusters, effort.tolerance, centroids[row])

    run_all(solve, range(positions.shape[0]))
    return centroids, outside


def cluster_on_device(values: Tensor, weights: Tensor | None, n_clusters: int, mode: str) -> ClusterResult:
    """:func:`~.scalar.cluster_scalar` for checked tensors of any device with float64."""
    check_finite(values)
    effort = effort_for(n_clusters, mode)
    centroids, outside = _solve(values, weights, n_clusters, effort)
    for attempt in (effort, EXACT):
        palettes = torch.from_numpy(centroids).to(values.device).unsqueeze(2)
        labels = _device.label_scalars(values, palettes.squeeze(2))
        errors = _device.errors(values.unsqueeze(2), weights, labels, palettes)
        coarse = attempt.too_coarse(errors.cpu().numpy(), outside)
        if coarse.size == 0:
            break
        again = torch.from_numpy(coarse).to(values.device)
        some = None if weights is None else weights[again]
        centroids[coarse], outside[coarse] = _solve(values[again], some, n_clusters, EXACT)
    return ClusterResult(palettes, labels, errors)
