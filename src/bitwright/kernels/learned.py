"""The gradient of a fake quantizer with a learned step and offset: LSQ (arXiv 1902.08153), LSQ+ (2004.09576)."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from . import reference
from .dispatch import fake_quantize, form_of
from .grid import Grid, block_view_shape
from .ownership import has_memory

__all__ = ["learned_gradient"]


def learned_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    minval: torch.Tensor,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    anchored: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the gradient of a fake-quantized tensor means for the tensor, for the step and for the offset.

    With the range ``[l, h]`` that the codes stand for, ``v'`` the quantized value and ``b`` the value of code 0 (0 if
    not ``anchored``): inside, ``l < v < h``, ``dv'/dv = 1``, ``s * dv'/ds = v' - v`` and ``dv'/db = 0``; elsewhere
    ``dv'/dv = 0``, ``s * dv'/ds = v' - b`` and ``dv'/db = 1`` (LSQ eq. 3, LSQ+ eq. 4 and 6).

    Args:
        gradient: of the fake-quantized tensor; shape and dtype of ``x``.
        x: what was quantized.
        scale: the step of each block, float32, in the shape of the blocks or with a single entry.
        zero_point: int32, like ``scale``.
        minval: float32, like ``scale``.
        block_size: shape of one block.
        grid: the codes, integers.
        anchored: whether an offset is learned, from which values outside the range keep their distance.

    Returns:
        The gradient of ``x``; the sums of ``gradient * s * dv'/ds`` and of ``gradient * dv'/db`` over each block,
        float32, in the shape of ``scale``. Sums do not depend on the number of threads.
    """
    form = reference if is_compiling() or torch.is_grad_enabled() or gradient.dtype != x.dtype else form_of(x)
    if form is not reference and x.is_cpu and type(gradient) is torch.Tensor and has_memory(gradient):
        from .cpu.learned import learned_gradient as fused

        return fused(
            gradient, x.detach(), scale, zero_point, minval, block_size=block_size, grid=grid, anchored=anchored
        )
    view, inner, wide, _ = block_view_shape(tuple(x.shape), block_size)

    def spread(per_block: torch.Tensor) -> torch.Tensor:
        return per_block.reshape(wide if per_block.numel() > 1 else (1,) * len(wide))

    def total(values: torch.Tensor) -> torch.Tensor:
        summed = values.sum(inner) if inner else values
        return (summed if scale.numel() > 1 else summed.sum()).reshape(scale.shape)

    values, slopes = x.to(torch.float32).reshape(view), gradient.to(torch.float32).reshape(view)
    exact = grid.formulation == "minval"
    point, origin = (grid.quant_min, minval) if exact else (zero_point, 0.0)
    lowest, highest, zero = ((code - point) * scale + origin for code in (grid.quant_min, grid.quant_max, 0))
    inside = (values > spread(lowest)) & (values < spread(highest))
    # In float32: a half-precision result has lost the digits that the gradient of the step consists of.
    y = fake_quantize(x.detach().float(), scale, zero_point, minval, block_size=block_size, grid=grid).reshape(view)
    moved = y - torch.where(inside, values, spread(zero) if anchored else values.new_zeros(()))
    return gradient * inside.reshape(x.shape), total(slopes * moved), total(slopes * ~inside)
