"""Palettes that have to be quantized: centroids and assignment fitted to the quantized entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.palettization.clustering.assignment import assign, cluster_moments
from bitwright.palettization.clustering.result import ClusterResult

__all__ = ["Quantize", "RefitResult", "refit_to_quantized"]

Quantize = Callable[[Tensor], Tensor]
"""Palettes float64 ``[P, K, D]`` to what they read after quantization, same shape, any float dtype."""


@dataclass(frozen=True)
class RefitResult:
    """A palette and its quantized form.

    Attributes:
        centroids: float64 ``[P, K, D]``, the palettes to be quantized; not in ascending order any more.
        lut: float64 ``[P, K, D]``, what they read after quantization.
        indices: uint8 ``[P, N]``, the nearest entry of ``lut`` to each point.
        error: float64 ``[P]``, the sum of (weight ·) squared distances to that entry.
        choice: int64 ``[P]``, which of the given quantizations served each group best.
    """

    centroids: Tensor
    lut: Tensor
    indices: Tensor
    error: Tensor
    choice: Tensor

    def better_of(self, other: RefitResult) -> RefitResult:
        """Group by group the one with less error, this one on a tie."""
        wins = other.error < self.error
        deep = wins.view(-1, 1, 1)
        return RefitResult(
            torch.where(deep, other.centroids, self.centroids),
            torch.where(deep, other.lut, self.lut),
            torch.where(wins.view(-1, 1), other.indices, self.indices),
            torch.where(wins, other.error, self.error),
            torch.where(wins, other.choice, self.choice),
        )


def refit_to_quantized(
    values: Tensor,
    clusters: ClusterResult,
    quantize: Quantize | Sequence[Quantize],
    *,
    weights: Tensor | None = None,
    steps: int = 20,
) -> RefitResult:
    """Fit palettes to what they read after quantization.

    Points go to the nearest quantized entry, entries to the mean of their points, and so on as long as a
    group's error falls; entries that quantization made superfluous move to where the error is largest. The
    result is never worse, in any group, than quantizing the palettes as they are and keeping the indices.

    Args:
        values: the points that were clustered, ``[P, N]`` or ``[P, N, D]``.
        clusters: the result of clustering them.
        quantize: quantizes and dequantizes palettes, each group by itself, with fixed or fresh scales; or
            several such functions (different scales, say), of which each group takes the best.
        weights: as they were given to the clustering.
        steps: most rounds for each function.

    Returns:
        :class:`RefitResult`.

    Raises:
        TypeError, ValueError: as :func:`~.assignment.assign`; ``quantize`` is empty or changes the shape.
    """
    choices = [quantize] if callable(quantize) else list(quantize)
    if not choices:
        raise ValueError("quantize must be a function or a non-empty sequence of functions")
    best: RefitResult | None = None
    for number, choice in enumerate(choices):
        found = _descend(values, clusters.centroids, choice, number, weights, steps)
        best = found if best is None else best.better_of(found)
    assert best is not None
    return best


def _tried(
    values: Tensor, centroids: Tensor, quantize: Quantize, number: int, weights: Tensor | None
) -> tuple[RefitResult, tuple[Tensor, ...]]:
    """What the palettes come to when quantized, and the moments around their entries."""
    lut = quantize(centroids)
    if lut.shape != centroids.shape:
        raise ValueError(
            f"quantize must return palettes of the shape it got, {list(centroids.shape)}, got {list(lut.shape)}"
        )
    lut = lut.to(centroids.device, torch.float64)
    indices = assign(values, lut)
    moments = cluster_moments(values, indices, lut, weights=weights)
    error = moments[2].sum((1, 2))
    choice = torch.full(error.shape, number, dtype=torch.int64, device=error.device)
    return RefitResult(centroids, lut, indices, error, choice), moments


def _descend(
    values: Tensor,
    centroids: Tensor,
    quantize: Quantize,
    number: int,
    weights: Tensor | None,
    steps: int,
) -> RefitResult:
    best, moments = _tried(values, centroids.double(), quantize, number, weights)
    for _ in range(steps):
        proposals = [_means(best, moments)]
        if bool((moments[0] == 0).any()):
            proposals.append(_respread(best, moments))
        found = best
        for proposal in proposals:
            trial, trial_moments = _tried(values, proposal, quantize, number, weights)
            wins = trial.error < found.error
            moments = tuple(
                torch.where(wins.view(-1, *[1] * (new.dim() - 1)), new, old)
                for new, old in zip(trial_moments, moments, strict=True)
            )
            found = found.better_of(trial)
        if not bool((found.error < best.error).any()):
            break
        best = found
    return best


def _means(found: RefitResult, moments: tuple[Tensor, ...]) -> Tensor:
    """The mean of each entry's points; entries without points stay."""
    masses, offsets, _ = (moment if moment.dim() == 3 else moment.unsqueeze(2) for moment in moments)
    means = found.lut + offsets / torch.where(masses > 0, masses, 1.0)
    return torch.where(masses > 0, means, found.centroids)


def _respread(found: RefitResult, moments: tuple[Tensor, ...]) -> Tensor:
    """Means, but each entry without points splits a cluster with the next largest error."""
    masses, offsets, squares = moments
    idle = masses == 0
    means = _means(found, moments)
    errors = squares.sum(2)
    mass = torch.where(idle, 1.0, masses).unsqueeze(2)
    # half the width of either half of a uniform cluster
    spread = 0.87 * (squares / mass - (offsets / mass).square()).clamp(min=0).sqrt()
    rank = (idle.long().cumsum(1) - 1).clamp(min=0)
    partner = errors.argsort(dim=1, descending=True, stable=True).gather(1, rank)
    valid = idle & (errors.gather(1, partner) > 0)
    donors = torch.zeros_like(partner).scatter_reduce(1, partner, valid.long(), "amax").bool()
    deep = partner.unsqueeze(2).expand_as(means)
    split = torch.where(donors.unsqueeze(2), means - spread, means)
    return torch.where(valid.unsqueeze(2), (means + spread).gather(1, deep), split)
