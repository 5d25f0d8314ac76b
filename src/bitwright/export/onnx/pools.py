"""Pools for torch's ONNX exporter: its own translation forgets divisors, and ONNX's shapes of others are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bitwright.export.dimensions import for_each_dimension

from .torchlib import operators, torchs_translation

__all__ = ["MAXIMA", "average_pool", "max_pool"]

_aten = torch.ops.aten
MAXIMA = {_aten.max_pool1d.default: 1, _aten.max_pool2d.default: 2, _aten.max_pool3d.default: 3}
"""Max pools, and over how many dimensions."""


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


def max_pool(pool: Any, opset: int | None) -> Callable[..., Any]:
    """Return the translation of a max pool, with ``ceil_mode`` as paddings at the ends.

    A last window that begins in the padding counts for ONNX's inference of shapes, and is not there in the runtime.
    Pools of sizes that are unknown stay as torch translates them.

    Args:
        pool: one of :data:`MAXIMA`.
        opset: version of the operator set; None for torch's choice.
    """
    dims = MAXIMA[pool]

    def largest(
        x: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> Any:
        kernel, steps, begins, gaps = (
            for_each_dimension(given, dims) for given in (kernel_size, stride or kernel_size, padding, dilation)
        )
        sizes = [] if x.shape is None else list(x.shape)[-dims:]
        is_batch = x.shape is not None and len(x.shape) == dims + 2
        torchs = torchs_translation(pool, opset)
        if not ceil_mode or not is_batch or not all(isinstance(size, int) for size in sizes):
            return torchs(x, kernel, steps, begins, gaps, ceil_mode)
        ends = [_end(*window) for window in zip(sizes, kernel, steps, begins, gaps, strict=True)]
        if any(end >= size for end, size in zip(ends, kernel, strict=True)):  # which the runtime refuses
            return torchs(x, kernel, steps, begins, gaps, ceil_mode)
        found, _places = operators().MaxPool(
            x, kernel_shape=kernel, strides=steps, pads=[*begins, *ends], dilations=gaps, ceil_mode=0
        )
        return found

    return largest


def _end(size: int, kernel: int, step: int, begin: int, gap: int) -> int:
    """How much padding the last window needs that begins in front of it; PyTorch's ``pooling_output_shape``."""
    span = (kernel - 1) * gap + 1
    last = -(-(size + 2 * begin - span) // step)
    last -= last * step >= size + begin
    return max(last * step + span - size - begin, 0)
