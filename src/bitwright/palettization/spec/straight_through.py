"""Straight-through training: the forward computes with the palettized weight, the gradient goes to the dense one."""

from __future__ import annotations

from typing import Any

import torch

from .training_strategy import TrainingStrategy, TrainingStrategySpec

__all__ = ["STETrainingSpec"]


class _PassGradient(torch.autograd.Function):
    """The second argument in the forward; its gradient goes to the first (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(weight: torch.Tensor, palettized: torch.Tensor) -> torch.Tensor:
        return palettized.view_as(palettized)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Nothing is saved; ``torch.func`` wants the method."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _StraightThroughStrategy(TrainingStrategy):
    """Assign each entry anew whenever the weight has changed, and let the palette follow its members."""

    follows_weight = True

    def __init__(self, refit_palette: bool = True) -> None:
        self.refit_palette = refit_palette

    def train_forward(self, module: Any, weight: torch.Tensor) -> torch.Tensor:
        """Return the palettized weight; its gradient is that of ``weight``."""
        module.follow(weight, refit=self.refit_palette)
        palettized: torch.Tensor = _PassGradient.apply(weight, module.hard_assign(weight))  # type: ignore[no-untyped-call]
        return palettized


@TrainingStrategySpec.register("ste")
class STETrainingSpec(TrainingStrategySpec):
    """Straight-through estimator: weights learn as if they were not palettized, and are assigned anew at every step.

    Attributes:
        refit_palette: move each palette entry to the mean of its members at every step; False keeps the palettes.
    """

    refit_palette: bool = True

    _strategy_cls = _StraightThroughStrategy
