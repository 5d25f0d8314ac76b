"""Forms of operators on integers that ExecuTorch's verifier does not know, written with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitwright.export.lacking_basics import LACKING_BASICS

__all__ = ["INTEGERS"]

_aten = torch.ops.aten


def _by_tensor(shift: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A shift by a number for each element, as shifts by 1, 2, 4 and so on of those whose number has that bit."""

    def shifted(x: Tensor, bits: Tensor) -> Tensor:
        dtype = torch.result_type(x, bits)
        x, bits = x.to(dtype), bits.to(dtype)
        width = torch.iinfo(dtype).bits
        y = x
        for step in (1 << place for place in range(width.bit_length() - 1)):
            y = torch.where(torch.bitwise_and(bits, step) != 0, shift(y, step), y)
        return torch.where((bits < 0) | (bits >= width), shift(x, width), y)

    return shifted


def _of_number(op: Callable[[Tensor, Tensor], Tensor]) -> Callable[[float, Tensor], Tensor]:
    """An operator of a number and a tensor, made of the one of two tensors."""

    def applied(number: float, x: Tensor) -> Tensor:
        dtype = torch.result_type(number, x)
        return op(torch.full_like(x, number, dtype=dtype), x.to(dtype))

    return applied


def _shifts(name: str) -> dict[Any, Callable[..., Any]]:
    """All forms of a shift, ``"left"`` or ``"right"``, but the one that is written with others already."""
    packet, operator = getattr(_aten, f"bitwise_{name}_shift"), getattr(_aten, f"__{name[0]}shift__")
    by_number = LACKING_BASICS[operator.Scalar]
    by_tensor = _by_tensor(by_number)
    return {
        operator.Tensor: by_tensor,
        packet.Tensor: by_tensor,
        packet.Tensor_Scalar: by_number,
        packet.Scalar_Tensor: _of_number(by_tensor),
    }


INTEGERS: dict[Any, Callable[..., Any]] = {
    **_shifts("left"),
    **_shifts("right"),
    _aten.bitwise_and.Scalar_Tensor: _of_number(torch.bitwise_and),
    _aten.bitwise_or.Scalar_Tensor: _of_number(torch.bitwise_or),
    _aten.bitwise_xor.Scalar_Tensor: _of_number(torch.bitwise_xor),
    _aten.remainder.Scalar_Tensor: _of_number(torch.remainder),
}
"""Decompositions of shifts, and of operators with a number in front of a tensor."""
