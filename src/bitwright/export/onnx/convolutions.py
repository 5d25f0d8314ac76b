"""Transposed convolutions for torch's ONNX exporter, with more output padding than ONNX Runtime takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .torchlib import operators, torchs_translation

__all__ = ["convolution"]


def convolution(opset: int | None) -> Callable[..., Any]:
    """Return the translation of ``aten::convolution``.

    PyTorch lets the output padding of a transposed convolution reach its dilation, ONNX Runtime its stride. It adds
    to the end of the output, from which padding takes away, so that less is taken away there instead. What padding
    does not hold of it lies beyond all products: zeros, to which the bias is added.

    Args:
        opset: version of the operator set; None for torch's choice.
    """

    def transposed_or_not(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Sequence[int] = (1,),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        transposed: bool = False,
        output_padding: Sequence[int] = (0,),
        groups: int = 1,
    ) -> Any:
        dims = len(weight.shape) - 2
        strides, before, dilations, more = (
            list(values) * (dims // len(values)) for values in (stride, padding, dilation, output_padding)
        )
        if not transposed or all(extra < step for extra, step in zip(more, strides, strict=True)):
            torchs = torchs_translation(torch.ops.aten.convolution.default, opset)
            return torchs(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
        op = operators()
        after = [max(cut - extra, 0) for cut, extra in zip(before, more, strict=True)]
        beyond = [max(extra - cut, 0) for cut, extra in zip(before, more, strict=True)]
        convolved = op.ConvTranspose(
            x, weight, strides=strides, pads=[*before, *after], dilations=dilations, group=groups
        )
        if any(beyond):
            convolved = op.Pad(convolved, op.Constant(value_ints=[0] * (4 + dims) + beyond))
        if bias is None:
            return convolved
        return op.Add(convolved, op.Unsqueeze(bias, op.Constant(value_ints=list(range(1, dims + 1)))))

    return transposed_or_not
