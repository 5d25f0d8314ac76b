"""Strategies of training with a palette: what stands for a weight in a training forward, and where gradients go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from bitwright._utils.registered_model import RegisteredModel

__all__ = ["DefaultTrainingSpec", "TrainingStrategy", "TrainingStrategySpec"]


class TrainingStrategy(ABC):
    """What a palettized weight does in training.

    The simulator offers ``vectorize``, ``devectorize``, ``importance_of``, ``hard_assign``, ``centroids``,
    ``set_centroids`` and ``quantize_lut``.

    Attributes:
        follows_weight: whether the last step of an optimizer leaves indices that are not those of the weight.
    """

    follows_weight: ClassVar[bool] = False

    @abstractmethod
    def train_forward(self, module: Any, weight: torch.Tensor) -> torch.Tensor:
        """Return what the layer computes with: shape and dtype of ``weight``.

        Args:
            module: the simulator, in train mode and switched on; its palette exists.
            weight: the dense weight that the optimizer owns.
        """


class TrainingStrategySpec(RegisteredModel, ABC):
    """Base class of the specs of strategies; its fields are the keyword arguments of the strategy.

    Attributes:
        _strategy_cls: the strategy that it builds (set by subclasses).
    """

    _strategy_cls: ClassVar[type[TrainingStrategy]]

    def build_strategy(self) -> TrainingStrategy:
        """Return a new strategy with the values of the fields."""
        return self._strategy_cls(**{name: getattr(self, name) for name in type(self).model_fields})


class _DefaultTrainingStrategy(TrainingStrategy):
    """The palettized weight, without gradient: only what is not palettized learns."""

    def train_forward(self, module: Any, weight: torch.Tensor) -> torch.Tensor:
        """Return the palettized weight."""
        palettized: torch.Tensor = module.hard_assign(weight)
        return palettized


@TrainingStrategySpec.register("default")
class DefaultTrainingSpec(TrainingStrategySpec):
    """Palettized weights stay as they are; other parameters learn around them."""

    _strategy_cls = _DefaultTrainingStrategy
