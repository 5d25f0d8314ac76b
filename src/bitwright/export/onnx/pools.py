"""Average pools with a divisor for torch's ONNX exporter, whose own translation forgets it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .torchlib import operators, torchs_translation

__all__ = ["average_pool"]


def average_pool(pool: Any, dims: int, opset: int | None) -> Callable[..., Any]:
    """Return the translation of an average pool.

    Args:
        pool: its overload, ``aten::avg_pool2d`` or ``aten::avg_pool3d``.
        dims: how many dimensions it averages over.
        opset: version of the operator set; None for torch's choice.
    """

    def avg_pool(
        x: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        torchs = torchs_translation(pool, opset)
        if divisor_override is None:
            return torchs(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
        if ceil_mode:
            raise NotImplementedError("average pools with both ceil_mode and divisor_override have no operator in ONNX")
        op = operators()
        window = math.prod(kernel_size) ** (dims // len(kernel_size))
        average = torchs(x, kernel_size, stride, padding, False, True)
        return op.Mul(average, op.CastLike(window / divisor_override, average))

    return avg_pool
