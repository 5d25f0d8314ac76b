"""Shapes for torch's ONNX exporter.

Its own translations let ONNX Runtime squeeze dimensions that are not one, and divide negative sizes with the remainder
of C.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .torchlib import operators

__all__ = ["SIZES", "SQUEEZES"]


def _squeeze(x: Any, dim: int | Sequence[int]) -> Any:
    """Leave out those of some dimensions that have one element; a size that varies is never one."""
    op, rank = operators(), len(x.shape)
    dims = [dim] if isinstance(dim, int) else dim
    ones = [one for one in dims if rank and x.shape[one] == 1]
    return op.Squeeze(x, ones) if ones else op.Identity(x)


SQUEEZES: dict[Any, Callable[..., Any]] = {torch.ops.aten.squeeze.dim: _squeeze, torch.ops.aten.squeeze.dims: _squeeze}


def _floor_quotient(divided: Any, divisor: Any) -> Any:
    """Divide sizes as Python does, which rounds down; ONNX rounds towards zero.

    Where neither can be negative that is the same, and there is one node less to fold.
    """
    op = operators()
    if not (_is_never_negative(divided) and _is_never_negative(divisor)):
        divided = op.Sub(divided, op.Mod(divided, divisor))
    return op.Div(divided, divisor)


def _is_never_negative(value: Any) -> bool:
    """Whether a number, or a value of the graph, is made of sizes and of other numbers that are not negative."""
    if isinstance(value, int):
        return value >= 0
    if value.const_value is not None:
        return bool((value.const_value.numpy() >= 0).all())
    node = value.producer()
    if node is None:
        return False
    if node.op_type in ("Add", "Div", "Max", "Min", "Mul"):
        return all(map(_is_never_negative, node.inputs))
    if node.op_type in ("Cast", "Gather", "Identity", "Reshape", "Squeeze", "Unsqueeze"):
        return _is_never_negative(node.inputs[0])
    return node.op_type in ("Shape", "Size")


SIZES: dict[Any, Callable[..., Any]] = {operator.floordiv: _floor_quotient}
