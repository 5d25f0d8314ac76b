"""Granularities: which part of a weight has a palette of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field

from bitwright._utils.registered_model import RegisteredModel

from .errors import _IncompatibleGranularityError

__all__ = ["PalettizationGranularity", "PerGroupedChannelGranularity", "PerTensorGranularity"]


class PalettizationGranularity(RegisteredModel, ABC):
    """Base class of granularities. Frozen and hashable; written as a mapping with a ``type`` key.

    Attributes:
        axis: the dimension that is divided into groups; None where that has no meaning, or for the default of the op
            that consumes the weight.
    """

    axis: Annotated[int, Field(ge=0, le=1)] | None = None

    @abstractmethod
    def num_groups(self, shape: Sequence[int]) -> int:
        """Return the number of palettes for a weight of this shape.

        Raises:
            ValueError: the groups do not divide the shape, or the axis is missing.
        """

    def num_blocks_to_cluster(self, weight: torch.Tensor) -> int:
        """Return the number of palettes for ``weight``.

        Raises:
            ValueError: as :meth:`num_groups`.
        """
        return self.num_groups(weight.shape)

    def get_blocks_to_cluster(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of ``weight`` that have a palette each, as views.

        Raises:
            ValueError: as :meth:`num_groups`.
        """
        return list(weight.chunk(self.num_groups(weight.shape), dim=self.axis or 0))

    def describe(self) -> str:
        """Return the granularity in a few words, for tables."""
        return type(self).registry_key()


@PalettizationGranularity.register("per_tensor")
class PerTensorGranularity(PalettizationGranularity):
    """One palette for the whole weight."""

    axis: Literal[None] = None

    def num_groups(self, shape: Sequence[int]) -> int:
        """Return 1."""
        return 1


@PalettizationGranularity.register("per_grouped_channel")
class PerGroupedChannelGranularity(PalettizationGranularity):
    """One palette for every ``group_size`` channels along ``axis``; a group of 1 is per channel.

    Attributes:
        axis: 0 or 1. None is the output axis of the op that consumes the weight, filled in by ``prepare``.
        group_size: channels in a group; must divide the dimension.
    """

    group_size: Annotated[int, Field(gt=0)]

    def num_groups(self, shape: Sequence[int]) -> int:
        """Return the size of ``axis`` divided by ``group_size``.

        Raises:
            ValueError: the axis is None or missing in ``shape``, or ``group_size`` does not divide it.
        """
        if self.axis is None:
            raise _IncompatibleGranularityError(
                "PerGroupedChannelGranularity has axis=None, and no default axis is known for this tensor; give the "
                f"axis, for example PerGroupedChannelGranularity(axis=0, group_size={self.group_size!r})."
            )
        if len(shape) <= self.axis:
            raise _IncompatibleGranularityError(f"a tensor of shape {tuple(shape)} has no axis {self.axis}")
        if shape[self.axis] % self.group_size:
            raise _IncompatibleGranularityError(
                f"dimension {self.axis} of a tensor of shape {tuple(shape)} is not divisible by group_size "
                f"{self.group_size}"
            )
        return shape[self.axis] // self.group_size

    def describe(self) -> str:
        """Return the granularity in a few words, for tables."""
        return f"per_grouped_channel({self.axis}, {self.group_size})"
