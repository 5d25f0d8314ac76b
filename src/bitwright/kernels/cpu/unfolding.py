"""The gradients of a weight that was scaled by output channel, fake-quantized and divided by the scale again."""

from __future__ import annotations

import numpy as np
import torch

from bitwright.kernels.layout import LANES

from .compiling import compiled
from .lanes import add_product, from_mask, load_f32, load_mask, poke_f32, reduce_add, splat, store_f32
from .mapping import all_set
from .memory import unaligned_like
from .threads import run_parts, threads_for
from .walking import first_part, next_part

__all__ = ["suits", "unfolded_gradients"]


@compiled
def unfold_part(
    gradient: int, mask: int, out: int, weight: int, result: int, sums: int, channels: int, words: int,
    parts: int, control: int,
) -> None:  # fmt: skip
    """Multiply a gradient by the mask, and sum its products over each channel.

    Args:
        gradient: address of the gradient of the result.
        mask: address of the mask of one bit per element.
        out: address of the gradient of the weight, which may be that of the other; 0 does not write it.
        weight: address of the weight.
        result: address of the result.
        sums: address of a sum for each channel, of masked gradient times weight minus gradient times result.
        channels: number of channels.
        words: vectors in a channel.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    part = first_part(control)
    while part < parts:
        for channel in range(channels * part // parts, channels * (part + 1) // parts):
            of_weight = of_result = splat(np.float32(0))
            for word in range(channel * words, (channel + 1) * words):
                at = 4 * LANES * word
                given = load_f32(gradient + at)
                passed = given * from_mask(load_mask(mask + 2 * word))
                of_weight = add_product(passed, load_f32(weight + at), of_weight)
                of_result = add_product(given, load_f32(result + at), of_result)
                if out != 0:
                    store_f32(out + at, passed)
            poke_f32(sums + 4 * channel, reduce_add(of_weight - of_result))
        part = next_part(control, part)


def suits(gradient: torch.Tensor, mask: torch.Tensor) -> bool:
    """Return whether ``unfolded_gradients`` takes a gradient of shape (channels, ...) and a fake quantizer's mask."""
    count = gradient.numel()
    return (
        gradient.is_contiguous()
        and count > 0
        and count // len(gradient) % LANES == 0
        and mask.numel() == 2 * count // LANES
    )


def unfolded_gradients(
    gradient: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the weight, and that of the scale before it is divided by the scale.

    Args:
        gradient: of the result; float32, on the CPU, see ``suits``.
        mask: of the fake quantizer.
        weight: what was scaled; like the gradient.
        result: quantized and divided by the scale; like the gradient.
        in_place: the gradient of the weight may take the memory of ``gradient``.
    """
    channels, words = len(gradient), mask.numel() // 2
    whole = all_set(mask.data_ptr(), words)
    out = gradient if whole or in_place else unaligned_like(gradient)
    sums = torch.empty(channels)
    arguments = (
        gradient.data_ptr(), mask.data_ptr(), 0 if whole else out.data_ptr(), weight.data_ptr(), result.data_ptr(),
        sums.data_ptr(), channels, words // channels,
    )  # fmt: skip
    run_parts(unfold_part, arguments, threads_for(gradient.numel()), (gradient, mask, out, weight, result, sums))
    return out, sums
