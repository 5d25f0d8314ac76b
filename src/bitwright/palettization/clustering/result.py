"""What clustering returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ClusterResult", "moved_to"]


@dataclass(frozen=True)
class ClusterResult:
    """Palettes and indices of P groups, each clustered on its own.

    Attributes:
        centroids: float64 ``[P, K, D]`` on the device of the values (float32 where the device has no float64).
            In each group they ascend (by the first coordinate, then the next, when D > 1); where the group has
            fewer different points than K, the last one is repeated.
        indices: uint8 ``[P, N]``, the nearest centroid of each point. Repeated centroids are never referred to.
        error: float64 ``[P]``, the sum of (weight ·) squared distances to the nearest centroid.
    """

    centroids: Tensor
    indices: Tensor
    error: Tensor

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """The points that the indices stand for, ``[P, N, D]``, in ``dtype`` or that of the centroids."""
        centroids = self.centroids if dtype is None else self.centroids.to(dtype)
        groups, n = self.indices.shape
        size = centroids.shape[2]
        places = self.indices.long().unsqueeze(2).expand(groups, n, size)
        return torch.gather(centroids, 1, places)


def moved_to(result: ClusterResult, device: torch.device) -> ClusterResult:
    """The result on another device, float32 where that has no float64."""
    if device == result.indices.device:
        return result
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return ClusterResult(result.centroids.to(device, dtype), result.indices.to(device), result.error.to(device, dtype))
