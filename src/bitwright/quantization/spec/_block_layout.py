"""How a tensor divides into blocks, remembered for the shape seen last."""

from __future__ import annotations

import torch

from bitwright.config.spec import CompressionTargetTensor

from .granularity import QuantizationGranularity

__all__ = ["BlockLayout"]


class BlockLayout:
    """Resolves a granularity for the shapes that one simulator sees, which are nearly always the same one."""

    __slots__ = ("_block_size", "_granularity", "_shape", "_target")

    def __init__(self) -> None:
        self._shape: torch.Size | None = None
        self._granularity: QuantizationGranularity | None = None
        self._target: CompressionTargetTensor | None = None
        self._block_size: tuple[int, ...] = ()

    def block_size(
        self, shape: torch.Size, granularity: QuantizationGranularity, target: CompressionTargetTensor
    ) -> tuple[int, ...]:
        """Return ``granularity.get_block_size(shape, target)``.

        Raises:
            ValueError: the granularity does not fit the shape.
        """
        if torch.compiler.is_compiling():  # symbolic sizes must not outlive their trace
            return granularity.get_block_size(shape, target)
        if shape != self._shape or granularity is not self._granularity or target is not self._target:
            self._block_size = granularity.get_block_size(shape, target)
            self._shape, self._granularity, self._target = shape, granularity, target
        return self._block_size
