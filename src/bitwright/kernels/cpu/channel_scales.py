"""The gradient of a weight that is scaled by output channel, fake-quantized, divided by the scale, or all of it."""

from __future__ import annotations

import numpy as np
import torch

from bitwright.kernels.layout import LANES

from .compiling import compiled
from .lanes import add_product, from_mask, load_f32, load_mask, peek_f32, poke_f32, reduce_add, splat, store_f32
from .memory import CPU, unaligned_like
from .threads import run_parts, threads_for
from .walking import first_part, next_part

__all__ = ["scaled_gradients"]


@compiled
def scale_gradient_part(
    gradient: int, out: int, scales: int, mask: int, weight: int, result: int, sums: int, channels: int, words: int,
    parts: int, control: int,
) -> None:  # fmt: skip
    """Pass a gradient backwards through division, mask and product, and sum that of each channel's scale.

    Args:
        gradient: address of the gradient that comes in.
        out: address of the gradient that goes out, which may be that of the other.
        scales: address of a scale for each channel.
        mask: address of the mask of one bit per element; 0 for none.
        weight: address of what was multiplied with the scale; 0 where nothing was.
        result: address of the result of the division by the scale; 0 where there was none.
        sums: address of a sum for each channel.
        channels: number of channels.
        words: vectors in a channel.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    part = first_part(control)
    while part < parts:
        for channel in range(channels * part // parts, channels * (part + 1) // parts):
            number = peek_f32(scales + 4 * channel)
            scale, of_weight, of_result = splat(number), splat(np.float32(0)), splat(np.float32(0))
            for word in range(channel * words, (channel + 1) * words):
                at = 4 * LANES * word
                passed = load_f32(gradient + at)
                if result != 0:
                    of_result = add_product(passed, load_f32(result + at), of_result)
                    passed = passed / scale
                if mask != 0:
                    passed = passed * from_mask(load_mask(mask + 2 * word))
                if weight != 0:
                    of_weight = add_product(passed, load_f32(weight + at), of_weight)
                    passed = passed * scale
                store_f32(out + at, passed)
            poke_f32(sums + 4 * channel, reduce_add(of_weight) - reduce_add(of_result) / number)
        part = next_part(control, part)


def scaled_gradients(
    gradient: torch.Tensor,
    scale: torch.Tensor,
    in_place: bool,
    *,
    mask: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    result: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the weight and of the scale, whatever steps lie between; each gives the same bits.

    Args:
        gradient: of the last step's result, of shape (channels, ...), each channel a whole number of vectors; float32
            on the CPU, contiguous like what is of the same shape.
        scale: of shape (channels,).
        in_place: the gradient of the weight may take the memory of ``gradient``.
        mask: of the fake quantizer; None where there is none.
        weight: what was multiplied with the scale; None where nothing was.
        result: of the division by the scale; None where there was none.
    """
    channels = len(scale)
    out = gradient if in_place else unaligned_like(gradient)
    sums = torch.empty(channels, dtype=torch.float32, device=CPU)
    arguments = (
        gradient.data_ptr(), out.data_ptr(), scale.data_ptr(), 0 if mask is None else mask.data_ptr(),
        0 if weight is None else weight.data_ptr(), 0 if result is None else result.data_ptr(), sums.data_ptr(),
        channels, gradient.numel() // channels // LANES,
    )  # fmt: skip
    alive = (gradient, out, scale, mask, weight, result, sums)
    run_parts(scale_gradient_part, arguments, threads_for(gradient.numel()), alive)
    return out, sums
