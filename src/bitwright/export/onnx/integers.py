"""Operators on integers for torch's ONNX exporter, whose own translations no kernel of ONNX Runtime takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .torchlib import operators, torchs_translation

__all__ = ["PREDICATES", "ROUNDINGS", "are_integers", "predicate", "product_and_sum", "product_by_index", "rounding"]

_aten = torch.ops.aten
_INTEGERS = {"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"}

ROUNDINGS = (_aten.ceil.default, _aten.floor.default, _aten.round.default, _aten.trunc.default)
"""Roundings, which leave integers as they are."""

PREDICATES = {_aten.isfinite.default: True, _aten.isnan.default: False}
"""Questions about numbers, with the answer for integers."""


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


def product_and_sum(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::addmm``.

    Args:
        opset: version of the operator set; None for torch's choice.
    """

    def addmm(x: Any, left: Any, right: Any, beta: float = 1, alpha: float = 1) -> Any:
        if not are_integers(x, left, right):
            return torchs_translation(_aten.addmm.default, opset)(x, left, right, beta, alpha)
        op = operators()
        product = op.MatMul(left, right)
        return op.Add(_times(x, beta), _times(product, alpha))

    return addmm


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


def _times(x: Any, factor: float) -> Any:
    return x if factor == 1 else operators().Mul(x, operators().CastLike(int(factor), x))


def are_integers(*tensors: Any) -> bool:
    """Return whether all of some tensors are known to hold integers."""
    return all(getattr(getattr(tensor, "dtype", None), "name", None) in _INTEGERS for tensor in tensors)
