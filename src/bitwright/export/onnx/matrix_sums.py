"""Products of matrices that are added to something, for torch's ONNX exporter.

Its own translations add what counts for nothing (``beta=0``), NaN or not, and have a product of integers that ONNX
Runtime has no kernel for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .integers import are_integers
from .promotion import number, type_of
from .torchlib import operators, torchs_translation

__all__ = ["SUMS", "added_product"]

_aten = torch.ops.aten
SUMS = (_aten.addbmm.default, _aten.addmm.default, _aten.addmv.default, _aten.baddbmm.default)
"""Sums of a tensor and a product."""


def added_product(torchs: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of one of :data:`SUMS`.

    Args:
        torchs: the overload.
        opset: version of the operator set; None for torch's choice.
    """

    def added(x: Any, left: Any, right: Any, beta: Any = 1, alpha: Any = 1) -> Any:
        if torchs == _aten.addmm.default and not are_integers(x, left, right):
            return torchs_translation(torchs, opset)(x, left, right, beta, alpha)
        op = operators()
        product = op.MatMul(left, right)
        if torchs == _aten.addbmm.default:
            product = op.ReduceSum(product, op.Constant(value_ints=[0]), keepdims=False)
        product = _times(product, alpha, x)
        return product if isinstance(beta, int | float) and beta == 0 else op.Add(_times(x, beta, x), product)

    return added


def _times(x: Any, factor: Any, like: Any) -> Any:
    if not isinstance(factor, int | float):
        return operators().Mul(x, operators().CastLike(factor, like))
    if factor == 1:
        return x
    dtype = type_of(like)
    return operators().Mul(x, number(factor if dtype.is_floating_point else int(factor), dtype))
