"""Integer codes in the form that checkpoint formats share: signed, with one zero point for each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bitwright.artifact import QuantizedTensor

__all__ = ["SignedCodes", "signed_codes", "spread"]


def spread(parameter: torch.Tensor, block_size: Sequence[int]) -> torch.Tensor:
    """Return a parameter of every block for every element, given how many elements a block has along each dimension."""
    for dim, size in enumerate(block_size):
        if size > 1:
            parameter = parameter.repeat_interleave(size, dim)
    return parameter


@dataclass(frozen=True, slots=True)
class SignedCodes:
    """Codes of two's complement integers: ``value = (code - zero_point) * scale``.

    Attributes:
        codes: int8, in the tensor's shape.
        zero_point: int8, one for each block.
        scale: float32, one for each block.
        bits: bits of a code.
    """

    codes: torch.Tensor
    zero_point: torch.Tensor
    scale: torch.Tensor
    bits: int

    @property
    def is_symmetric(self) -> bool:
        """Whether all zero points are 0."""
        return not bool(self.zero_point.any())


def signed_codes(tensor: QuantizedTensor) -> SignedCodes:
    """Return the codes of an integer weight in the ``zp`` formulation.

    Unsigned codes are moved down by half their range. Entries that a mask drops get the code that stands for zero.
    """
    fmt, zero_point, mask = tensor.layout.number_format, tensor.zero_point(), tensor.mask()
    assert zero_point is not None
    codes, shift = tensor.codes().to(torch.int16), 0 if fmt.signed else 1 << (fmt.bits - 1)
    if mask is not None:
        dropped = spread(zero_point, tensor.layout.block_size)
        codes = torch.where(mask, codes, dropped.to(torch.int16))
    return SignedCodes((codes - shift).to(torch.int8), (zero_point - shift).to(torch.int8), tensor.scale(), fmt.bits)
