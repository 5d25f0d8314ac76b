"""Schemes: which entries of a tensor are removed together, and how many.

A scheme pools the scores of single entries into scores of *units* (an entry, a block, a channel), the units with the
smallest scores are removed, and the decision is spread to the entries again. N:M patterns decide within each group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator

from bitwright._utils.registered_model import RegisteredModel

from .errors import _BlockSizeMismatchError

__all__ = [
    "BlockStructured",
    "ChannelStructured",
    "NMStructured",
    "PruningScheme",
    "Unstructured",
    "keep_largest",
    "removed_units",
]

_ROUNDING = 1e-9
"""Guards ``floor(count * sparsity)`` against products such as 100 * 0.29 that lie just below a whole number."""


def removed_units(count: int, sparsity: float) -> int:
    """Return how many of ``count`` units go for a share of them."""
    return min(count, math.floor(count * sparsity + _ROUNDING))


def keep_largest(scores: torch.Tensor, sparsity: float, rows: int = 1) -> torch.Tensor:
    """Return which entries to keep: all but the ``floor(n * sparsity)`` smallest, exactly that many.

    Entries of equal score are kept in order of their position.

    Args:
        scores: any shape, any float dtype; larger is more important.
        sparsity: share to remove, in [0, 1].
        rows: the flattened scores are ranked in this many rows of equal length, each on its own.

    Returns:
        bool, shape of ``scores``.
    """
    flat = _widened(scores.detach()).reshape(rows, -1)
    length = flat.shape[1]
    removed = removed_units(length, sparsity)
    if removed == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    if removed == length:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = flat.kthvalue(removed, dim=1, keepdim=True).values
    kept = flat > threshold
    ties = flat == threshold
    missing = (length - removed) - kept.sum(1, keepdim=True)
    if bool((ties.sum(1, keepdim=True) == missing).all()):  # the usual case, without a cumulative sum
        kept |= ties
    else:
        kept |= ties & (ties.cumsum(1) <= missing)
    return kept.view(scores.shape)


def _widened(scores: torch.Tensor) -> torch.Tensor:
    """Return scores of less than 32 bits as float32, others as they are."""
    return scores if scores.dtype == torch.float64 else scores.float()


class PruningScheme(RegisteredModel):
    """Base class of schemes. Frozen and hashable; written as a mapping with a ``type`` key.

    A scheme of your own may be just its fields, for an algorithm of your own whose ``compute_mask`` reads them; other
    algorithms then take every entry on its own. With ``pool`` and ``spread`` it serves all algorithms.

    Attributes:
        axis: the dimension that the scheme is about; None where that has no meaning, or for the default of the op that
            consumes the weight.
    """

    axis: int | None = None

    def pool(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the score of each unit, comparable between tensors of different sizes; here of each entry.

        Args:
            scores: one non-negative score per entry of the weight.

        Raises:
            ValueError: the scheme does not fit the shape.
        """
        return scores

    def spread(self, kept: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the mask of entries, bool of ``shape``, for a decision about each unit."""
        return kept

    def check(self, shape: Sequence[int]) -> None:
        """Check that the scheme fits a weight of this shape.

        Raises:
            ValueError: it does not; says why.
        """
        self.pool(torch.empty(tuple(shape), device="meta"))

    def mask_from_scores(self, scores: torch.Tensor, sparsity: float) -> torch.Tensor:
        """Return the mask that removes the units with the smallest scores.

        Args:
            scores: one non-negative score per entry.
            sparsity: share of the units to remove, in [0, 1].

        Returns:
            bool, shape of ``scores``; False where an entry is removed.

        Raises:
            ValueError: the scheme does not fit the shape.
        """
        return self.spread(keep_largest(self.pool(scores), sparsity), scores.shape)

    def compute_mask(self, weight: torch.Tensor, sparsity: float) -> torch.Tensor:
        """Return the mask by magnitude, in the dtype of ``weight``: 1 for kept entries, 0 for removed ones.

        Raises:
            ValueError: the scheme does not fit the shape.
        """
        return self.mask_from_scores(weight.detach().abs(), sparsity).to(weight.dtype)

    def final_sparsity(self, target_sparsity: float) -> float:
        """Return the share of entries that is removed in the end; a pattern may fix it."""
        return target_sparsity

    def describe(self) -> str:
        """Return the scheme in a few words, for tables."""
        return type(self).registry_key()


def _normalized_axis(axis: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"Invalid axis {axis} for a tensor of shape {tuple(shape)}; it must lie in [{-len(shape)}, {len(shape)})."
        )
    return axis % len(shape)


@PruningScheme.register("unstructured")
class Unstructured(PruningScheme):
    """Every entry on its own."""

    axis: Literal[None] = None


@PruningScheme.register("channel_structured")
class ChannelStructured(PruningScheme):
    """Whole channels: all entries with one index along ``axis``, ranked by their mean score (L1 for magnitudes).

    Every entry of a bias, or of another tensor of one dimension, is a channel.

    Attributes:
        axis: the channel dimension, negative from the end.
    """

    axis: int = 0

    def pool(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the mean score of each channel, shape ``[C]``."""
        axis = _normalized_axis(self.axis, scores.shape)
        others = [dim for dim in range(scores.ndim) if dim != axis]
        return _widened(scores).mean(others) if others else _widened(scores)  # mean([]) is the mean of all

    def spread(self, kept: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Repeat each channel's decision over its entries."""
        axis = _normalized_axis(self.axis, shape)
        sizes = [-1 if dim == axis else 1 for dim in range(len(shape))]
        return kept.view(sizes).expand(tuple(shape)).clone()

    def describe(self) -> str:
        """Return the scheme in a few words, for tables."""
        return f"channel_structured({self.axis})"


@PruningScheme.register("block_structured")
class BlockStructured(PruningScheme):
    """Blocks of neighbours, ranked by the root of the mean square of their scores (L2 for magnitudes).

    Attributes:
        axis: the dimension that is cut into blocks when ``block_size`` is an int, negative from the end; otherwise
            without effect.
        block_size: an int gives blocks of that length along ``axis`` and 1 in every other dimension; a tuple gives the
            length in every dimension, for example ``(4, 4)`` for square blocks of a matrix.
    """

    axis: int = 0
    block_size: Annotated[int, Field(gt=0)] | tuple[Annotated[int, Field(gt=0)], ...]

    def pool(self, scores: torch.Tensor) -> torch.Tensor:
        """Return one score per block, shape ``size // block`` in every dimension."""
        cut = scores.double().square().reshape(self._cut_shape(scores.shape))  # float32 holds few squares
        return cut.mean(list(range(1, cut.ndim, 2))).sqrt()

    def spread(self, kept: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Repeat each block's decision over its entries."""
        cut = self._cut_shape(shape)
        sizes = [size if dim % 2 == 0 else 1 for dim, size in enumerate(cut)]
        return kept.view(sizes).expand(cut).reshape(tuple(shape))

    def _cut_shape(self, shape: Sequence[int]) -> list[int]:
        """Return ``[n0 / b0, b0, n1 / b1, b1, ...]``."""
        if isinstance(self.block_size, int):
            axis = _normalized_axis(self.axis, shape)
            block = tuple(self.block_size if dim == axis else 1 for dim in range(len(shape)))
        else:
            block = self.block_size
        if len(block) != len(shape):
            raise ValueError(
                f"block_size {block} has {len(block)} entries for a tensor of shape {tuple(shape)}; give one for each "
                "dimension, or an integer with an axis."
            )
        for dim, (size, length) in enumerate(zip(shape, block, strict=True)):
            if size % length:
                raise _BlockSizeMismatchError(
                    f"dimension {dim} of a tensor of shape {tuple(shape)} is not divisible by block size {length}"
                )
        return [part for size, length in zip(shape, block, strict=True) for part in (size // length, length)]

    def describe(self) -> str:
        """Return the scheme in a few words, for tables."""
        along = f"{self.axis}, " if isinstance(self.block_size, int) else ""
        return f"block_structured({along}{self.block_size})"


@PruningScheme.register("n_m_structured")
class NMStructured(PruningScheme):
    """The ``n`` smallest of every ``m`` neighbours along ``axis``, as sparse matrix units want it (``n=2, m=4``).

    The pattern fixes the sparsity, n / m; ``target_sparsity`` has no effect. A schedule grows the number of removed
    neighbours from 0 to n.

    Attributes:
        axis: the dimension along which groups of ``m`` lie, negative from the end. None is the input axis of the op
            that consumes the weight, or 1.
        n: entries removed from each group, less than ``m``.
        m: size of a group; must divide the dimension.
    """

    axis: int | None = None
    n: Annotated[int, Field(ge=0)] = 2
    m: Annotated[int, Field(gt=0)] = 4

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.n >= self.m:
            raise ValueError(f"n ({self.n}), the entries removed of each group, must be less than m ({self.m}).")
        return self

    def pool(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores in groups, shape ``[..., groups, m]`` with ``axis`` moved to the end."""
        axis = self._axis(scores.shape)
        if scores.shape[axis] % self.m:
            raise _BlockSizeMismatchError(
                f"dimension {axis} of a tensor of shape {tuple(scores.shape)} is not divisible by m={self.m}"
            )
        moved = scores.movedim(axis, -1)
        return moved.reshape(*moved.shape[:-1], -1, self.m)

    def spread(self, kept: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Undo the grouping of :meth:`pool`."""
        moved = kept.flatten(-2).movedim(-1, self._axis(shape))
        # Not contiguous(): it keeps odd strides of dimensions of size one, by which convolutions choose their kernel.
        return moved.clone(memory_format=torch.contiguous_format)

    def mask_from_scores(self, scores: torch.Tensor, sparsity: float) -> torch.Tensor:
        """Return the mask that removes ``min(n, floor(m * sparsity))`` entries of every group."""
        groups = self.pool(scores)
        removed = min(self.n, math.floor(self.m * sparsity + _ROUNDING))
        order = _widened(groups).argsort(stable=True, dim=-1)
        kept = torch.ones_like(groups, dtype=torch.bool)
        kept.scatter_(-1, order[..., :removed], False)
        return self.spread(kept, scores.shape)

    def final_sparsity(self, target_sparsity: float) -> float:
        """Return n / m."""
        return self.n / self.m

    def _axis(self, shape: Sequence[int]) -> int:
        axis = min(1, len(shape) - 1) if self.axis is None else self.axis
        return _normalized_axis(axis, shape)

    def describe(self) -> str:
        """Return the scheme in a few words, for tables."""
        return f"{self.n}:{self.m}"
