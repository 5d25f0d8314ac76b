"""Embedding bags for torch's ONNX exporter, whose own translation is a loop that ONNX Runtime refuses now and then."""

from __future__ import annotations

from typing import Any

from .torchlib import operators

__all__ = ["embedding_bag"]

_INT64 = 7
_MEAN, _MAX = 1, 2


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Any, ...]:
    """Record the operators of ``aten::embedding_bag.padding_idx``: rows are gathered, and scattered to their bags.

    torch 2.13 takes the order of its loop's variables from a set of strings, so that whether a file can be loaded
    depends on Python's hash seed.

    Args:
        weight: shape (embeddings, width).
        indices: shape (count).
        offsets: where each bag begins, shape (bags); one entry more with ``include_last_offset``.
        scale_grad_by_freq: of no meaning here.
        mode: 0 for the sum of a bag's rows, 1 for their mean, 2 for their maximum.
        sparse: of no meaning here.
        per_sample_weights: factors of the rows, shape (count); None for ones.
        include_last_offset: whether the last offset is the end of the last bag.
        padding_idx: the index that no bag counts, from the end if it is negative; None for none.

    Returns:
        Shape (bags, width), zeros for empty bags. Then three that nothing reads: ``torch.nn.functional`` hands on the
        first alone, and the exporter writes their shapes on them, which differ from kernel to kernel.
    """
    op = operators()
    indices, offsets = op.Cast(indices, to=_INT64), op.Cast(offsets, to=_INT64)
    if include_last_offset:
        offsets = op.Slice(offsets, [0], [-1], [0])
    count, bags = op.Shape(indices), op.Shape(offsets)
    rows = op.Gather(weight, indices)
    if per_sample_weights is not None:
        rows = op.Mul(rows, op.CastLike(op.Unsqueeze(per_sample_weights, [1]), rows))
    # The bag of a position: how many bags begin at it or before it. An empty one at the end begins behind all of them.
    zeros, ones = op.Expand([0], op.Add(count, [1])), op.Expand([1], bags)
    begins = op.ScatterElements(zeros, offsets, ones, axis=0, reduction="add")
    bag = op.Sub(op.Slice(op.CumSum(begins, 0), [0], count, [0]), [1])
    counted = op.Not(op.Equal(indices, [-1 if padding_idx is None else padding_idx % weight.shape[0]]))
    rest = op.CastLike([float("-inf") if mode == _MAX else 0.0], rows)
    rows = op.Where(op.Unsqueeze(counted, [1]), rows, rest)
    shape = op.Concat(bags, op.Shape(weight, start=1), axis=0)
    places = op.Expand(op.Unsqueeze(bag, [1]), op.Shape(rows))
    how = "max" if mode == _MAX else "add"
    result = op.ScatterElements(op.Expand(rest, shape), places, rows, axis=0, reduction=how)
    sizes = op.ScatterElements(op.Expand([0], bags), bag, op.Cast(counted, to=_INT64), axis=0, reduction="add")
    empty = op.Equal(sizes, [0])
    if mode == _MEAN:
        result = op.Div(result, op.CastLike(op.Unsqueeze(op.Where(empty, [1], sizes), [1]), rows))
    elif mode == _MAX:
        result = op.Where(op.Unsqueeze(empty, [1]), op.CastLike([0.0], rows), result)
    return result, op.Identity(bag), op.Identity(sizes), op.Identity(sizes)
