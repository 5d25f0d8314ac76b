"""Pools in three dimensions, which ExecuTorch has no kernels for, as pools of images and then of what lies in depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwright.export.dimensions import for_each_dimension

__all__ = ["VOLUME_POOLS"]

_aten = torch.ops.aten


def _largest(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Tensor:
    """``max_pool3d``: the largest of largest values."""

    def pool(images: Tensor, dims: slice) -> Tensor:
        kernels, strides, dilations = (_sizes(given, dims, 1) for given in (kernel, stride or kernel, dilation))
        sizes = (kernels, strides, _sizes(padding, dims, 0), dilations)
        largest: Tensor = _aten.max_pool2d_with_indices.default(images, *sizes, ceil_mode)[0]
        return largest

    return _one_after_the_other(x, pool)


def _average(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Tensor:
    """``avg_pool3d``: how many values a window has is a product of how many it has in each dimension."""

    def pool(images: Tensor, dims: slice) -> Tensor:
        sizes = (_sizes(kernel, dims, 1), _sizes(stride or kernel, dims, 1), _sizes(padding, dims, 0))
        if sizes == ([1, 1], [1, 1], [0, 0]):
            return images
        averaged: Tensor = _aten.avg_pool2d.default(images, *sizes, ceil_mode, count_include_pad, divisor and 1)
        return averaged

    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    average = _one_after_the_other(wide, pool)
    return (average / divisor if divisor else average).to(x.dtype)


def _one_after_the_other(x: Tensor, pool: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Pool over height and width, and then over depth, in images that have the others side by side."""
    volumes = x if x.dim() == 5 else x.unsqueeze(0)
    batch, channels, depth = volumes.shape[:3]
    images = pool(volumes.flatten(1, 2), slice(1, 3))
    height, width = images.shape[2:]
    pooled = pool(images.reshape(batch, channels, depth, height * width), slice(0, 1))
    pooled = pooled.reshape(batch, channels, pooled.shape[2], height, width)
    return pooled if x.dim() == 5 else pooled.squeeze(0)


def _sizes(numbers: Sequence[int], dims: slice, none: int) -> list[int]:
    """Numbers for two dimensions: for height and width, or for depth and one in which ``none`` changes nothing."""
    chosen = for_each_dimension(numbers, 3)[dims]
    return chosen if len(chosen) == 2 else [*chosen, none]


VOLUME_POOLS: dict[Any, Callable[..., Any]] = {
    _aten.avg_pool3d.default: _average,
    _aten.max_pool3d.default: _largest,
}
"""Decompositions of pools in three dimensions."""
