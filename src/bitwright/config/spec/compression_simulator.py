"""Base class of the modules that stand on a tensor and simulate its compression."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from bitwright._utils import optimizer_writes  # noqa: F401  (simulators rely on version counters)
from bitwright._utils.registry_utils import ClassRegistryMixin

__all__ = ["CompressionSimulatorBase"]


class CompressionSimulatorBase(ClassRegistryMixin, nn.Module):
    """A module that maps a tensor to what it becomes when compressed: same shape, dtype and device.

    Attributes:
        tensor_fqn: fully qualified name of the tensor, for messages (``"layers.0.weight"``).
    """

    tensor_fqn: str = "<unknown>"

    @abstractmethod
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` as its compressed form decodes."""

    def expect_new_weight(self) -> None:
        """Keep nothing of the weight: something is about to write to it in a way that no version counter shows."""
