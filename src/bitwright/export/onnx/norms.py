"""Batch norms with statistics of the batch for torch's ONNX exporter, whose own translation takes the running ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .torchlib import torchs_translation

__all__ = ["batch_norm"]


def batch_norm(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::_native_batch_norm_legit_functional``: a norm with ``training=True``.

    Files keep no state, so the running statistics that it returns are those that it was given.

    Args:
        opset: version of the operator set; None for torch's choice.
    """
    norm = torch.ops.aten._native_batch_norm_legit_functional.default

    def batch_norm_functional(
        x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
    ) -> tuple[Any, ...]:
        used = (None, None) if training else (mean, variance)
        results = torchs_translation(norm, opset)(x, weight, bias, *used, training, momentum, eps)
        return (*results[:3], mean, variance)

    return batch_norm_functional
