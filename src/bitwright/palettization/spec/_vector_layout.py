"""How a weight is cut into groups that share a palette, and each group into vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import _IncompatibleClusterDimError
from .granularity import PalettizationGranularity

__all__ = ["VectorLayout"]


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """The cut of a weight of a known shape.

    Vectors are neighbours along dimension 0. Groups are runs along dimension 0 or 1.

    Attributes:
        shape: sizes of the weight.
        axis: dimension that is divided into groups; None for one group.
        groups: number of groups, P.
        dim: entries of a vector, D.
    """

    shape: tuple[int, ...]
    axis: int | None
    groups: int
    dim: int

    @classmethod
    def of(cls, shape: Sequence[int], granularity: PalettizationGranularity, dim: int) -> VectorLayout:
        """Return the cut of a weight.

        Raises:
            ValueError: groups or vectors do not divide the shape.
        """
        shape = tuple(shape)
        groups = granularity.num_groups(shape)
        axis = None if groups == 1 else granularity.axis
        length = (shape[0] if shape else 1) // (groups if axis == 0 else 1)
        if length % dim:
            part = f"the {length} rows of a group of" if axis == 0 else f"dimension 0 ({length}) of"
            raise _IncompatibleClusterDimError(
                f"{part} a tensor of shape {shape} is not divisible by cluster_dim {dim}"
            )
        return cls(shape, axis, groups, dim)

    @property
    def index_shape(self) -> tuple[int, ...]:
        """Shape of the indices: that of the weight with dimension 0 divided by the length of a vector."""
        return (self.shape[0] // self.dim, *self.shape[1:]) if self.dim > 1 else self.shape

    def split(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the vectors of each group, ``[P, N, D]``; a view where possible."""
        if self.axis == 1:
            cut = weight.reshape(-1, self.dim, self.groups, self.shape[1] // self.groups, self._rest(2))
            return cut.permute(2, 0, 3, 4, 1).reshape(self.groups, -1, self.dim)
        if self.dim == 1:
            return weight.reshape(self.groups, -1, 1)
        cut = weight.reshape(self.groups, -1, self.dim, self._rest(1))
        return cut.transpose(2, 3).reshape(self.groups, -1, self.dim)

    def join(self, vectors: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`split`."""
        if self.axis == 1:
            cut = vectors.reshape(self.groups, -1, self.shape[1] // self.groups, self._rest(2), self.dim)
            return cut.permute(1, 4, 0, 2, 3).reshape(self.shape)
        if self.dim == 1:
            return vectors.reshape(self.shape)
        cut = vectors.reshape(self.groups, -1, self._rest(1), self.dim)
        return cut.transpose(2, 3).reshape(self.shape)

    def split_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return indices in :attr:`index_shape` as ``[P, N]``."""
        if self.axis == 1:
            cut = indices.reshape(-1, self.groups, self.shape[1] // self.groups, self._rest(2))
            return cut.transpose(0, 1).reshape(self.groups, -1)
        return indices.reshape(self.groups, -1)

    def join_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`split_indices`."""
        if self.axis == 1:
            cut = indices.reshape(self.groups, -1, self.shape[1] // self.groups, self._rest(2))
            return cut.transpose(0, 1).reshape(self.index_shape)
        return indices.reshape(self.index_shape)

    def _rest(self, start: int) -> int:
        size = 1
        for length in self.shape[start:]:
            size *= length
        return size
