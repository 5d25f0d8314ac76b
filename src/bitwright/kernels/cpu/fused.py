"""The CPU kernels: one pass over memory, all cores, the numbers of ``kernels.reference`` bit for bit.

Callers have checked with ``kernels.dispatch`` that the tensor is a plain strided one of a dtype in ``native.DTYPES``
with at least one element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.autograd.graph import increment_version

from bitwright.kernels import reference
from bitwright.kernels.grid import Grid
from bitwright.kernels.layout import LANES, SMALL, Layout, dense, fitted_layout, layout_of
from bitwright.kernels.reference import check_running, is_state
from bitwright.kernels.straight_through import straight_through

from .choosing import choose_part
from .coding import code_part
from .mapping import CODES, FAKE, VALUES, all_set, map_part, mask_part
from .memory import CPU, empty_like, forget_sources, lasting_bytes, result_from, unaligned_like
from .native import DTYPES, NativeGrid, address_of, native_grid, scheme_code
from .observing import find_parameters, goes_by_rows, observe_by_rows, range_keys
from .ranges import extremes
from .relu import keep_signs
from .threads import run_parts, threads_for

__all__ = [
    "apply_mask",
    "choose_qparams",
    "dequantize",
    "fake_quantize",
    "min_max",
    "observe_and_fake_quantize",
    "quantize",
]

Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class _Prepared(NamedTuple):
    """Parameters of the blocks in the form that the loops read; the tensors own the memory."""

    scale: torch.Tensor
    zero_point: torch.Tensor | None
    minval: torch.Tensor | None
    layout: Layout
    grid: NativeGrid


def _prepare(
    x: torch.Tensor,
    order: tuple[int, ...] | None,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    block_size: tuple[int, ...],
    grid: Grid,
) -> _Prepared:
    native = native_grid(grid)
    layout = fitted_layout(x.shape, order, block_size, (scale, zero_point, minval), native.minval)
    scale = _plain(scale, torch.float32)
    if not native.integer:
        return _Prepared(scale, None, None, layout, native)
    if native.minval and minval is not None:
        return _Prepared(scale, None, _plain(minval, torch.float32), layout, native)
    return _Prepared(scale, None if zero_point is None else _plain(zero_point, torch.int32), None, layout, native)


def _plain(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The parameter as the loops read it."""
    if not parameter.is_cpu:
        raise ValueError(f"A parameter is on {parameter.device}, but the tensor is on the CPU; move it there.")
    if parameter.dtype == dtype and parameter.is_contiguous():
        return parameter
    return parameter.detach().to(dtype).contiguous()


def _map(op: int, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None, given: _Prepared) -> None:
    """Run ``map_part`` over all cores."""
    layout = given.layout
    arguments = (
        op, x.data_ptr(), DTYPES[x.dtype], y.data_ptr(), DTYPES[y.dtype], address_of(mask), given.scale.data_ptr(),
        address_of(given.zero_point), address_of(given.minval), layout.address, given.grid.address, layout.words,
    )  # fmt: skip
    run_parts(map_part, arguments, threads_for(layout.numel), (x, y, mask, given))


def _new_mask(layout: Layout) -> torch.Tensor:
    return lasting_bytes(2 * layout.words)


def _mask_length(layout: Layout) -> int:
    """Elements after which the mask starts a new word."""
    return layout.numel if layout.flat or layout.length % 16 == 0 else layout.length


def apply_mask(gradient: torch.Tensor, mask: torch.Tensor, in_place: bool, layout: Layout) -> torch.Tensor:
    """Multiply a gradient that lies in the mask's order of memory.

    Where nothing is masked the gradient itself is returned; in place only what is masked is touched. Most gradients
    therefore cost no pass over memory, but one over the mask.
    """
    words = layout.words
    threads = threads_for(layout.numel)
    if layout.numel >= SMALL:
        forget_sources()
    if not in_place and all_set(mask.data_ptr(), words):
        return gradient
    out = gradient if in_place else unaligned_like(gradient)
    arguments = (
        gradient.data_ptr(), mask.data_ptr(), out.data_ptr(), DTYPES[gradient.dtype], _mask_length(layout), words,
    )  # fmt: skip
    run_parts(mask_part, arguments, threads, (gradient, mask, out))
    return out


def _run(x: torch.Tensor, forward: Callable[[torch.Tensor | None], torch.Tensor], layout: Layout) -> torch.Tensor:
    """Call ``forward`` with a mask for the gradient if one is wanted."""
    if x.requires_grad and torch.is_grad_enabled():
        if x.numel() >= SMALL:
            keep_signs(x, threads_for(layout.numel))
        return straight_through(x, forward, _new_mask(layout), partial(apply_mask, layout=layout))
    return forward(None)


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
) -> torch.Tensor:
    """``reference.fake_quantize``."""
    flat, order = dense(x)
    given = _prepare(flat, order, scale, zero_point, minval, block_size, grid)

    def forward(mask: torch.Tensor | None) -> torch.Tensor:
        y = empty_like(flat) if mask is None else result_from(flat)
        _map(FAKE, flat, y, mask, given)
        return y

    return _run(x, forward, given.layout)


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
) -> torch.Tensor:
    """``reference.quantize``, without gradient."""
    flat, order = dense(x)
    given = _prepare(flat, order, scale, zero_point, minval, block_size, grid)
    codes = empty_like(flat, dtype=torch.float32)
    _map(CODES, flat, codes, None, given)
    return codes


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``reference.dequantize``, without gradient."""
    flat, order = dense(codes.to(torch.float32))
    given = _prepare(flat, order, scale, zero_point, minval, block_size, grid)
    values = empty_like(flat, dtype=output_dtype)
    _map(VALUES, flat, values, None, given)
    return values


def min_max(x: torch.Tensor, block_size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.min_max``."""
    flat, order = dense(x.detach())
    layout = layout_of(flat.shape, order, block_size)
    threads = threads_for(layout.numel)
    if threads == 1:
        low, high = (torch.empty(layout.counts, dtype=torch.float32, device=CPU) for _ in range(2))
        sets = 1
    else:
        keys, _ = range_keys(flat, layout, threads)
        sets = keys.shape[1]
        low, high = torch.from_numpy(keys.view(np.float32)[:, 0]).view(2, *layout.counts).unbind(0)
    extremes(
        flat.data_ptr() if threads == 1 else 0, DTYPES[x.dtype], layout.address, low.data_ptr(), high.data_ptr(),
        sets, layout.blocks,
    )  # fmt: skip
    return low.to(x.dtype), high.to(x.dtype)


def _new_parameters(counts: tuple[int, ...], integer: bool) -> Parameters:
    like = torch.empty(counts, dtype=torch.float32, device="meta")
    scale = empty_like(like, device=CPU)
    if not integer:
        return scale, None, None
    return scale, empty_like(like, dtype=torch.int32, device=CPU), empty_like(like, device=CPU)


def choose_qparams(
    min_val: torch.Tensor,
    max_val: torch.Tensor,
    *,
    grid: Grid,
    scheme: str,
    scale_dtype: torch.dtype | None = None,
) -> Parameters:
    """``reference.choose_qparams``; the caller has checked the scheme."""
    native = native_grid(grid)
    low, high = _plain(min_val, torch.float32), _plain(max_val, torch.float32)
    made = _new_parameters(tuple(min_val.shape), native.integer)
    scale, zero_point, minval = made
    arguments = (
        low.data_ptr(), high.data_ptr(), DTYPES[min_val.dtype], scheme_code(grid, scheme, scale_dtype), native.address,
        scale.data_ptr(), address_of(zero_point), address_of(minval), scale.numel(),
    )  # fmt: skip
    run_parts(choose_part, arguments, threads_for(scale.numel()), (low, high, made))
    return made


def observe_and_fake_quantize(
    x: torch.Tensor,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    scheme: str,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """``reference.observe_and_fake_quantize``; the caller has checked the scheme."""
    flat, order = dense(x)
    layout = layout_of(flat.shape, order, block_size)
    native = native_grid(grid)
    made = _new_parameters(layout.counts, native.integer)
    code = scheme_code(grid, scheme, scale_dtype)

    def forward(mask: torch.Tensor | None) -> torch.Tensor:
        return _observe(flat, mask, layout, native, code, made)

    y = _run(x, forward, layout)
    return y, *made


def _observe(
    x: torch.Tensor, mask: torch.Tensor | None, layout: Layout, grid: NativeGrid, scheme: int, made: Parameters
) -> torch.Tensor:
    y = empty_like(x) if mask is None else result_from(x)
    threads = threads_for(layout.numel)
    if goes_by_rows(layout, threads):
        observe_by_rows(x, y, mask, layout, grid, scheme, made, threads)
    else:
        find_parameters(x, layout, grid, scheme, made)
        _map(FAKE, x, y, mask, _used(made, layout, grid))
    return y


def _used(made: Parameters, layout: Layout, grid: NativeGrid) -> _Prepared:
    """The parameters that the grid's formulation uses."""
    scale, zero_point, minval = made
    return _Prepared(scale, None if grid.minval else zero_point, minval if grid.minval else None, layout, grid)


def observe_running_and_fake_quantize(
    x: torch.Tensor,
    running_min: torch.Tensor,
    running_max: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    scheme: str,
    scale_dtype: torch.dtype | None = None,
    averaging_constant: float | None = None,
    restart: bool = False,
    quantize: bool = True,
) -> torch.Tensor:
    """``reference.observe_running_and_fake_quantize``; the caller has checked the scheme."""
    made = (scale, zero_point, minval)
    flat, order = dense(x)
    layout = layout_of(flat.shape, order, block_size)
    check_running(layout.counts, x.dtype, running_min, running_max)
    native = native_grid(grid)
    if not is_state(x, x.dtype, layout.blocks, native.integer, running_min, running_max, *made):
        return reference.observe_running_and_fake_quantize(
            x, running_min, running_max, *made, block_size=block_size, grid=grid, scheme=scheme,
            scale_dtype=scale_dtype, averaging_constant=averaging_constant, restart=restart, quantize=quantize,
        )  # fmt: skip
    mode = 0 if restart else 2 if averaging_constant is None else 1
    code = scheme_code(grid, scheme, scale_dtype)
    find_parameters(flat, layout, native, code, made, (mode, averaging_constant or 0.0, running_min, running_max))
    # The kernels write behind torch's back; what is cached by version must notice.
    increment_version([t for t in (running_min, running_max, *made) if t is not None])
    if not quantize:
        return x

    def forward(mask: torch.Tensor | None) -> torch.Tensor:
        y = empty_like(flat) if mask is None else result_from(flat)
        _map(FAKE, flat, y, mask, _used(made, layout, native))
        return y

    return _run(x, forward, layout)


def encode(
    y: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
) -> torch.Tensor | None:
    """Return a byte for each element of a fake-quantized tensor, in the order of its memory.

    Args:
        y: what ``fake_quantize`` returned for these parameters; without holes.
        scale: as in ``fake_quantize``.
        zero_point: as in ``fake_quantize``.
        minval: as in ``fake_quantize``.
        block_size: as in ``fake_quantize``.
        grid: as in ``fake_quantize``.

    Returns:
        1-D ``uint8`` tensor from which ``decode`` makes the same bits, or None if there is none (NaN, for one).
    """
    flat, order = dense(y)
    given = _prepare(flat, order, scale, zero_point, minval, block_size, grid)
    codes = lasting_bytes(flat.numel())
    failed = torch.zeros(1, dtype=torch.int32, device=CPU)
    _code(1, flat, codes, failed, given)
    return None if failed.item() else codes


def decode(
    codes: torch.Tensor,
    like: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
) -> torch.Tensor:
    """Return the tensor that ``encode`` took; ``like`` has its shape, strides and dtype, and may have no memory."""
    y = empty_like(like, device=codes.device)
    _, order = dense(y)
    _code(0, y, codes, codes, _prepare(y, order, scale, zero_point, minval, block_size, grid))
    return y


def _code(encode: int, y: torch.Tensor, codes: torch.Tensor, failed: torch.Tensor, given: _Prepared) -> None:
    """Run ``code_part`` over all cores."""
    layout = given.layout
    arguments = (
        encode, y.data_ptr(), DTYPES[y.dtype], codes.data_ptr(), failed.data_ptr(), given.scale.data_ptr(),
        address_of(given.zero_point), address_of(given.minval), layout.address, given.grid.address,
        -(-layout.numel // LANES),
    )  # fmt: skip
    run_parts(code_part, arguments, threads_for(layout.numel), (y, codes, failed, given))
