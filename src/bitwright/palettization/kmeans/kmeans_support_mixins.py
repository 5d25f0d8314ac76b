"""What palettization must know about an op: the axis of its output channels, and how its weight is a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

__all__: list[str] = []


class _PalettizationSupportMixin:
    """Base of the entries of the registry of ops.

    Subclasses for ops of one's own may reorder the weight before it is cut into groups and vectors, by overriding both
    methods; the indices then have the shape of the reordered weight.

    Attributes:
        ops: the functions that it stands for.
        default_axis: the dimension of output channels.
    """

    ops: ClassVar[list[Callable[..., Any]]] = []
    default_axis: ClassVar[int] = 0

    def reshape_for_kmeans(self, weight: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the weight in the order in which it is cut into groups along ``axis``."""
        return weight

    def reshape_to_original(
        self, clustered_weight: torch.Tensor, axis: int, original_shape: torch.Size
    ) -> torch.Tensor:
        """Undo ``reshape_for_kmeans``."""
        return clustered_weight.reshape(original_shape)


class _OutputsFirst(_PalettizationSupportMixin):
    """Ops whose weights have output channels in dimension 0."""

    ops: ClassVar[list[Callable[..., Any]]] = [
        F.linear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.embedding,
        F.multi_head_attention_forward,
    ]


class _InputsFirst(_PalettizationSupportMixin):
    """Ops whose weights have input channels in dimension 0."""

    ops: ClassVar[list[Callable[..., Any]]] = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]
    default_axis: ClassVar[int] = 1
