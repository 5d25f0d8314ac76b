"""Operators on integers for torch's ONNX exporter, whose own translations no kernel of ONNX Runtime takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .promotion import in_type, number, result_type
from .torchlib import operators, torchs_translation

__all__ = [
    "PLACES", "PREDICATES", "ROUNDINGS", "are_integers", "place_of_extreme", "predicate", "product_by_index",
    "rounding", "times_power_of_two",
]  # fmt: skip

_aten = torch.ops.aten
_INTEGERS = {"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"}

ROUNDINGS = (_aten.ceil.default, _aten.floor.default, _aten.round.default, _aten.trunc.default)
"""Roundings, which leave integers as they are."""

PREDICATES = {_aten.isfinite.default: True, _aten.isnan.default: False}
"""Questions about numbers, with the answer for integers."""

PLACES = (_aten.argmax.default, _aten.argmin.default)
"""Places of the largest and the smallest."""


def rounding(torchs: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of a rounding.

    Args:
        torchs: one of :data:`ROUNDINGS`.
        opset: version of the operator set; None for torch's choice.
    """

    def rounded(x: Any) -> Any:
        return operators().Identity(x) if are_integers(x) else torchs_translation(torchs, opset)(x)

    return rounded


def predicate(torchs: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of a question about numbers.

    Args:
        torchs: one of :data:`PREDICATES`.
        opset: version of the operator set; None for torch's choice.
    """

    def answer(x: Any) -> Any:
        if not are_integers(x):
            return torchs_translation(torchs, opset)(x)
        yes = operators().Equal(x, x)
        return yes if PREDICATES[torchs] else operators().Not(yes)

    return answer


def place_of_extreme(torchs: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of one of :data:`PLACES`, in types that ONNX Runtime has kernels for.

    With ``keepdim`` the place in a whole tensor has as many dimensions as that.

    Args:
        torchs: the overload.
        opset: version of the operator set; None for torch's choice.
    """

    def place(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        rank = len(x.shape)
        if are_integers(x) and x.dtype.bitwidth == 16:
            shape, x = x.shape, in_type(x, torch.int32)
            x.shape = shape
        found = torchs_translation(torchs, opset)(x, dim, keepdim and dim is not None)
        if dim is None and keepdim and rank:
            found = operators().Reshape(found, operators().Constant(value_ints=[1] * rank))
        return found

    return place


def times_power_of_two(x: Any, exponent: Any) -> Any:
    """Translate ``aten::ldexp``, whose decomposition multiplies numbers of different types."""
    op, dtype = operators(), result_type(x, exponent)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return in_type(op.Mul(in_type(x, wide), op.Pow(number(2.0, wide), in_type(exponent, wide))), dtype)


def product_by_index(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::einsum``, which multiplies positions with frequencies for rotary embeddings.

    ONNX has products of one type only; torch's optimizer makes float64 of integers and float32.

    Args:
        opset: version of the operator set; None for torch's choice.
    """

    def einsum(equation: str, tensors: Sequence[Any], path: Any = None) -> Any:
        if len({one.dtype for one in tensors} - {None}) > 1:
            typed = [one for one in tensors if one.dtype is not None]
            widest = max(typed, key=lambda one: (one.dtype.is_floating_point(), one.dtype.bitwidth))
            tensors = [one if one.dtype == widest.dtype else operators().CastLike(one, widest) for one in tensors]
        return torchs_translation(_aten.einsum.default, opset)(equation, tensors, path)

    return einsum


def are_integers(*tensors: Any) -> bool:
    """Return whether all of some tensors are known to hold integers."""
    return all(getattr(getattr(tensor, "dtype", None), "name", None) in _INTEGERS for tensor in tensors)
