"""The CUDA kernels with the signatures and the numbers of ``kernels.reference``.

What a kernel does not cover (more than four interleaved runs of blocks, one block per element in a range) goes to the
reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.graph import increment_version

from bitwright.kernels import reference
from bitwright.kernels.grid import Grid
from bitwright.kernels.layout import Layout, dense, fitted_layout, layout_of
from bitwright.kernels.saved import Substitute, are_unchanged, copies_of, mark, marking, versions_of
from bitwright.kernels.straight_through import straight_through

from .launches import (
    choose_launch,
    divided,
    fits_one_pass,
    is_covered,
    map_launch,
    mask_launch,
    numbers_of,
    parts_of,
    range_launch,
    rows_launch,
)

__all__ = [
    "FAKE",
    "WrittenBytes",
    "apply_mask",
    "choose_qparams",
    "dequantize",
    "fake_quantize",
    "find_keys",
    "has_bytes",
    "min_max",
    "needed",
    "observe_and_fake_quantize",
    "observe_running_and_fake_quantize",
    "quantize",
    "scheme_code",
]

Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

FAKE, _CODES, _VALUES = 0, 1, 2
_LARGEST_EXPONENT = {torch.float4_e2m1fn_x2: 2, torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


def _or(wanted: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    """A pointer for a place that the kernel does not touch."""
    return instead if wanted is None else wanted


def _plain(parameter: torch.Tensor, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    if parameter.device == x.device and parameter.dtype == dtype and parameter.is_contiguous():
        return parameter.detach() if parameter.requires_grad else parameter
    if parameter.device != x.device and parameter.numel() > 1:
        raise ValueError(f"The parameters are on {parameter.device}, but the tensor is on {x.device}; move them there.")
    return parameter.detach().to(x.device, dtype).contiguous()


def needed(made: Parameters, grid: Grid) -> Parameters:
    """The parameters without those that the grid's formulation does not look at."""
    scale, zero_point, minval = made
    numbers = numbers_of(grid)
    return scale, None if numbers.minval or not numbers.integer else zero_point, minval if numbers.minval else None


def _map(
    op: int,
    x: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor | None,
    made: Parameters,
    layout: Layout,
    grid: Grid,
    data: torch.Tensor | None = None,
) -> None:
    """Launch ``map_kernel``."""
    scale, points, origins = needed(made, grid)
    launch = map_launch(
        op, x.dtype, y.dtype, layout, grid, points is not None, origins is not None, mask is not None, data is not None
    )
    launch(x, y, _or(mask, y), _or(data, y), scale, _or(points, scale), _or(origins, scale))


def new_mask(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(divided(x.numel(), 32), dtype=torch.int32, device=x.device)


def apply_mask(gradient: torch.Tensor, mask: torch.Tensor, in_place: bool) -> torch.Tensor:
    out = gradient if in_place else torch.empty_like(gradient)
    mask_launch(gradient.numel(), gradient.dtype)(gradient, mask, out)
    return out


class WrittenBytes(Substitute):
    """A fake-quantized tensor as the bytes that are written with it.

    Args:
        x: what is quantized.
        mask: a bit for each element.
        made: scale, zero point and minval, of the version that they have when the tensor is there.
        layout: that of the tensor.
        grid: the codes.
    """

    __slots__ = ("_dtype", "_failed", "_grid", "_is_kept", "_layout", "_made", "_mask", "_versions", "data")

    def __init__(self, x: torch.Tensor, mask: torch.Tensor, made: Parameters, layout: Layout, grid: Grid) -> None:
        super().__init__()
        self.data = torch.empty(layout.numel, dtype=torch.uint8, device=x.device)
        self._mask, self._made, self._versions = mask, made, versions_of(made)
        self._dtype, self._layout, self._grid = x.dtype, layout, grid
        self._is_kept = self._failed = False

    def stands_for(self, y: torch.Tensor) -> bool:
        """Keep the parameters as they are now; False if they are not those that the tensor was made with."""
        if not (self._is_kept or self._failed):
            self._failed = not are_unchanged(self._made, self._versions)
            self._is_kept = not self._failed
            if self._is_kept:
                self._made = copies_of(needed(self._made, self._grid))
        return self._is_kept

    def make(self) -> torch.Tensor:
        """Decode."""
        y = torch.empty(self._layout.numel, dtype=self._dtype, device=self.data.device)
        _map(_VALUES, y, y, self._mask, self._made, self._layout, self._grid, self.data)
        return y


def has_bytes(grid: Grid) -> bool:
    """Whether a byte and its bit of the mask tell every code of a grid and NaN apart."""
    return grid.dtype in _LARGEST_EXPONENT or 2 <= grid.quant_max - grid.quant_min < 256


def _run(
    x: torch.Tensor,
    forward: Callable[[torch.Tensor | None, torch.Tensor | None], torch.Tensor],
    made: Parameters,
    layout: Layout,
    grid: Grid,
) -> torch.Tensor:
    """Call ``forward`` with a mask for the gradient if one is wanted, and with memory for bytes if those may be kept.

    Args:
        x: the tensor.
        forward: takes the mask and a byte for each element.
        made: the parameters, of the version that they have when ``forward`` has run.
        layout: that of the tensor.
        grid: the codes.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return forward(None, None)
    mask = new_mask(x)
    if not (marking(x) and has_bytes(grid)):
        return straight_through(x, lambda mask: forward(mask, None), mask, apply_mask)
    kept = WrittenBytes(x, mask, made, layout, grid)
    y = straight_through(x, lambda mask: forward(mask, kept.data), mask, apply_mask)
    kept.version = y._version
    mark(y, kept)
    return y


def _prepare(
    x: torch.Tensor,
    order: tuple[int, ...] | None,
    made: Parameters,
    block_size: tuple[int, ...],
    grid: Grid,
) -> tuple[Layout, Parameters]:
    scale, zero_point, minval = made
    layout = fitted_layout(x.shape, order, block_size, made, numbers_of(grid).minval)
    point = None if zero_point is None else _plain(zero_point, torch.int32, x)
    origin = None if minval is None else _plain(minval, torch.float32, x)
    return layout, (_plain(scale, torch.float32, x), point, origin)


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
    layout, made = _prepare(flat, order, (scale, zero_point, minval), block_size, grid)
    if not is_covered(layout):
        return reference.fake_quantize(x, scale, zero_point, minval, block_size=block_size, grid=grid)

    def forward(mask: torch.Tensor | None, data: torch.Tensor | None) -> torch.Tensor:
        y = torch.empty_like(flat)
        _map(FAKE, flat, y, mask, made, layout, grid, data)
        return y

    return _run(x, forward, made, layout, grid)


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
    layout, made = _prepare(flat, order, (scale, zero_point, minval), block_size, grid)
    if not is_covered(layout):
        return reference.quantize(x, scale, zero_point, minval, block_size=block_size, grid=grid)
    codes = torch.empty_like(flat, dtype=torch.float32)
    _map(_CODES, flat, codes, None, made, layout, grid)
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
    layout, made = _prepare(flat, order, (scale, zero_point, minval), block_size, grid)
    if not is_covered(layout):
        return reference.dequantize(
            codes, scale, zero_point, minval, block_size=block_size, grid=grid, output_dtype=output_dtype
        )
    values = torch.empty_like(flat, dtype=output_dtype)
    _map(_VALUES, flat, values, None, made, layout, grid)
    return values


def find_keys(x: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Order keys of the extremes of every block; for a single block, those of its parts."""
    if layout.blocks == 1:
        lows, highs = torch.empty((2, parts_of(layout)), dtype=torch.int32, device=x.device)
    else:
        lows = torch.full((layout.blocks,), (1 << 31) - 1, dtype=torch.int32, device=x.device)
        highs = torch.full((layout.blocks,), -(1 << 31), dtype=torch.int32, device=x.device)
    range_launch(layout, x.dtype)(x, lows, highs)
    return lows, highs


def _values(lows: torch.Tensor, highs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranges that keys stand for, as float32."""
    infinity = 0x7F800000
    nan = (highs > infinity) | (lows < ~infinity)
    low, high = ((k ^ ((k >> 31) & 0x7FFFFFFF)).view(torch.float32) for k in (lows, highs))
    return low.masked_fill(nan, torch.nan), high.masked_fill(nan, torch.nan)


def min_max(x: torch.Tensor, block_size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.min_max``."""
    flat, order = dense(x.detach())
    layout = layout_of(flat.shape, order, block_size)
    if layout.per_element or not is_covered(layout):
        return reference.min_max(x, block_size)
    lows, highs = find_keys(flat, layout)
    if layout.blocks == 1:
        lows, highs = lows.amin(0, keepdim=True), highs.amax(0, keepdim=True)
    low, high = _values(lows, highs)
    return low.view(layout.counts).to(x.dtype), high.view(layout.counts).to(x.dtype)


def _new_parameters(counts: tuple[int, ...], grid: Grid, device: torch.device) -> Parameters:
    scale = torch.empty(counts, dtype=torch.float32, device=device)
    if not numbers_of(grid).integer:
        return scale, None, None
    return scale, torch.empty_like(scale, dtype=torch.int32), torch.empty_like(scale)


def scheme_code(grid: Grid, scheme: str, scale_dtype: torch.dtype | None) -> int:
    if scale_dtype is not None:
        return 2 + _LARGEST_EXPONENT[grid.dtype]
    return 1 if scheme == "asymmetric" else 0


def _choose(
    lows: torch.Tensor,
    highs: torch.Tensor,
    made: Parameters,
    grid: Grid,
    scheme: int,
    dtype: torch.dtype,
    running: tuple[int, float, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Launch ``choose_kernel`` on order keys (int32) or ranges (float32)."""
    scale, zero_point, minval = made
    mode, constant, *tracked = running if running is not None else (None, 0.0, scale, scale)
    blocks, keys = scale.numel(), lows.dtype == torch.int32
    parts = lows.numel() if keys and blocks == 1 else 0
    kept = dtype if running is None else running[2].dtype
    launch = choose_launch(blocks, keys, parts, grid, scheme, dtype, kept, mode, constant)
    launch(lows, highs, *tracked, scale, _or(zero_point, scale), _or(minval, scale))


def choose_qparams(
    min_val: torch.Tensor,
    max_val: torch.Tensor,
    *,
    grid: Grid,
    scheme: str,
    scale_dtype: torch.dtype | None = None,
) -> Parameters:
    """``reference.choose_qparams``; the caller has checked the scheme."""
    low, high = (t.detach().to(torch.float32).contiguous() for t in (min_val, max_val))
    made = _new_parameters(tuple(min_val.shape), grid, min_val.device)
    _choose(low, high, made, grid, scheme_code(grid, scheme, scale_dtype), min_val.dtype)
    return made


def _observe_rows(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    data: torch.Tensor | None,
    made: Parameters,
    layout: Layout,
    grid: Grid,
    scheme: int,
    running: tuple[int, float, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Launch ``observe_rows_kernel``."""
    scale, zero_point, minval = made
    y = torch.empty_like(x)
    mode, constant, *tracked = running if running is not None else (None, 0.0, scale, scale)
    kept = x.dtype if running is None else running[2].dtype
    launch = rows_launch(layout, grid, scheme, x.dtype, kept, mask is not None, data is not None, mode, constant)
    launch(x, y, _or(mask, y), _or(data, y), scale, _or(zero_point, scale), _or(minval, scale), *tracked)
    return y


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
    code = scheme_code(grid, scheme, scale_dtype)
    if not fits_one_pass(layout):
        low, high = min_max(x, block_size)
        made = choose_qparams(low, high, grid=grid, scheme=scheme, scale_dtype=scale_dtype)
        return fake_quantize(x, *made, block_size=block_size, grid=grid), *made
    made = _new_parameters(layout.counts, grid, x.device)

    def forward(mask: torch.Tensor | None, data: torch.Tensor | None) -> torch.Tensor:
        return _observe_rows(flat, mask, data, made, layout, grid, code)

    return _run(x, forward, made, layout, grid), *made


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
    flat, order = dense(x.detach())
    layout = layout_of(flat.shape, order, block_size)
    reference.check_running(layout.counts, x.dtype, running_min, running_max)
    state = (running_min, running_max, scale, zero_point, minval)
    mixed = running_min.dtype != x.dtype
    if (mixed and restart) or not reference.is_state(x, running_min.dtype, layout.blocks, grid.is_integer, *state):
        return reference.observe_running_and_fake_quantize(
            x, running_min, running_max, scale, zero_point, minval, block_size=block_size, grid=grid, scheme=scheme,
            scale_dtype=scale_dtype, averaging_constant=averaging_constant, restart=restart, quantize=quantize,
        )  # fmt: skip
    mode = 0 if restart else 2 if averaging_constant is None else 1
    made = (scale, zero_point, minval)
    running = (mode, averaging_constant or 0.0, running_min, running_max)
    code = scheme_code(grid, scheme, scale_dtype)
    # The kernels write behind torch's back; what is cached by version must notice.
    written = [t for t in (running_min, running_max, *made) if t is not None]
    if quantize and fits_one_pass(layout):
        increment_version(written)

        def forward(mask: torch.Tensor | None, data: torch.Tensor | None) -> torch.Tensor:
            return _observe_rows(flat, mask, data, made, layout, grid, code, running)

        return _run(x, forward, made, layout, grid)
    if layout.per_element or not is_covered(layout):
        lows, highs = (t.to(torch.float32).contiguous() for t in reference.min_max(x, block_size))
    else:
        lows, highs = find_keys(flat, layout)
    _choose(lows, highs, made, grid, code, x.dtype, running)
    increment_version(written)
    if not quantize:
        return x
    return fake_quantize(x, *made, block_size=block_size, grid=grid)
