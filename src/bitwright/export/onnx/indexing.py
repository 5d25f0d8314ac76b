"""Indexed writes that add, for torch's ONNX exporter, whose optimizer has some replace what they should add to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .bools import are_bools
from .torchlib import operators, torchs_translation

__all__ = ["WRITES", "indexed_write"]

WRITES = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)
"""Writes to the places that indices name; ``index_add`` becomes one of them."""


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
