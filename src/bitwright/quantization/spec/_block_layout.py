"""How a tensor divides into blocks, remembered for the shape seen last."""

from __future__ import annotations

import torch

from bitwright.config.spec import CompressionTargetTensor

from .granularity import QuantizationGranularity

__all__ = ["BlockLayout"]


class BlockLayout:
    """Resolves a granularity for the shapes that one simulator sees, which are nearly always the same one.

    Attributes:
        shape: the shape resolved last.
        counts: number of blocks along each dimension for the shape resolved last.
    """

    __slots__ = ("_block_size", "_granularity", "_target", "counts", "shape")

    def __init__(self) -> None:
        self.shape: torch.Size | None = None
        self._granularity: QuantizationGranularity | None = None
        self._target: CompressionTargetTensor | None = None
        self._block_size: tuple[int, ...] = ()
        self.counts: tuple[int, ...] = ()

    def block_size(
        self, shape: torch.Size, granularity: QuantizationGranularity, target: CompressionTargetTensor
    ) -> tuple[int, ...]:
        """Return ``granularity.get_block_size(shape, target)``.

        Raises:
            ValueError: the granularity does not fit the shape.
        """
        if torch.compiler.is_compiling():  # comparing would fix symbolic sizes, and they must not outlive their trace
            return granularity.get_block_size(shape, target)
        if shape != self.shape or granularity is not self._granularity or target is not self._target:
            self._block_size = granularity.get_block_size(shape, target)
            self.shape, self._granularity, self._target = shape, granularity, target
            self.counts = tuple(
                1 if size == block else size // block for size, block in zip(shape, self._block_size, strict=True)
            )
        return self._block_size
