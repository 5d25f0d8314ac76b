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
from bitwright.kernels.ownership import on_its_own
from bitwright.kernels.saved import hooked_by_others, replace_saved

from .arithmetic import load
from .compiling import compiled, inlined
from .lanes import splat, store_mask
from .mapping import map_fake
from .memory import lasting_bytes
from .native import DTYPES
from .signs import Signs
from .threads import run_parts
from .walking import element_bytes, first_part, next_part, staged, vector_room

__all__ = ["keep_signs", "map_with_signs", "relu_node", "signs_to_keep"]

# Entry of a node's metadata: its result has been replaced. Asking for the result would make it anew.
_DONE = "bitwright_keeps_signs"
# Vectors that stay in the nearest cache from one loop to the next.
_NEAR = 128


@inlined
def write_signs(x: int, dtype: int, signs: int, count: int, begin: int, end: int, room: int) -> None:
    """Write a bit for each element of the vectors ``begin`` to ``end``: whether it is at most zero.

    Args:
        x: address of the elements.
        dtype: their dtype.
        signs: address of the bits.
        count: number of elements.
        begin: first vector.
        end: vector behind the last.
        room: of a vector, for the last few elements.
    """
    size, nothing = element_bytes(dtype), splat(np.float32(0))
    for word in range(begin, end):
        at, rest = x + size * LANES * word, count - LANES * word
        if rest >= LANES:
            store_mask(signs + 2 * word, load(at, dtype) <= nothing)
        else:
            store_mask(signs + 2 * word, load(staged(at, room, size * rest), dtype) <= nothing)


@inlined
def map_with_signs(
    x: int, dtype: int, y: int, mask: int, scales: int, points: int, origins: int, table: int, grid: int, signs: int,
    count: int, codes: int, failed: int, begin: int, end: int, room: int,
) -> None:  # fmt: skip
    """``mapping.map_fake``, which also writes signs; input and output may be one memory.

    Args:
        x: address of the input.
        dtype: dtype of input and output.
        y: address of the output.
        mask: see ``map_fake``, like the arguments up to ``grid``; no row ends within a vector.
        scales: see ``map_fake``.
        points: see ``map_fake``.
        origins: see ``map_fake``.
        table: see ``map_fake``.
        grid: see ``map_fake``.
        signs: address of the bits.
        count: number of elements.
        codes: address of a byte for each element, see ``mapping.map_fake``, or 0.
        failed: see ``mapping.map_fake``.
        begin: first vector.
        end: vector behind the last.
        room: of two vectors.
    """
    for first in range(begin, end, _NEAR):
        last = min(first + _NEAR, end)
        write_signs(x, dtype, signs, count, first, last, room)
        map_fake(x, dtype, y, mask, codes, failed, scales, points, origins, table, grid, first, last, room)


@compiled
def signs_part(x: int, dtype: int, signs: int, count: int, parts: int, control: int) -> None:
    """``write_signs`` for all elements.

    Args:
        x: address of the elements.
        dtype: their dtype.
        signs: address of the bits.
        count: number of elements.
        parts: see ``first_part``.
        control: see ``first_part``.
    """
    words, room = (count + LANES - 1) // LANES, vector_room()
    part = first_part(control)
    while part < parts:
        write_signs(x, dtype, signs, count, words * part // parts, words * (part + 1) // parts, room)
        part = next_part(control, part)


@cache
def relu_node() -> Any:
    """The class of the graph's nodes for ReLU, whether in place or not."""

    def probe() -> Any:
        with torch.enable_grad(), torch.inference_mode(False):
            return type(torch.relu(torch.zeros(1, device="cpu", requires_grad=True)).grad_fn)

    return on_its_own(probe)


def signs_to_keep(x: torch.Tensor) -> torch.Tensor | None:
    """Have the ReLU whose result is ``x``, if one made it, keep the signs of the result only.

    Where somebody else sees to what is saved (``torch.autograd.graph.saved_tensors_hooks``), nothing is changed.

    Args:
        x: plain tensor on the CPU, of a dtype in ``native.DTYPES``, without holes.

    Returns:
        Bytes that the caller has to write the signs to, as ``signs_part`` does; None if nothing was changed.
    """
    node: Any = x.grad_fn
    # Asking for what a checkpoint keeps would compute all of it anew.
    if type(node) is not relu_node() or _DONE in node.metadata or hooked_by_others():
        return None
    try:
        kept = node._saved_result  # refuses a tensor that has been changed since
    except RuntimeError:
        return None
    if kept.data_ptr() != x.data_ptr() or kept.shape != x.shape or kept.stride() != x.stride():
        return None
    Signs.prepare()
    node.metadata[_DONE] = True
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    made: list[torch.Tensor] = []

    def shrink() -> Any:
        made.append(lasting_bytes(2 * -(-like.numel() // LANES)))
        return partial(_in_place_of, made[0], like)

    replace_saved(node._raw_saved_result, shrink)
    return made[0] if made else None


def keep_signs(x: torch.Tensor, threads: int) -> None:
    """``signs_to_keep``, and write them.

    Args:
        x: see ``signs_to_keep``.
        threads: number of threads to run on.
    """
    signs = signs_to_keep(x)
    if signs is not None:
        run_parts(signs_part, (x.data_ptr(), DTYPES[x.dtype], signs.data_ptr(), x.numel()), threads, (x, signs))


def _in_place_of(signs: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What the ReLU takes for its result in the backward pass."""
    made = Signs(signs, like)
    return made.values() if torch.is_grad_enabled() else made  # another gradient's graph cannot hold the signs
