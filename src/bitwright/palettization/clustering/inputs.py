"""Checks of what clustering is given; every complaint names the argument, its shape and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "MAX_CLUSTERS",
    "check_centroids",
    "check_clusters",
    "check_finite",
    "check_indices",
    "check_values",
    "check_weights",
    "lively_weights",
]

MAX_CLUSTERS = 256
"""Indices are uint8."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_values(values: Tensor, dims: tuple[int, ...], shape: str, name: str = "values") -> Tensor:
    """Return ``values`` detached and contiguous.

    Args:
        values: the tensor to check.
        dims: permitted numbers of dimensions.
        shape: how to name the shape in a message, such as ``"[P, N]"``.
        name: how to name the argument in a message.

    Raises:
        TypeError: not a tensor, or not float16, bfloat16, float32 or float64.
        ValueError: wrong number of dimensions, or no elements.
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {shape}, got {type(values).__name__}")
    if values.dtype not in _DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {values.dtype}")
    if values.dim() not in dims:
        raise ValueError(f"{name} must have shape {shape}, got {list(values.shape)}")
    if values.numel() == 0:
        raise ValueError(f"{name} of shape {list(values.shape)} has no elements to cluster")
    return values.detach().contiguous()


def check_finite(values: Tensor, name: str = "values") -> None:
    """Raise ``ValueError``, with how many there are, if ``values`` holds NaN or infinity."""
    low, high = torch.aminmax(values)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        nans = int(torch.isnan(values).sum())
        infinite = int(torch.isinf(values).sum())
        raise ValueError(
            f"{name} of shape {list(values.shape)} contains {nans} NaN and {infinite} infinite elements of "
            f"{values.numel()}; replace them before clustering"
        )


def check_weights(weights: Tensor | None, values: Tensor) -> Tensor | None:
    """Return the weights of the points as float32 or float64 ``[P, N]`` on the device of ``values``.

    One weight per element of a vector (shape ``[P, N, D]``) is summed over the vector.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: another shape than the points, or a negative, NaN or infinite weight.
    """
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"weights must be a floating-point tensor, got {kind}")
    if weights.shape != values.shape and weights.shape != values.shape[:2]:
        raise ValueError(
            f"weights must have one entry per point, shape {list(values.shape[:2])}, got {list(weights.shape)}"
        )
    weights = weights.detach().to(values.device)
    if weights.dtype != torch.float64:
        weights = weights.float()
    if weights.dim() == 3:
        weights = weights.sum(2)
    low, high = torch.aminmax(weights)
    if not (low >= 0 and torch.isfinite(high)):
        bad = int((~((weights >= 0) & torch.isfinite(weights))).sum())
        raise ValueError(f"weights must be finite and not negative; {bad} of {weights.numel()} are not")
    return weights.contiguous()


def lively_weights(weights: Tensor | None) -> Tensor | None:
    """Weights ``[P, N]`` in which groups that weigh nothing at all weigh one everywhere."""
    if weights is None:
        return None
    idle = weights.amax(1) == 0
    return torch.where(idle.unsqueeze(1), 1.0, weights) if bool(idle.any()) else weights


def check_clusters(n_clusters: int) -> int:
    """Return ``n_clusters`` if it is a whole number from 1 to 256, else raise ``ValueError``."""
    if isinstance(n_clusters, bool) or not isinstance(n_clusters, int) or not 1 <= n_clusters <= MAX_CLUSTERS:
        raise ValueError(f"n_clusters must be a whole number from 1 to {MAX_CLUSTERS} (8 bits), got {n_clusters!r}")
    return n_clusters


def check_centroids(centroids: Tensor, values: Tensor) -> Tensor:
    """Return palettes as float64 ``[P, K, D]`` that fit ``values`` of shape ``[P, N]`` or ``[P, N, D]``.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: a shape that does not fit, more than 256 entries, or NaN or infinity.
    """
    if isinstance(centroids, Tensor) and centroids.dim() == 2 and values.dim() == 2:
        centroids = centroids.unsqueeze(2)
    centroids = check_values(centroids, (3,), "[P, K, D]", "centroids")
    check_finite(centroids, "centroids")
    size = values.shape[2] if values.dim() == 3 else 1
    if centroids.shape[0] != values.shape[0] or centroids.shape[2] != size:
        raise ValueError(
            f"centroids of shape {list(centroids.shape)} do not fit values of shape {list(values.shape)}: "
            f"expected [{values.shape[0]}, K, {size}]"
        )
    check_clusters(centroids.shape[1])
    return centroids.to(values.device, torch.float64)


def check_indices(indices: Tensor, values: Tensor, n_clusters: int) -> None:
    """Raise unless ``indices`` is uint8 ``[P, N]``, below ``n_clusters`` and on the device of ``values``.

    Raises:
        TypeError: not uint8.
        ValueError: another shape or device, or an index that is too large.
    """
    if not isinstance(indices, Tensor) or indices.dtype != torch.uint8:
        raise TypeError(f"indices must be a uint8 tensor, got {getattr(indices, 'dtype', type(indices))}")
    if indices.shape != values.shape[:2] or indices.device != values.device:
        raise ValueError(
            f"indices must have shape {list(values.shape[:2])} on {values.device}, "
            f"got {list(indices.shape)} on {indices.device}"
        )
    if int(indices.max()) >= n_clusters:
        raise ValueError(f"indices reach {int(indices.max())}, but there are {n_clusters} palette entries")
