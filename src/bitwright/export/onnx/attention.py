"""Attention for torch's ONNX exporter, whose own translation averages all values where a mask leaves none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from bitwright.export.extras import require

from .torchlib import operators, torchs_translation

__all__ = ["attention"]

_BOOL, _INT32 = 9, 6


def attention(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::scaled_dot_product_attention``.

    Args:
        opset: version of the operator set; None for torch's choice.
    """

    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        torchs = torchs_translation(torch.ops.aten.scaled_dot_product_attention.default, opset)
        rank = max(len(x.shape) for x in (query, key, value))
        sizes = [*query.shape[:-1], value.shape[-1]]
        if rank > 4:
            attn_mask = _mask_in_four_dimensions(attn_mask, [*query.shape[:-1], key.shape[-2]])
        query, key, value = map(_in_four_dimensions, (query, key, value))
        result = torchs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if attn_mask is not None:
            result = _zero_where_nothing_is_seen(result, attn_mask)
        if rank < 4:
            return operators().Squeeze(result, list(range(4 - rank)))
        return result if rank == 4 else _reshaped(result, sizes)

    return scaled_dot_product_attention


def _in_four_dimensions(x: Any) -> Any:
    """Put dimensions of one element in front, or join the first ones: torch's translation takes four dimensions."""
    added = 4 - len(x.shape)
    if added == 0:
        return x
    if added < 0:
        return _joined(x)
    lifted = operators().Unsqueeze(x, list(range(added)))
    lifted.shape = require("onnx_ir", "onnx", "Export to ONNX").Shape([1] * added + list(x.shape))
    lifted.type = x.type
    return lifted


def _joined(x: Any) -> Any:
    sizes = list(x.shape)
    first = math.prod(sizes[:-3]) if all(isinstance(size, int) for size in sizes[:-3]) else None
    return _reshaped(x, [first, *sizes[-3:]])


def _mask_in_four_dimensions(mask: Any, sizes: list[Any]) -> Any:
    """A mask for scores of these sizes, whose first dimensions are joined."""
    if mask is None or len(mask.shape) < 4:
        return mask
    if not all(isinstance(size, int) for size in sizes):
        raise NotImplementedError("masks of four dimensions and more, for scores of more dimensions whose sizes vary")
    expanded = operators().Expand(mask, sizes)
    expanded.shape, expanded.type = require("onnx_ir", "onnx", "Export to ONNX").Shape(sizes), mask.type
    return _joined(expanded)


def _reshaped(x: Any, sizes: list[Any]) -> Any:
    """A tensor in other sizes, the first of which may vary."""
    if not all(isinstance(size, int) for size in sizes[1:]):
        raise NotImplementedError("attention in more than four dimensions, of which others than the first vary in size")
    reshaped = operators().Reshape(x, [-1, *sizes[1:]])
    reshaped.shape, reshaped.type = require("onnx_ir", "onnx", "Export to ONNX").Shape(sizes), x.type
    return reshaped


def _zero_where_nothing_is_seen(result: Any, mask: Any) -> Any:
    """Let queries that a mask hides all keys from have zeros, as in PyTorch: the padding in front of a short text.

    torch 2.13 writes False as the lowest finite number, so that hidden keys count alike where there is no other, and a
    row of negative infinities becomes NaN.
    """
    op = operators()
    if mask.dtype == _BOOL:
        seen = op.Cast(op.ReduceMax(op.Cast(mask, to=_INT32), [-1]), to=_BOOL)
    else:
        seen = op.Greater(op.ReduceMax(mask, [-1]), op.CastLike(float("-inf"), mask))
    return op.Where(seen, result, op.CastLike(0.0, result))
