"""Range calculators: the smallest and the largest value that each block of a tensor should be able to hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from bitwright import kernels
from bitwright._utils.registry_utils import ClassRegistryMixin
from bitwright.config.spec import CompressionTargetTensor
from bitwright.kernels.grid import block_view_shape

from ._block_layout import BlockLayout
from .granularity import QuantizationGranularity

__all__ = ["MinMaxRangeCalculator", "RangeCalculatorBase"]


class RangeCalculatorBase(ClassRegistryMixin, nn.Module, ABC):
    """Base class: implement ``_generate_min_max`` and register with ``@RangeCalculatorBase.register("<key>")``.

    Args:
        granularity: how the tensor divides into blocks.
        quantization_target: what the tensor is; weights and activations divide into blocks differently.
        **kwargs: the fields that a subclass of ``QuantizationSpec`` adds; ignored here.

    Attributes:
        needs_spec: whether the constructor takes the whole spec, as ``spec``.
        accumulates: whether the range is that of all activations seen so far, not of the latest one. A class says
            whether it can; qparams calculators that combine the ranges of single tensors turn it off.
    """

    needs_spec: ClassVar[bool] = False
    accumulates: bool = False

    def __init__(
        self,
        granularity: QuantizationGranularity,
        quantization_target: CompressionTargetTensor = CompressionTargetTensor.WEIGHT,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.granularity = granularity
        self.quantization_target = quantization_target
        self._layout = BlockLayout()

    @abstractmethod
    def _generate_min_max(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range of each block of ``x``: two tensors with one element per block, in any shape."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smallest and the largest value of every block.

        Args:
            x: tensor of any shape, floating point.

        Returns:
            Two tensors of shape ``x.shape // block_size``, in the dtype of ``x``.

        Raises:
            ValueError: the granularity does not fit the shape of ``x``.
        """
        low, high = self._generate_min_max(x)
        block_size = self._block_size(x.shape)
        shape = tuple(1 if size == block else size // block for size, block in zip(x.shape, block_size, strict=True))
        if low.shape != shape:
            low, high = low.reshape(shape), high.reshape(shape)
        return low, high

    def _block_size(self, shape: torch.Size) -> tuple[int, ...]:
        return self._layout.block_size(shape, self.granularity, self.quantization_target)


@RangeCalculatorBase.register("minmax")
class MinMaxRangeCalculator(RangeCalculatorBase):
    """The smallest and the largest element of each block. A NaN in a block makes its range NaN."""

    def _generate_min_max(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block_size = self._block_size(x.shape)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return kernels.min_max(x, block_size)
        view, inner, _, counts = block_view_shape(tuple(x.shape), block_size)
        blocks = x.reshape(view)
        if not inner:
            return blocks.reshape(counts), blocks.reshape(counts)
        return torch.amin(blocks, inner).reshape(counts), torch.amax(blocks, inner).reshape(counts)
