"""Indexed writes for torch's ONNX exporter, and choices by masks.

Its optimizer has some that add replace what they should add to; its translation has those that average do so. ONNX has
a value for each place, PyTorch at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .bools import are_bools
from .torchlib import operators, torchs_translation

__all__ = ["SCATTERS", "WRITES", "indexed_write", "masked_select", "scatter_to_places", "scattered"]

WRITES = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)
"""Writes to the places that indices name; ``index_add`` becomes one of them."""

SCATTERS = (torch.ops.aten.scatter.src, torch.ops.aten.scatter_add.default)
"""Writes to the places along one dimension that a tensor of numbers names."""


def indexed_write(torchs: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of an indexed write.

    What is added is summed up beside the tensor: the optimizer replaces a ``ScatterND`` whose indices are those of all
    rows in order by what it writes, whether it adds or not. Onto zeros that is right.

    Args:
        torchs: one of :data:`WRITES`.
        opset: version of the operator set; None for torch's choice.
    """

    def write(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
        put = torchs_translation(torchs, opset)
        if not accumulate or are_bools(x) or any(map(are_bools, indices)):
            return put(x, indices, values, accumulate)
        op = operators()
        zeros = op.Expand(op.CastLike(0, x), op.Shape(x))
        zeros.shape, zeros.type = x.shape, x.type
        return op.Add(x, put(zeros, indices, values, True))

    return write


def scatter_to_places(torchs: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of a write along one dimension, which leaves out values without a place.

    Args:
        torchs: one of :data:`SCATTERS`.
        opset: version of the operator set; None for torch's choice.
    """

    def scatter(x: Any, dim: int, index: Any, src: Any) -> Any:
        return torchs_translation(torchs, opset)(x, dim, index, _within(src, index))

    return scatter


def _within(src: Any, index: Any) -> Any:
    """The values that have a place."""
    if None in (src.shape, index.shape) or list(src.shape) == list(index.shape):
        return src
    op, rank = operators(), len(index.shape)
    values = op.Slice(src, [0] * rank, op.Shape(index), list(range(rank)))
    values.shape, values.type = index.shape, src.type
    return values


def scattered(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::scatter_reduce``.

    Args:
        opset: version of the operator set; None for torch's choice.
    """

    def scatter(x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
        torchs = torchs_translation(torch.ops.aten.scatter_reduce.two, opset)
        src = _within(src, index)
        if reduce != "mean":
            return torchs(x, dim, index, src, reduce, include_self)
        if x.dtype is None or not x.dtype.is_floating_point():
            raise NotImplementedError("averages of integers at places have no operator in ONNX")
        op = operators()
        ones = [op.Expand(op.CastLike(1, one), op.Shape(one)) for one in (x, src)]
        for made, one in zip(ones, (x, src), strict=True):
            made.shape, made.type = one.shape, one.type
        total = torchs(x, dim, index, src, "sum", include_self)
        return op.Div(total, torchs(ones[0], dim, index, ones[1], "sum", include_self))

    return scatter


def masked_select(x: Any, mask: Any) -> Any:
    """Translate ``aten::masked_select``, whose operands broadcast."""
    op = operators()
    whole = op.Expand(x, op.Shape(mask))
    chosen = op.Expand(mask, op.Shape(whole))
    flat = op.Constant(value_ints=[-1])
    return op.Compress(op.Reshape(whole, flat), op.Reshape(chosen, flat), axis=0)
