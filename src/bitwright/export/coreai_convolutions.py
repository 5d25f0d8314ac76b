"""Transposed convolutions in three dimensions, which coreai-torch has in one and two only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["transposed_in_pictures"]


def transposed_in_pictures(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """``aten.convolution``: a transposed one in three dimensions as one of pictures, whose results are summed by depth.

    Every layer of the input is a picture, and every layer of the kernel has outputs of its own, for which the weight
    only changes its shape.

    Args:
        x: of shape (batch, inputs, depth, height, width).
        weight: of shape (inputs, outputs by group, depth, height, width).
    """
    if not transposed or x.dim() != 5 or not isinstance(x.shape[2], int):
        return NotImplemented
    pictures = torch.ops.aten.convolution.default(
        x.transpose(1, 2).flatten(0, 1),
        weight.flatten(1, 2),
        None,
        *([*numbers[1:]] for numbers in (stride, padding, dilation)),
        True,
        [*output_padding[1:]],
        groups,
    )
    layers = pictures.unflatten(0, (x.shape[0], x.shape[2])).unflatten(2, (-1, weight.shape[2])).movedim(1, 3)
    kernel = dilation[0] * (weight.shape[2] - 1) + 1
    depth = (x.shape[2] - 1) * stride[0] - 2 * padding[0] + kernel + output_padding[0]
    starts = [number * dilation[0] - padding[0] for number in range(weight.shape[2])]
    result: Any = sum(
        _at_depth(layer, start, stride[0], depth) for layer, start in zip(layers.unbind(2), starts, strict=True)
    )
    return result if bias is None else result + bias.reshape(-1, 1, 1, 1)


def _at_depth(x: Tensor, start: int, step: int, depth: int) -> Tensor:
    """Layers of shape (batch, channels, layers, height, width) every so many, with zeros between and around them."""
    spaced = torch.nn.functional.pad(x.unsqueeze(3), (0, 0, 0, 0, 0, step - 1)).flatten(2, 3)
    return torch.nn.functional.pad(spaced, (0, 0, 0, 0, start, depth - start - spaced.shape[2]))
