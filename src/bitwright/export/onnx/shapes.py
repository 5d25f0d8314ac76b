"""Squeezing for torch's ONNX exporter, whose own translation lets ONNX Runtime squeeze dimensions that are not one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .torchlib import operators

__all__ = ["SQUEEZES"]


def _squeeze(x: Any, dim: int | Sequence[int]) -> Any:
    """Leave out those of some dimensions that have one element; a size that varies is never one."""
    op, rank = operators(), len(x.shape)
    dims = [dim] if isinstance(dim, int) else dim
    ones = [one for one in dims if rank and x.shape[one] == 1]
    return op.Squeeze(x, ones) if ones else op.Identity(x)


SQUEEZES: dict[Any, Callable[..., Any]] = {torch.ops.aten.squeeze.dim: _squeeze, torch.ops.aten.squeeze.dims: _squeeze}
