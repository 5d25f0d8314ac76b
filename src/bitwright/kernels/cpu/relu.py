"""What a ReLU keeps for its gradient: one bit per element in place of its result.

Without quantization the result costs nothing, for the layer behind the ReLU keeps it too. With a fake quantizer in
between, that layer keeps the quantized result, and the other one would stay in memory for its signs alone.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch

from bitwright.kernels.layout import LANES
from bitwright.kernels.saved import replace_saved

from .arithmetic import load, store
from .compiling import compiled
from .lanes import from_mask, load_mask, splat, store_mask
from .memory import empty_like, lasting_bytes
from .native import DTYPES
from .threads import run_parts
from .walking import VECTOR, copy, element_bytes, first_part, next_part, staged, vector_room

__all__ = ["keep_signs"]

# Entry of a node's metadata: its result has been replaced. Asking for the result would make it anew.
_DONE = "bitwright_keeps_signs"


@compiled
def signs_part(x: int, dtype: int, mask: int, count: int, parts: int, control: int) -> None:
    """Write a bit for each element: whether it is at most zero.

    Args:
        x: address of the elements.
        dtype: their dtype.
        mask: address of the bits.
        count: number of elements.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    size, words = element_bytes(dtype), (count + LANES - 1) // LANES
    nothing = splat(np.float32(0))
    room = vector_room()
    part = first_part(control)
    while part < parts:
        for word in range(words * part // parts, words * (part + 1) // parts):
            at, rest = x + size * LANES * word, count - LANES * word
            if rest >= LANES:
                store_mask(mask + 2 * word, load(at, dtype) <= nothing)
            else:
                store_mask(mask + 2 * word, load(staged(at, room, size * rest), dtype) <= nothing)
        part = next_part(control, part)


@compiled
def values_part(mask: int, y: int, dtype: int, count: int, parts: int, control: int) -> None:
    """Write 0 where a bit is set, and 1 elsewhere.

    Args:
        mask: address of the bits that ``signs_part`` wrote.
        y: address of the elements.
        dtype: their dtype.
        count: number of elements.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    size, words = element_bytes(dtype), (count + LANES - 1) // LANES
    one = splat(np.float32(1))
    room = vector_room()
    part = first_part(control)
    while part < parts:
        for word in range(words * part // parts, words * (part + 1) // parts):
            at, rest = y + size * LANES * word, count - LANES * word
            values = one - from_mask(load_mask(mask + 2 * word))
            if rest >= LANES:
                store(at, values, dtype)
            else:
                store(room + VECTOR, values, dtype)
                copy(room + VECTOR, at, size * rest)
        part = next_part(control, part)


@cache
def _relu_node() -> Any:
    """The class of the graph's nodes for ReLU, whether in place or not."""
    with torch.enable_grad(), torch.inference_mode(False):
        return type(torch.relu(torch.zeros(1, requires_grad=True)).grad_fn)


def keep_signs(x: torch.Tensor, threads: int) -> None:
    """Have the ReLU whose result is ``x``, if one made it, keep the signs of the result only.

    Where somebody else sees to what is saved (``torch.autograd.graph.saved_tensors_hooks``), nothing is changed.

    Args:
        x: plain tensor on the CPU, of a dtype in ``native.DTYPES``, without holes.
        threads: number of threads to run on.
    """
    node: Any = x.grad_fn
    if type(node) is not _relu_node() or _DONE in node.metadata:
        return
    try:
        kept = node._saved_result  # refuses a tensor that has been changed since
    except RuntimeError:
        return
    same = kept.data_ptr() == x.data_ptr() and kept.shape == x.shape and kept.stride() == x.stride()
    if same:
        node.metadata[_DONE] = True
        replace_saved(node._raw_saved_result, partial(_signs, x.detach(), threads))


def _signs(x: torch.Tensor, threads: int) -> Any:
    """Note the signs of ``x``; the function returned makes a tensor of them."""
    mask = lasting_bytes(2 * -(-x.numel() // LANES))
    run_parts(signs_part, (x.data_ptr(), DTYPES[x.dtype], mask.data_ptr(), x.numel()), threads, (x, mask))
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return partial(_values, mask, like, threads)


def _values(mask: torch.Tensor, like: torch.Tensor, threads: int) -> torch.Tensor:
    y = empty_like(like, device=mask.device)
    run_parts(values_part, (mask.data_ptr(), y.data_ptr(), DTYPES[y.dtype], y.numel()), threads, (mask, y))
    return y
