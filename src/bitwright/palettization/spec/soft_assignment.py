"""Differentiable k-means: in training every weight is a mixture of palette entries."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from bitwright._utils.full_precision import full_precision

from .training_strategy import TrainingStrategy, TrainingStrategySpec

__all__ = ["DKMTrainingSpec"]

_SMALLEST_MASS = 1e-12
_LEAST_CLOSENESS = -30.0
_backward_task = torch._C._current_graph_task_id
_transforms_active = torch._C._are_functorch_transforms_active


class _SoftAssignmentStrategy(TrainingStrategy):
    """Attention between vectors and palette entries, and the palette as its fixed point.

    Forwards with the same weight start from the same palette, so that those between two steps of an optimizer, which
    gradient checkpointing may repeat in any order, compute with the same numbers.
    """

    follows_weight = True

    def __init__(self, temperature: float = 0.01, iterations: int = 3) -> None:
        self.temperature = temperature
        self.iterations = iterations
        self._start: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None  # what was given when the palette moved from its start
        self._made: torch.Tensor | None = None  # where it moved

    def train_forward(self, module: Any, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight made of mixtures; it is differentiable in ``weight``, also through the palette."""
        with full_precision(weight.device):
            return self._mix(module, weight)

    def _mix(self, module: Any, weight: torch.Tensor) -> torch.Tensor:
        vectors, context = module.vectorize(weight)
        vectors = vectors.float()
        importance = _relative(module.importance_of(weight.detach()))
        is_repeated = not torch.compiler.is_compiling() and self._moved_for(module, weight)
        start = self._start if is_repeated and self._start is not None else module.centroids.detach()
        palette = start.float()
        with torch.no_grad():
            unit = _unit(vectors, importance, self.temperature)
            for _ in range(self.iterations - 1):
                palette = _mean_of_members(vectors, importance, _attention(vectors, palette, unit), palette)
        palette = _mean_of_members(vectors, importance, _attention(vectors, palette, unit), palette)
        if torch.compiler.is_compiling():
            module.set_centroids(palette.detach())
        elif not (is_repeated or _backward_task() != -1 or _transforms_active()):
            module.set_centroids(palette.detach())
            self._start, self._weight, self._made = start, weight.detach().clone(), module.centroids.clone()
        attention = _attention(vectors, palette, unit)
        mixed = attention @ module.quantize_lut(palette)
        soft: torch.Tensor = module.devectorize(mixed.to(weight.dtype), context)
        return soft

    def _moved_for(self, module: Any, weight: torch.Tensor) -> bool:
        """Tell whether the palette has moved for this weight already, and is where it moved.

        In a backward that is so whatever the weight has become: what runs there is a forward that is repeated.
        """
        if self._start is None or _backward_task() != -1:
            return self._start is not None
        if _transforms_active():
            return False
        return _is_same(self._weight, weight.detach()) and _is_same(self._made, module.centroids)


def _is_same(known: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    if known is None or (known.dtype, known.device) != (tensor.dtype, tensor.device):
        return False
    return torch.equal(known, tensor)


def _relative(importance: torch.Tensor | None) -> torch.Tensor | None:
    """Return importance ``[P, N, D]`` as parts of the largest of each group; one without any counts all alike."""
    if importance is None:
        return None
    largest = importance.amax((1, 2), keepdim=True)
    return torch.where(largest > 0, importance / largest, 1.0)


def _unit(vectors: torch.Tensor, importance: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """Return the temperature in units of the variance of ``[P, N, D]`` vectors, ``[P, 1, 1]``.

    Entries without importance, such as pruned ones, have no part in it. Vectors that are equal up to rounding have no
    variance. They are as close to one entry as to the next: their own size as a unit says so, without dividing by zero.
    """
    number = torch.finfo(torch.float32)
    if importance is None:
        spread = vectors.var(1, correction=0).sum(-1)
    else:
        counted = (importance > 0).float()
        count = counted.sum(1, keepdim=True).clamp_min(1.0)
        vectors = vectors * counted
        means = vectors.sum(1, keepdim=True) / count
        spread = (counted * (vectors - means).square() / count).sum((1, 2))
    largest = vectors.square().sum(-1).amax(1)
    unit = torch.where(spread > number.eps**2 * largest, temperature * spread, largest)
    return unit.clamp_min(number.tiny).view(-1, 1, 1)


def _attention(vectors: torch.Tensor, palette: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Return how much each of ``[P, N, D]`` vectors belongs to each of ``[P, K, D]`` entries: ``[P, N, K]``.

    Softmax of -‖w - c‖² / τ (equation 1 of the paper); the square of w, common to all entries, drops out. What would
    be below 1e-13 of the largest is zero: smaller numbers soon leave the normal range of float32, where processors
    are slow.
    """
    closeness = 2 * (vectors @ palette.transpose(1, 2)) - palette.square().sum(-1).unsqueeze(1)
    closeness = (closeness - closeness.detach().amax(-1, keepdim=True)) / unit  # which may be far below all of them
    return torch.softmax(closeness.masked_fill(closeness < _LEAST_CLOSENESS, -torch.inf), dim=-1)


def _mean_of_members(
    vectors: torch.Tensor, importance: torch.Tensor | None, attention: torch.Tensor, palette: torch.Tensor
) -> torch.Tensor:
    """Return each entry moved to the (weighted) mean of its members; one without members stays (equation 2)."""
    members = attention.transpose(1, 2)
    if importance is None:
        mass, total = attention.sum(1).unsqueeze(-1), members @ vectors
    else:
        mass, total = members @ importance, members @ (vectors * importance)
    means = total / mass.clamp_min(_SMALLEST_MASS)
    return torch.where(mass > _SMALLEST_MASS, means, palette)


@TrainingStrategySpec.register("dkm")
class DKMTrainingSpec(TrainingStrategySpec):
    """Differentiable k-means (Cho et al., arXiv 2108.12659): soft in training, the nearest entry in evaluation.

    Takes memory for a float32 per weight and palette entry while training, so it is meant for few bits.

    Attributes:
        temperature: how soft the assignment is, in units of the variance of the weights that share a palette; near 0
            it is hard.
        iterations: steps of the fixed point of attention and palette for every weight; it starts from the palette of
            the weight before. Gradients go through the last step.
    """

    temperature: float = Field(default=0.01, gt=0.0)
    iterations: int = Field(default=3, gt=0)

    _strategy_cls = _SoftAssignmentStrategy
