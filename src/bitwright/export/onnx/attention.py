"""Attention for torch's ONNX exporter, whose own translation averages all values where a mask leaves none."""

from __future__ import annotations

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
        added = list(range(4 - len(query.shape))) if len(query.shape) == len(key.shape) == len(value.shape) else []
        query, key, value = (_with_dimensions(x, added) for x in (query, key, value))
        result = torchs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if added:
            result = operators().Squeeze(result, added)
        return result if attn_mask is None else _zero_where_nothing_is_seen(result, attn_mask)

    return scaled_dot_product_attention


def _with_dimensions(x: Any, added: list[int]) -> Any:
    """Put dimensions of one element in front, since torch's translation takes four dimensions only."""
    if not added:
        return x
    lifted = operators().Unsqueeze(x, added)
    lifted.shape = require("onnx_ir", "onnx", "Export to ONNX").Shape([*(1 for _ in added), *x.shape])
    lifted.type = x.type
    return lifted


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
