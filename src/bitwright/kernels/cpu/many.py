"""Small tensors, any number of them in one call: observe, choose the parameters and fake-quantize.

Each tensor is worked on by one thread, whole, so that the result does not depend on the number of threads. A tensor
alone gets its gradient from torch's copy, which hands it on as it is; only where something was clipped a function masks
it. Many tensors together have one node in the graph.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bitwright.kernels.grid import Grid
from bitwright.kernels.layout import LANES, SMALL, dense, fitted_layout
from bitwright.kernels.straight_through import Backward, masked_gradient, straight_through

from .choosing import choose_block
from .compiling import called, compiled, entry, inlined
from .fused import apply_mask
from .lanes import Scalar, peek_f32, peek_i16, peek_i64, poke_i32, stack_room
from .mapping import FAKE, all_set, map_part
from .memory import CPU, over
from .native import DTYPES, addresses_read, native_grid, scheme_code
from .ranges import join_parts, keys_of, range_of_keys, range_of_row
from .threads import run_parts, threads_for
from .walking import element_bytes, first_part, next_part, vector_room

__all__ = ["SmallCall", "run_many", "suits"]

_MOST_BLOCKS = 2048
_WHOLE, _CLIPPED = 0, 1
_COLUMNS = 5

_key_room = stack_room(2 * 4 * _MOST_BLOCKS)


@inlined
def observe(x: int, job: int) -> None:
    """Find the range of every block and write its parameters; takes the arguments of ``quantize_small``."""
    dtype, table, grid, blocks = peek_i64(job), peek_i64(job + 16), peek_i64(job + 24), peek_i64(job + 80)
    scales, points, origins = peek_i64(job + 56), peek_i64(job + 64), peek_i64(job + 72)
    scheme = peek_i64(job + 88)
    if peek_i64(job + 96) != 0:
        length = peek_i64(table + 8)
        size = length * element_bytes(dtype)
        room = vector_room()
        for block in range(blocks):
            low_key, high_key = range_of_row(x + size * block, dtype, length, room)
            low, high = range_of_keys(low_key, high_key)
            choose_block(low, high, dtype, scheme, grid, scales, points, origins, block)
        return
    lows = _key_room()
    highs = lows + 4 * _MOST_BLOCKS
    keys_of(x, dtype, table, lows, highs, blocks)
    join_parts(lows, highs, 1, blocks)
    for block in range(blocks):
        low, high = peek_f32(lows + 4 * block), peek_f32(highs + 4 * block)
        choose_block(low, high, dtype, scheme, grid, scales, points, origins, block)


@inlined
def is_clipped(mask: int, words: int, length: int) -> Scalar:
    """Whether the bit of an element is zero; those behind the last element of a row are nobody's.

    Args:
        mask: address of the mask.
        words: number of its words.
        length: elements after which it starts a new word.
    """
    if all_set(mask, words):
        return _WHOLE
    each = (length + LANES - 1) // LANES
    behind = -(1 << (length - (each - 1) * LANES))
    for word in range(words):
        bits = np.int64(peek_i16(mask + 2 * word))
        if (word + 1) % each == 0:
            bits |= behind
        if bits != -1:
            return _CLIPPED
    return _WHOLE


@called
def quantize_small(x: int, y: int, mask: int, job: int) -> int:
    """Fake-quantize a tensor on this thread, with parameters chosen for it where the job says so.

    Args:
        x: address of the input.
        y: address of the output.
        mask: address of the mask of one bit per element, or 0.
        job: address of the table that ``SmallCall`` makes.

    Returns:
        Whether something was clipped; no, where there is no mask.
    """
    dtype, words, table, grid = peek_i64(job), peek_i64(job + 8), peek_i64(job + 16), peek_i64(job + 24)
    if peek_i64(job + 88) >= 0:
        observe(x, job)
    scales, points, origins = peek_i64(job + 32), peek_i64(job + 40), peek_i64(job + 48)
    map_part(FAKE, x, dtype, y, dtype, mask, scales, points, origins, table, grid, words, 1, 0)
    return 0 if mask == 0 else is_clipped(mask, words, peek_i64(job + 104))


@compiled
def quantize_one(x: int, y: int, mask: int, job: int) -> int:
    """``quantize_small`` for Python."""
    return int(quantize_small(x, y, mask, job))


@compiled
def quantize_each(table: int, tensors: int, mask: int, words: int, parts: int, control: int) -> None:
    """``quantize_small`` for many tensors; a part of the work is the tensors whose first word lies in it.

    Args:
        table: address of a row for each: input, output, job, first word in the mask, and room for the result.
        tensors: number of rows.
        mask: address of the mask of all of them, or 0.
        words: number of its words.
        parts: see ``walking.first_part``.
        control: see ``walking.first_part``.
    """
    part = first_part(control)
    while part < parts:
        begin, end = words * part // parts, words * (part + 1) // parts
        for row in range(table, table + 8 * _COLUMNS * tensors, 8 * _COLUMNS):
            first = peek_i64(row + 24)
            if begin <= first < end:
                bits = mask + 2 * first if mask != 0 else 0
                poke_i32(row + 32, quantize_small(peek_i64(row), peek_i64(row + 8), bits, peek_i64(row + 16)))
        part = next_part(control, part)


_quantize_one = entry(quantize_one, 4)


def suits(x: torch.Tensor, made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], observed: bool) -> bool:
    """Return whether ``SmallCall`` takes a plain CPU tensor and these parameters, which it writes if ``observed``."""
    wanted = torch.float32, torch.int32, torch.float32
    blocks = made[0].numel()
    return (
        0 < x.numel() < SMALL
        and not (observed and (blocks > _MOST_BLOCKS or any(t is not None and t.is_inference() for t in made)))
        and all(
            t is None or (t.dtype == dtype and t.numel() == blocks and t.is_cpu and t.is_contiguous())
            for t, dtype in zip(made, wanted, strict=True)
        )
    )


class SmallCall:
    """Fake quantization of small tensors of one shape, strides and dtype, with parameters at fixed addresses.

    The caller sees to it that tensors are plain, on the CPU and of that kind, that the parameters still lie at the
    addresses they had, and that no mode or transform of torch is in force.

    Args:
        x: a tensor of that kind, without holes; see ``suits``.
        made: scale, zero point and minval; see ``suits``.
        block_size: shape of one block.
        grid: the codes.
        scheme: see ``reference.choose_qparams``; None takes the parameters as they are.
        scale_dtype: see ``reference.choose_qparams``.

    Raises:
        ValueError: the parameters do not fit.
    """

    __slots__ = ("_alive", "address", "layout", "words", "written")

    def __init__(
        self,
        x: torch.Tensor,
        made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        block_size: tuple[int, ...],
        grid: Grid,
        scheme: str | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> None:
        native = native_grid(grid)
        layout = fitted_layout(x.shape, dense(x)[1], block_size, made, native.minval)
        addresses = [0 if t is None else t.data_ptr() for t in made]
        length = layout.numel if layout.flat or layout.length % LANES == 0 else layout.length
        job = np.array(
            [
                DTYPES[x.dtype], layout.words, layout.address, native.address, *addresses_read(native, made),
                *addresses, layout.blocks, -1 if scheme is None else scheme_code(grid, scheme, scale_dtype),
                layout.rowwise and not layout.flat, length,
            ],
            dtype=np.int64,
        )  # fmt: skip
        self._alive, self.layout = (job, layout, native, made), layout
        self.address: int = job.ctypes.data
        self.words = layout.words
        self.written = [] if scheme is None else [t for t in made if t is not None]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantize a tensor; the gradient passes straight through where nothing is clipped."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            y = torch.empty_like(x)
            _quantize_one(x.data_ptr(), y.data_ptr(), 0, self.address)
        else:
            y, mask = x.clone(), torch.empty(2 * self.words, dtype=torch.uint8, device=CPU)
            if _quantize_one(x.data_ptr(), y.data_ptr(), mask.data_ptr(), self.address):
                y = straight_through(x, partial(_over, y), mask, partial(apply_mask, layout=self.layout))
        if self.written:
            torch.autograd.graph.increment_version(self.written)
        return y

    def run_masked(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Backward]:
        """Fake-quantize a tensor without recording a gradient; return its mask and what it does to a gradient too."""
        y, mask = torch.empty_like(x), torch.empty(2 * self.words, dtype=torch.uint8, device=CPU)
        _quantize_one(x.data_ptr(), y.data_ptr(), mask.data_ptr(), self.address)
        if self.written:
            torch.autograd.graph.increment_version(self.written)
        return y, mask, partial(apply_mask, layout=self.layout)


def _over(y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return over(y)


def run_many(tensors: Sequence[torch.Tensor], calls: Sequence[SmallCall], gradient: bool) -> list[torch.Tensor]:
    """``SmallCall.run`` for each of some tensors, at once.

    Args:
        tensors: at least one.
        calls: what each goes through.
        gradient: whether all of them want a gradient, which they get together; else none of them.
    """
    if gradient:
        return list(_Together.apply(calls, *tensors))  # type: ignore[no-untyped-call]
    return _run(tensors, calls, None)


def _run(
    tensors: Sequence[torch.Tensor], calls: Sequence[SmallCall], masks: dict[int, torch.Tensor] | None
) -> list[torch.Tensor]:
    """Fake-quantize, and add the masks of those of which something is clipped, by their places."""
    results = [torch.empty_like(x) for x in tensors]
    rows, words, elements = array("q"), 0, 0
    for x, y, call in zip(tensors, results, calls, strict=True):
        rows.extend((x.data_ptr(), y.data_ptr(), call.address, words, 0))
        words += call.words
        elements += call.layout.numel
    bits = None if masks is None else torch.empty(2 * words, dtype=torch.uint8, device=CPU)
    arguments = rows.buffer_info()[0], len(results), 0 if bits is None else bits.data_ptr(), words
    run_parts(quantize_each, arguments, threads_for(elements), (rows, bits, tensors, results, calls))
    written = [t for call in calls for t in call.written]
    if written:
        torch.autograd.graph.increment_version(written)
    if masks is not None and bits is not None:
        for place in np.flatnonzero(rows[_COLUMNS - 1 :: _COLUMNS]).tolist():
            first = 2 * rows[_COLUMNS * place + 3]
            masks[place] = bits[first : first + 2 * calls[place].words].clone()
    return results


class _Together(torch.autograd.Function):
    """One node for all, which keeps no saved tensors, so that parts of its results may go backward one by one."""

    @staticmethod
    def forward(ctx: Any, calls: Sequence[SmallCall], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.masks = {}
        results = _run(tensors, calls, ctx.masks)
        ctx.layouts = {place: (calls[place].layout, results[place].stride()) for place in ctx.masks}
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        passed = list(grads)
        for place, mask in ctx.masks.items():
            grad = passed[place]
            if grad is not None:
                layout, strides = ctx.layouts[place]
                passed[place] = masked_gradient(grad, strides, mask, partial(apply_mask, layout=layout), ())
        return None, *passed
