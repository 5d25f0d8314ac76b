"""Kernel calls prepared once for tensors that look alike: what ``cpu.ready`` is for the CPU.

A kernel takes a small tensor a few microseconds, and Python ten times as long to find out what to launch. Here the
layout is looked up and the parameters are checked when a call is made ready, and launches are kept from then on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bitwright.kernels.grid import Grid
from bitwright.kernels.layout import fitted_layout, layout_of
from bitwright.kernels.saved import mark, marking
from bitwright.kernels.straight_through import Backward, straight_through

from .fused import FAKE, WrittenBytes, apply_mask, find_keys, has_bytes, needed, scheme_code
from .launches import (
    choose_launch,
    divided,
    fits_one_pass,
    is_covered,
    map_launch,
    numbers_of,
    parts_of,
    rows_launch,
    whole_launch,
)
from .launching import Lasting, Launch

__all__ = ["ReadyCall", "suits"]

Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

# Where the parameters come from: how a running range moves, or one of these two.
_AS_THEY_ARE, _THIS_ALONE = -1, 3
_RESTART, _AVERAGE, _EXTREMES = 0, 1, 2
_empty, _empty_like = torch.empty, torch.empty_like
_always = partial(bool, 1)


def suits(
    x: torch.Tensor,
    made: Parameters,
    block_size: tuple[int, ...],
    grid: Grid,
    running: tuple[torch.Tensor, torch.Tensor] | None = None,
    scheme: str | None = None,
    **_: Any,
) -> bool:
    """Return whether ``ReadyCall``, of the same arguments, takes a contiguous tensor and these parameters.

    Args:
        x: see ``ReadyCall``.
        made: likewise.
        block_size: likewise.
        grid: likewise.
        running: likewise.
        scheme: likewise; None where nothing is to be observed.
    """
    layout, blocks = layout_of(x.shape, None, block_size), made[0].numel()
    kept = x.dtype if running is None else running[0].dtype
    wanted = (torch.float32, torch.int32, torch.float32, kept, kept)
    observes = scheme is not None or running is not None
    return (
        is_covered(layout)
        and (kept == x.dtype or (kept == torch.float32 and x.dtype.itemsize == 2))
        and (not observes or (blocks == layout.blocks and (not layout.per_element or fits_one_pass(layout))))
        and (not observes or not grid.is_integer or None not in made)
        and all(
            t is None or (t.dtype == dtype and t.numel() == blocks and t.device == x.device and t.is_contiguous())
            for t, dtype in zip((*made, *(running or (None, None))), wanted, strict=True)
        )
    )


class ReadyCall:
    """Fake quantization of contiguous tensors of one shape, dtype and device.

    The caller sees to it that tensors are plain and of that kind, that the parameters still lie in the same memory, and
    that no mode or transform of torch is in force. It advances the versions of what ``observe`` writes, beforehand.

    Args:
        x: a tensor of that kind.
        made: scale, zero point and minval as an observer keeps them: contiguous, float32, int32, float32.
        block_size: shape of one block.
        grid: the codes.
        running: smallest and largest element of each block so far, to observe too; in the dtype of ``x``, or float32
            for a tensor of half precision, for which it must not begin anew.
        scheme: see ``reference.choose_qparams``; for ``observe``.
        scale_dtype: likewise.
        averaging_constant: see ``reference.observe_running_and_fake_quantize``.
        snapshot: what ``run`` looks at first.

    Raises:
        ValueError: the parameters do not fit.
    """

    __slots__ = (
        "_constant",
        "_device",
        "_holds",
        "_kept_dtype",
        "_launches",
        "_layout",
        "_made",
        "_mode",
        "_one_pass",
        "_read",
        "_scheme",
        "_tracked",
        "_whole",
        "_words",
        "_written",
        "block_size",
        "encodes",
        "grid",
    )

    def __init__(
        self,
        x: torch.Tensor,
        made: Parameters,
        block_size: tuple[int, ...],
        grid: Grid,
        running: tuple[torch.Tensor, torch.Tensor] | None = None,
        scheme: str = "symmetric",
        scale_dtype: torch.dtype | None = None,
        averaging_constant: float | None = None,
        snapshot: Any = None,
    ) -> None:
        scale, layout = made[0], fitted_layout(x.shape, None, block_size, made, numbers_of(grid).minval)
        self.block_size, self.grid, self._made, self._layout = block_size, grid, made, layout
        read, tracked = needed(made, grid), running or (scale, scale)
        written = scale, *(scale if t is None else t for t in made[1:])
        self._read = Lasting.of(scale, *(scale if t is None else t for t in read[1:]))
        self._written, self._tracked = Lasting.of(*written, *tracked), Lasting.of(*tracked, *written)
        self._whole: Lasting | None = None
        self._device = x.device
        self._kept_dtype = x.dtype if running is None else running[0].dtype
        self._mode = _THIS_ALONE if running is None else _EXTREMES if averaging_constant is None else _AVERAGE
        self._constant = averaging_constant or 0.0
        self._scheme = scheme_code(grid, scheme, scale_dtype)
        self._one_pass = fits_one_pass(layout)
        # Whether a byte is written for each element of a result where ``saved_as_codes`` asks for it.
        self.encodes = has_bytes(grid)
        self._words = divided(layout.numel, 32)
        self._holds = _always if snapshot is None else snapshot.holds
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def run(self, x: torch.Tensor) -> torch.Tensor | None:
        """Fake-quantize without a gradient; None if the snapshot does not hold any more."""
        return self._go(x, _AS_THEY_ARE) if self._holds() else None

    def run_with_gradient(
        self, x: torch.Tensor, unneeded: bool = False, observed: bool = False, restart: bool = False
    ) -> torch.Tensor:
        """Fake-quantize a tensor that requires a gradient.

        Args:
            x: the tensor.
            unneeded: has no effect here; see ``cpu.ready``.
            observed: ``observe`` the tensor first.
            restart: see ``observe``.
        """
        mode = self._from(restart) if observed else _AS_THEY_ARE
        mask = _empty(self._words, dtype=torch.int32, device=self._device)
        if not (self.encodes and marking(x)):
            return straight_through(x, partial(self._go, x, mode), mask, apply_mask)
        kept = WrittenBytes(x, mask, self._made, self._layout, self.grid)
        y = straight_through(x, partial(self._go, x, mode, data=kept.data), mask, apply_mask)
        kept.version = y._version
        mark(y, kept)
        return y

    def masked(self, x: torch.Tensor, observed: bool) -> tuple[torch.Tensor, torch.Tensor, Backward]:
        """See ``cpu.ready``."""
        mask = _empty(self._words, dtype=torch.int32, device=self._device)
        return self._go(x, self._mode if observed else _AS_THEY_ARE, mask), mask, apply_mask

    def observe(self, x: torch.Tensor, restart: bool) -> None:
        """Widen the running range by the tensor, or begin it anew, and write the parameters."""
        self._find(x, self._from(restart))

    def observe_and_run(self, x: torch.Tensor, restart: bool) -> torch.Tensor:
        """``observe``, and then ``run``, in one call."""
        return self._go(x, self._from(restart))

    def _from(self, restart: bool) -> int:
        return _RESTART if restart else self._mode

    def _go(
        self, x: torch.Tensor, mode: int, mask: torch.Tensor | None = None, data: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Find the parameters as ``mode`` says, fake-quantize, and fill what is given of mask and bytes."""
        y = _empty_like(x)
        in_rows = mode != _AS_THEY_ARE and self._one_pass
        if mode != _AS_THEY_ARE and not in_rows:
            self._find(x, mode)
            mode = _AS_THEY_ARE
        key = mode, mask is None, data is None
        launch = self._launches.get(key)
        if launch is None:
            self._launches[key] = launch = self._launch(x.dtype, mode, mask is not None, data is not None)
        bits, codes = y if mask is None else mask, y if data is None else data
        launch(x, y, bits, codes, lasting=self._written if in_rows else self._read)
        return y

    def _launch(self, dtype: torch.dtype, mode: int, mask: bool, data: bool) -> Launch:
        if mode == _AS_THEY_ARE:
            _, points, origins = needed(self._made, self.grid)
            return map_launch(
                FAKE, dtype, dtype, self._layout, self.grid, points is not None, origins is not None, mask, data
            )
        running = None if mode == _THIS_ALONE else mode
        return rows_launch(
            self._layout, self.grid, self._scheme, dtype, self._kept_dtype, mask, data, running, self._constant
        )

    def _find(self, x: torch.Tensor, mode: int) -> None:
        """Find the range, move the running one, and write the parameters."""
        layout, launch = self._layout, self._launches.get((mode,))
        if launch is None:
            how = self.grid, self._scheme, x.dtype, self._kept_dtype, None if mode == _THIS_ALONE else mode
            if layout.blocks == 1:
                launch = whole_launch(layout, *how, self._constant)
            else:
                launch = choose_launch(layout.blocks, True, 0, *how, self._constant)
            self._launches[(mode,)] = launch
        if layout.blocks == 1:
            launch(x, lasting=self._whole or self._with_keys())
        else:
            launch(*find_keys(x, layout), lasting=self._tracked)

    def _with_keys(self) -> Lasting:
        """What ``track_whole_kernel`` takes; the keys serve all calls, as the running range does."""
        keys = torch.zeros(2 * parts_of(self._layout) + 1, dtype=torch.int32, device=self._device)
        self._whole = Lasting.of(keys, *self._tracked.tensors)
        return self._whole
