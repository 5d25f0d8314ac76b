"""Kernel calls prepared once for tensors that look alike: what stays the same lies in a table in memory.

A call through ``fused`` looks up the layout, checks the parameters and hands over a dozen numbers, which on a small
tensor takes far longer than the arithmetic. Here all that happens when the call is made ready. Large tensors gain too:
between the operations of a model little of all that code is in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from bitwright.kernels.grid import Grid
from bitwright.kernels.layout import LANES, SMALL, fitted_layout
from bitwright.kernels.ownership import owns_memory
from bitwright.kernels.saved import WrittenCodes, hooked_by_others, marking
from bitwright.kernels.straight_through import Backward, passed_straight, straight_through

from .choosing import FEW, choose_block, track
from .coding import code_part
from .compiling import compiled, entry
from .fused import apply_mask
from .lanes import peek_f32, peek_f64, peek_i64, stack_room
from .mapping import FAKE, all_set, map_words
from .memory import CPU, backward_goes_unnoticed, empty_flat, empty_like, lasting_bytes, over, result_from
from .native import DTYPES, addresses_read, native_grid, scheme_code
from .observing import find_parameters, goes_by_rows, observe_by_rows
from .ranges import join_parts, keys_of
from .relu import keep_signs, relu_node, signs_to_keep
from .snapshot import Snapshot, unchanged
from .stages import AS_THEY_ARE, FAILED, PARAMETERS, THIS_ALONE, new_call, stages_part
from .threads import part_count, run_parts, threads_for
from .walking import vector_room

__all__ = ["ReadyCall", "suits"]

_empty_like = torch.empty_like
_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
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
def observe_and_map_ready(x: int, y: int, mask: int, mode: int, job: int) -> None:
    """``observe_ready``, and then ``map_ready``."""
    observe_ready(x, mode, job)
    map_ready(x, y, mask, job)


@compiled
def map_ready_if_unchanged(x: int, y: int, mask: int, job: int) -> bool:
    """``map_ready``, unless the elements of the job's snapshot have changed; return whether it ran."""
    if not unchanged(peek_i64(job + 120)):
        return False
    map_ready(x, y, mask, job)  # a constant for the mask would have it compiled once more, in ten seconds
    return True


_map_ready = entry(map_ready, 4)
_observe_ready = entry(observe_ready, 3)
_observe_and_map_ready = entry(observe_and_map_ready, 5)
_map_ready_if_unchanged = entry(map_ready_if_unchanged, 4)
_all_set = entry(all_set, 2)


def suits(
    x: torch.Tensor,
    made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    running: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> bool:
    """Return whether ``ReadyCall``, of the same arguments, takes a contiguous tensor and these parameters."""
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
        "_codes_read",
        "_counts_words",
        "_holds",
        "_large",
        "_layout",
        "_mode",
        "_numel",
        "_range",
        "_running",
        "block_size",
        "encodes",
        "grid",
        "mask_bytes",
        "unsaved",
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
        native = native_grid(grid)
        layout = fitted_layout(x.shape, None, block_size, made, native.minval)
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
        self._mode = THIS_ALONE if running is None else 2 if averaging_constant is None else 1
        self._range = native, code, made
        self._running = () if running is None else (averaging_constant or 0.0, *running)
        self._alive, self._layout = (job, layout, native, made, running, snapshot), layout
        self._holds = _always if snapshot is None else snapshot.holds
        self._numel, self._large = layout.numel, layout.numel >= SMALL
        self._counts_words = layout.words == -(-layout.numel // LANES)
        self.block_size, self.grid = block_size, grid
        self._address = job.ctypes.data
        self.mask_bytes = 2 * layout.words
        # Whether results are encoded at once, which begins when an operation has saved one (``saved.saved_as_codes``).
        self.encodes = False
        # How many results in a row no operation has saved; counted where they are marked (``dispatch.note_codes``).
        self.unsaved = 0
        self._codes_read: tuple[Any, ...] | None = None
        has_bytes = native.integer and grid.quant_max - grid.quant_min < 256
        if has_bytes and layout.blocks == 1 and layout.numel % LANES == 0:
            _, points, origins = addresses_read(native, made)
            self._codes_read = x.dtype, points != 0, origins != 0

    def run(self, x: torch.Tensor) -> torch.Tensor | None:
        """Fake-quantize without a gradient; None if the elements of the snapshot are not what they were."""
        if self._large:
            return self.run_masked(x, None) if self._holds() else None
        y = _empty_like(x)
        return y if _map_ready_if_unchanged(x.data_ptr(), y.data_ptr(), 0, self._address) else None

    def run_with_gradient(
        self, x: torch.Tensor, unneeded: bool = False, observed: bool = False, restart: bool = False
    ) -> torch.Tensor:
        """Fake-quantize a tensor that requires a gradient.

        Args:
            x: the tensor.
            unneeded: nobody but the caller holds the tensor, and the caller does not need it any more. Its memory then
                becomes that of the result, unless an operation has saved it.
            observed: ``observe`` the tensor first.
            restart: see ``observe``.
        """
        mode = AS_THEY_ARE if not observed else 0 if restart else self._mode
        codes = WrittenCodes(self, lasting_bytes(self._numel)) if self.encodes and marking(x) else None
        if not self._large and codes is None:
            mask = torch.empty(self.mask_bytes, dtype=torch.uint8, device=CPU)
            return self._with_gradient(x, partial(self.run_masked, x, mode=mode), mask)
        signs = self._signs_to_write(x) if self._large and type(x.grad_fn) is relu_node() else None
        in_place = unneeded and self._large and owns_memory(x)
        run = partial(self.run_masked, x, mode=mode, signs=signs, in_place=in_place, codes=codes)
        y = self._with_gradient(x, run, lasting_bytes(self.mask_bytes))
        if codes is not None:
            codes.mark(y)
        return y

    def _with_gradient(
        self, x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:
        """``straight_through``, which keeps no mask where nothing was clipped.

        The two passes of a checkpoint must save the same tensors, and a result may differ by a rounding in the second.
        """
        if x.is_leaf or hooked_by_others() or backward_goes_unnoticed():
            return straight_through(x, run, mask, self.apply_mask)
        recording = _grad_enabled()
        _set_grad_enabled(False)
        try:
            y = run(mask)
        finally:
            _set_grad_enabled(recording)
        if _all_set(mask.data_ptr(), self._layout.words):
            return passed_straight(x, y)
        return straight_through(x, lambda _: y, mask, self.apply_mask)

    def encode_from_now_on(self) -> None:
        """Write a byte for each element of further results, where the grid and the shape allow it; one was saved."""
        self.encodes = self._codes_read is not None
        self.unsaved = 0

    def decode(self, codes: torch.Tensor, parameters: int) -> torch.Tensor:
        """Return the elements of a result, in the order of memory, from its bytes.

        Args:
            codes: the bytes that were written with the result.
            parameters: address of the scale, zero point and minval that it was made with, one behind the other.
        """
        assert self._codes_read is not None
        dtype, points, origins = self._codes_read
        y = empty_flat(self._numel, dtype)
        arguments = (
            0, y.data_ptr(), DTYPES[dtype], codes.data_ptr(), 0, parameters, parameters + 4 if points else 0,
            parameters + 8 if origins else 0, self._layout.address, self._range[0].address, self._numel // LANES,
        )  # fmt: skip
        run_parts(code_part, arguments, threads_for(self._numel), (y, codes, self._alive))
        return y

    def _signs_to_write(self, x: torch.Tensor) -> torch.Tensor | None:
        """Bytes for the signs of a ReLU's result, if they are to be written together with the mask."""
        if self._counts_words:
            return signs_to_keep(x)
        keep_signs(x, threads_for(self._numel))
        return None

    def run_masked(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        mode: int = AS_THEY_ARE,
        signs: torch.Tensor | None = None,
        in_place: bool = False,
        codes: WrittenCodes | None = None,
    ) -> torch.Tensor:
        """Fake-quantize, and fill what is given of the mask, of ``mask_bytes`` bytes, of the signs and of the codes.

        Args:
            x: the tensor.
            mask: see ``straight_through``.
            mode: whether to observe the tensor first; see ``stages_part``.
            signs: what ``signs_to_keep`` returned.
            in_place: the result takes the memory of ``x``.
            codes: where the bytes go; for a call that ``encodes``.
        """
        if self._large or codes is not None:
            y = over(x) if in_place else empty_like(x) if mask is None else result_from(x)
            self._run_stages(x, y, mask, mode, signs, codes)
            return y
        y, bits = torch.empty_like(x), 0 if mask is None else mask.data_ptr()
        if mode == AS_THEY_ARE:
            _map_ready(x.data_ptr(), y.data_ptr(), bits, self._address)
        else:
            _observe_and_map_ready(x.data_ptr(), y.data_ptr(), bits, mode, self._address)
        return y

    def _run_stages(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        mask: torch.Tensor | None,
        mode: int,
        signs: torch.Tensor | None = None,
        codes: WrittenCodes | None = None,
    ) -> None:
        layout, threads = self._layout, threads_for(self._numel)
        if mode != AS_THEY_ARE and layout.blocks > FEW:
            if mode == THIS_ALONE and y is not None and goes_by_rows(layout, threads):
                observe_by_rows(x, y, mask, layout, *self._range, threads)
                return
            find_parameters(x, layout, *self._range, (mode, *self._running) if self._running else None)
            mode = AS_THEY_ARE
            if y is None:
                return
        parts = 0 if mode == AS_THEY_ARE else part_count(threads)
        call = new_call(
            self._address, x.data_ptr(), 0 if y is None else y.data_ptr(), 0 if mask is None else mask.data_ptr(),
            0 if signs is None else signs.data_ptr(), 0 if codes is None else codes.data.data_ptr(), parts,
            layout.blocks,
        )  # fmt: skip
        at = call.buffer_info()[0]
        run_parts(stages_part, (at, mode), threads, (call, x, y, mask, signs, codes, self._alive))
        if codes is not None and not call[FAILED]:
            codes.written(call, at + PARAMETERS)

    def masked(self, x: torch.Tensor, observed: bool) -> tuple[torch.Tensor, torch.Tensor, Backward]:
        """Fake-quantize a tensor without recording a gradient; return its mask and what it does to a gradient too."""
        mask = lasting_bytes(self.mask_bytes)
        return self.run_masked(x, mask, self._mode if observed else AS_THEY_ARE), mask, self.apply_mask

    def apply_mask(self, gradient: torch.Tensor, mask: torch.Tensor, in_place: bool) -> torch.Tensor:
        """Multiply a contiguous gradient of the tensor's shape by the mask."""
        return apply_mask(gradient, mask, in_place, self._layout)

    def observe(self, x: torch.Tensor, restart: bool) -> None:
        """Widen the running range by the tensor, or begin it anew, and write the parameters.

        The caller advances the version counters of what is written.
        """
        mode = 0 if restart else self._mode
        if self._large:
            self._run_stages(x, None, None, mode)
        else:
            _observe_ready(x.data_ptr(), mode, self._address)

    def observe_and_run(self, x: torch.Tensor, restart: bool) -> torch.Tensor:
        """``observe``, and then ``run``, in one call."""
        mode = 0 if restart else self._mode
        if self._large:
            return self.run_masked(x, None, mode)
        y = _empty_like(x)
        _observe_and_map_ready(x.data_ptr(), y.data_ptr(), 0, mode, self._address)
        return y
