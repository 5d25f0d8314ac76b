"""Kernel calls prepared once for tensors that look alike: what stays the same lies in a table in memory.

A call through ``fused`` looks up the layout, checks the parameters and hands over a dozen numbers, which on a small
tensor takes far longer than the arithmetic. Here all that happens when the call is made ready. Large tensors gain too:
between the operations of a model little of all that code is in a cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from bitwright.kernels.grid import Grid
from bitwright.kernels.layout import LANES, SMALL, layout_of
from bitwright.kernels.ownership import owns_memory
from bitwright.kernels.reference import check_fit
from bitwright.kernels.straight_through import straight_through

from .choosing import FEW, choose_block, track
from .compiling import compiled, entry
from .fused import apply_mask, find_parameters, threads_for
from .lanes import peek_f32, peek_f64, peek_i64, stack_room
from .mapping import FAKE, map_part, map_words
from .memory import empty_like, lasting_bytes, over, result_from
from .native import DTYPES, addresses_read, native_grid, scheme_code
from .ranges import join_parts, keys_of
from .relu import keep_signs, map_and_sign_part, signs_to_keep
from .snapshot import Snapshot, unchanged
from .threads import run_parts
from .walking import vector_room

__all__ = ["ReadyCall", "suits"]

_empty_like = torch.empty_like
_always = partial(bool, 1)

ready_keys = stack_room(2 * 4 * FEW)


@compiled
def map_ready(x: int, y: int, mask: int, job: int) -> None:
    """Fake-quantize a tensor on this thread.

    Args:
        x: address of the input.
        y: address of the output.
        mask: address of the mask of one bit per element, or 0.
        job: address of the table that ``ready_call`` makes.
    """
    dtype, words, table, grid = peek_i64(job), peek_i64(job + 8), peek_i64(job + 16), peek_i64(job + 24)
    scales, points, origins = peek_i64(job + 32), peek_i64(job + 40), peek_i64(job + 48)
    room = vector_room()
    map_words(FAKE, x, dtype, y, dtype, mask, scales, points, origins, table, grid, 0, words, room)


@compiled
def observe_ready(x: int, mode: int, job: int) -> None:
    """Widen a running range by a tensor of at most ``FEW`` blocks and choose the parameters.

    Args:
        x: address of the tensor.
        mode: see ``choosing.blend``.
        job: as in ``map_ready``.
    """
    dtype, table, grid = peek_i64(job), peek_i64(job + 16), peek_i64(job + 24)
    scales, points, origins = peek_i64(job + 56), peek_i64(job + 64), peek_i64(job + 72)
    blocks, scheme, constant = peek_i64(job + 96), peek_i64(job + 104), peek_f64(job + 112)
    lows = ready_keys()
    highs = lows + 4 * FEW
    keys_of(x, dtype, table, lows, highs, blocks)
    join_parts(lows, highs, 1, blocks)
    track(lows, highs, blocks, dtype, mode, constant, peek_i64(job + 80), peek_i64(job + 88))
    for block in range(blocks):
        low, high = peek_f32(lows + 4 * block), peek_f32(highs + 4 * block)
        choose_block(low, high, dtype, scheme, grid, scales, points, origins, block)


@compiled
def observe_and_map_ready(x: int, y: int, mode: int, job: int) -> None:
    """``observe_ready``, and then ``map_ready`` without a mask."""
    observe_ready(x, mode, job)
    map_ready(x, y, 0, job)


@compiled
def map_ready_if_unchanged(x: int, y: int, job: int) -> bool:
    """``map_ready`` without a mask, unless the elements of the job's snapshot have changed; return whether it ran."""
    if not unchanged(peek_i64(job + 120)):
        return False
    map_ready(x, y, 0, job)
    return True


_map_ready = entry(map_ready, 4)
_observe_ready = entry(observe_ready, 3)
_observe_and_map_ready = entry(observe_and_map_ready, 4)
_map_ready_if_unchanged = entry(map_ready_if_unchanged, 3)


def suits(
    x: torch.Tensor,
    made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    running: tuple[torch.Tensor, torch.Tensor] | None,
) -> bool:
    """Return whether ``ReadyCall`` takes a contiguous tensor and these parameters."""
    wanted = (torch.float32, torch.int32, torch.float32, x.dtype, x.dtype)
    blocks = made[0].numel()
    return (
        x.numel() > 0
        and (running is None or x.numel() >= SMALL or blocks <= FEW)
        and all(
            t is None or (t.dtype == dtype and t.numel() == blocks and t.is_cpu and t.is_contiguous())
            for t, dtype in zip((*made, *(running or (None, None))), wanted, strict=True)
        )
    )


class ReadyCall:
    """Fake quantization of contiguous tensors of one shape and dtype, with parameters at fixed addresses.

    The caller sees to it that tensors are plain, contiguous, on the CPU and of that shape and dtype, that the
    parameters still lie at the addresses they had, and that no mode or transform of torch is in force.

    Args:
        x: a tensor of that kind.
        made: scale, zero point and minval as an observer keeps them: contiguous, float32, int32, float32.
        block_size: shape of one block.
        grid: the codes.
        running: smallest and largest element of each block so far, to observe too; at most ``FEW`` blocks
            in a tensor of fewer than ``SMALL`` elements.
        scheme: see ``reference.choose_qparams``; for ``observe``.
        scale_dtype: likewise.
        averaging_constant: see ``reference.observe_running_and_fake_quantize``.
        snapshot: what ``run`` looks at first.

    Raises:
        ValueError: the parameters do not fit.
    """

    __slots__ = (
        "_address",
        "_alive",
        "_arguments",
        "_average",
        "_holds",
        "_large",
        "_layout",
        "_range",
        "_running",
        "block_size",
        "grid",
        "mask_bytes",
    )

    def __init__(
        self,
        x: torch.Tensor,
        made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        block_size: tuple[int, ...],
        grid: Grid,
        running: tuple[torch.Tensor, torch.Tensor] | None = None,
        scheme: str = "symmetric",
        scale_dtype: torch.dtype | None = None,
        averaging_constant: float | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        scale, zero_point, minval = made
        native, layout = native_grid(grid), layout_of(x.shape, None, block_size)
        if check_fit(layout.counts, scale, zero_point, minval, native.minval) and layout.blocks != 1:
            layout = layout_of(x.shape, None, tuple(x.shape))
        addresses = [0 if t is None else t.data_ptr() for t in (*made, *(running or (None, None)))]
        code = scheme_code(grid, scheme, scale_dtype)
        job = np.array(
            [
                DTYPES[x.dtype], layout.words, layout.address, native.address, *addresses_read(native, made),
                *addresses, layout.blocks, code, 0,
                0 if snapshot is None else snapshot.address,
            ],
            dtype=np.int64,
        )  # fmt: skip
        job[14:15].view(np.float64)[0] = averaging_constant or 0.0
        self._average = 2 if averaging_constant is None else 1
        self._range = native, code, made
        self._running = averaging_constant or 0.0, *(running or ())
        self._alive, self._layout = (job, layout, native, made, running, snapshot), layout
        self._holds = _always if snapshot is None else snapshot.holds
        self._arguments = tuple(int(word) for word in (*job[4:7], *job[2:4], job[1]))
        self._large = layout.numel >= SMALL
        self.block_size, self.grid = block_size, grid
        self._address = job.ctypes.data
        self.mask_bytes = 2 * layout.words

    def run(self, x: torch.Tensor) -> torch.Tensor | None:
        """Fake-quantize without a gradient; None if the elements of the snapshot are not what they were."""
        if self._large:
            return self.run_masked(x, None) if self._holds() else None
        y = _empty_like(x)
        return y if _map_ready_if_unchanged(x.data_ptr(), y.data_ptr(), self._address) else None

    def run_with_gradient(self, x: torch.Tensor, unneeded: bool = False) -> torch.Tensor:
        """Fake-quantize a tensor that requires a gradient.

        Args:
            x: the tensor.
            unneeded: nobody but the caller holds the tensor, and the caller does not need it any more. Its memory then
                becomes that of the result, unless an operation has saved it.
        """
        signs = self._signs_to_write(x) if self._large else None
        run = partial(self.run_masked, x, signs=signs, in_place=unneeded and owns_memory(x))
        return straight_through(x, run, self._new_mask(), self.apply_mask)

    def _signs_to_write(self, x: torch.Tensor) -> torch.Tensor | None:
        """Bytes for the signs of a ReLU's result, if they are to be written together with the mask."""
        layout = self._layout
        threads = threads_for(layout.numel)
        if layout.words == -(-layout.numel // LANES):
            return signs_to_keep(x, threads)
        keep_signs(x, threads)
        return None

    def _new_mask(self) -> torch.Tensor:
        return lasting_bytes(self.mask_bytes) if self._large else torch.empty(self.mask_bytes, dtype=torch.uint8)

    def run_masked(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        signs: torch.Tensor | None = None,
        in_place: bool = False,
    ) -> torch.Tensor:
        """Fake-quantize, and fill what is given of the mask, of ``mask_bytes`` bytes, and of the signs."""
        bits = 0 if mask is None else mask.data_ptr()
        if not self._large:
            y = over(x) if in_place else torch.empty_like(x)
            _map_ready(x.data_ptr(), y.data_ptr(), bits, self._address)
            return y
        y = over(x) if in_place else empty_like(x) if mask is None else result_from(x)
        dtype, count = DTYPES[x.dtype], self._layout.numel
        run: Any = map_part
        arguments: tuple[int, ...] = (FAKE, x.data_ptr(), dtype, y.data_ptr(), dtype, bits, *self._arguments)
        if signs is not None:
            run = map_and_sign_part
            arguments = (x.data_ptr(), dtype, y.data_ptr(), bits, *self._arguments, signs.data_ptr(), count)
        run_parts(run, arguments, threads_for(count), (x, y, mask, signs, self._alive))
        return y

    def apply_mask(self, gradient: torch.Tensor, mask: torch.Tensor, in_place: bool) -> torch.Tensor:
        """Multiply a contiguous gradient of the tensor's shape by the mask."""
        return apply_mask(gradient, mask, in_place, self._layout)

    def observe(self, x: torch.Tensor, restart: bool) -> None:
        """Widen the running range by the tensor, or begin it anew, and write the parameters.

        The caller advances the version counters of what is written.
        """
        mode = 0 if restart else self._average
        if self._large:
            find_parameters(x, self._layout, *self._range, (mode, *self._running))
        else:
            _observe_ready(x.data_ptr(), mode, self._address)

    def observe_and_run(self, x: torch.Tensor, restart: bool) -> torch.Tensor:
        """``observe``, and then ``run``, in one call."""
        if self._large:
            self.observe(x, restart)
            return self.run_masked(x, None)
        y = torch.empty_like(x)
        _observe_and_map_ready(x.data_ptr(), y.data_ptr(), 0 if restart else self._average, self._address)
        return y
