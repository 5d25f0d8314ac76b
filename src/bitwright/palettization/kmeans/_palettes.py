"""From vectors to palettes: the calls of the clustering engine that palettization makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bitwright.palettization.clustering import (
    ClusterResult,
    assign,
    cluster_moments,
    cluster_scalar,
    cluster_vectors,
    refit_to_quantized,
)

__all__ = ["find_palettes", "fit_to_quantized", "means_of_members", "nearest_entries"]

Quantize = Callable[[torch.Tensor], torch.Tensor]


def find_palettes(
    vectors: torch.Tensor,
    n_clusters: int,
    weights: torch.Tensor | None,
    *,
    fast: bool,
    seed: int,
    measured: bool,
    restarts: int,
) -> ClusterResult:
    """Return the palettes of ``[P, N, D]`` vectors that minimise the (weighted) squared error of each group.

    Args:
        vectors: floating point.
        n_clusters: entries of a palette, K.
        weights: importance of each entry, ``[P, N, D]``; None for all the same.
        fast: cluster scalars from a histogram.
        seed: of vector clustering.
        measured: whether the error of scalar palettes is wanted.
        restarts: how many seedings of vectors are tried.
    """
    if vectors.shape[2] > 1:
        return cluster_vectors(vectors, n_clusters, weights=weights, seed=seed, restarts=restarts)
    importance = None if weights is None else weights.squeeze(2)
    mode = "fast" if fast else "exact"
    return cluster_scalar(
        vectors.squeeze(2),
        n_clusters,
        weights=importance,
        mode=mode,  # type: ignore[arg-type]
        measured=measured,
    )


def fit_to_quantized(
    vectors: torch.Tensor,
    found: ClusterResult,
    quantize: Quantize,
    shares: Sequence[float],
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Return palettes ``[P, K, D]`` whose quantized form serves the vectors best.

    Args:
        vectors: ``[P, N, D]``.
        found: the palettes without quantization.
        quantize: palettes to what they read after quantization, with scales made from them.
        shares: parts of a palette's range that are tried; entries outside are clamped, which makes the scale smaller.
        weights: as for :func:`find_palettes`.

    Raises:
        ValueError: quantized palettes overflow.
    """

    def clamped(luts: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor:
        flat = luts.flatten(1)
        low, high = flat.amin(1).view(-1, 1, 1), flat.amax(1).view(-1, 1, 1)
        return luts.clamp(low * share, high * share) if not isinstance(share, float) or share < 1 else luts

    def tried(luts: torch.Tensor, share: float) -> torch.Tensor:
        quantized = quantize(clamped(luts, share))
        if bool(luts.isfinite().all()) and not bool(quantized.isfinite().all()):
            raise ValueError(
                f"palettes that reach {float(luts.abs().amax()):.4g} overflow float32 when they are quantized and read "
                "back. Scale the weight down (and the output of its layer up), or leave out lut_qspec."
            )
        return quantized

    choices = [lambda luts, share=share: tried(luts, share) for share in shares]
    refit = refit_to_quantized(vectors, found, choices, weights=weights)
    chosen = torch.tensor(list(shares), dtype=torch.float64, device=refit.choice.device)[refit.choice]
    palettes = clamped(refit.centroids, chosen.view(-1, 1, 1))
    return palettes.sort(dim=1).values if palettes.shape[2] == 1 else palettes


def nearest_entries(vectors: torch.Tensor, luts: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest of ``[P, K, D]`` entries for each of ``[P, N, D]`` vectors, uint8 ``[P, N]``."""
    return assign(vectors, luts)


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
    masses, offsets, _ = cluster_moments(vectors, indices, centroids, weights=weights)
    masses = masses.unsqueeze(2)
    means = centroids + offsets / torch.where(masses > 0, masses, 1.0)
    return torch.where(masses > 0, means, centroids.to(means.dtype)).to(centroids.dtype)
