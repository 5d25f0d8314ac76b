"""Stable sorts for torch's ONNX exporter, which has the others: ``TopK`` keeps equal values in their order anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .torchlib import torchs_translation

__all__ = ["sort_stably"]


def sort_stably(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::sort.stable``.

    Args:
        opset: version of the operator set; None for torch's choice.
    """

    def sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        return torchs_translation(torch.ops.aten.sort.default, opset)(x, dim, descending)

    return sort
