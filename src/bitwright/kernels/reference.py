"""The meaning of every kernel, as plain torch: the numbers that the fused forms must give bit for bit.

All arithmetic is float32, whatever the tensor's dtype, except that scales, zero points and minvals are computed in the
dtype of the range they come from. Every function runs on every device, on fake and on meta tensors, and is what
``torch.compile`` traces. ``quantize`` and ``dequantize`` are differentiable wherever torch is, so that a scale may be
learned: pass a rounding function with a straight-through gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from bitwright.formats import format_of, power_of_two_scale
from bitwright.formats.rounding import round_to_format

from .grid import Grid, block_view_shape

__all__ = [
    "check_fit",
    "check_running",
    "choose_qparams",
    "dequantize",
    "fake_quantize",
    "inside_range",
    "is_state",
    "min_max",
    "moving_average",
    "quantize",
]

_EPS = torch.finfo(torch.float32).eps
_INT32_MIN = -2147483648.0


def check_fit(
    counts: tuple[int, ...],
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    needs_minval: bool,
) -> bool:
    """Return whether the parameters are single numbers for all blocks; None fits everything.

    Raises:
        ValueError: a parameter has neither one entry nor one per block, not all have the same number of entries, or
            the minval is missing.
    """
    if needs_minval and minval is None:
        raise ValueError("The 'minval' formulation needs minval, got None.")
    entries = scale.numel()
    if entries != 1 and entries != math.prod(counts):
        raise ValueError(f"A scale of shape {tuple(scale.shape)} does not fit blocks of shape {counts}.")
    for name, other in (("zero_point", zero_point), ("minval", minval)):
        if other is not None and other.numel() != entries:
            raise ValueError(
                f"A {name} of shape {tuple(other.shape)} does not fit a scale of shape {tuple(scale.shape)}; "
                "give one entry for each scale."
            )
    return entries == 1


def _offsets(
    grid: Grid, zero_point: torch.Tensor | None, minval: torch.Tensor | None, shape: tuple[int, ...]
) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """Code offset and float offset of the two integer formulations."""
    if grid.formulation == "minval" and minval is not None:
        return float(grid.quant_min), minval.to(torch.float32).reshape(shape)
    return (0.0 if zero_point is None else zero_point.to(torch.float32).reshape(shape)), 0.0


def _wide_shape(
    wide: tuple[int, ...],
    counts: tuple[int, ...],
    grid: Grid,
    made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
) -> tuple[int, ...]:
    """Shape in which the parameters broadcast; one number fits every tensor."""
    needs_minval = grid.is_integer and grid.formulation == "minval"
    return (1,) * len(wide) if check_fit(counts, *made, needs_minval) else wide


def _unclamped(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    block_size: tuple[int, ...],
    grid: Grid,
    rounding: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    view, _, wide, counts = block_view_shape(tuple(x.shape), block_size)
    wide = _wide_shape(wide, counts, grid, (scale, zero_point, minval))
    values = _viewed(x.to(torch.float32), view)
    step = scale.to(torch.float32).reshape(wide)
    if not grid.is_integer:
        return _viewed(values / step, tuple(x.shape))
    offset, origin = _offsets(grid, zero_point, minval, wide)
    return _viewed(rounding((values - origin) / step) + offset, tuple(x.shape))


def _viewed(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Split the dimensions of ``x`` into blocks or join them again; equal ranks mean that none is split."""
    return x if len(shape) == x.ndim else x.reshape(shape)


def _clamped(pre: torch.Tensor, grid: Grid) -> torch.Tensor:
    codes = torch.clamp(pre, grid.quant_min, grid.quant_max)
    if grid.is_integer:
        return codes
    rounded = round_to_format(codes, format_of(grid.dtype))
    if codes.requires_grad and torch.is_grad_enabled() and not is_compiling():
        # The gradient of the identity, as a cast to the format has it; x - (+0) is x to the last bit.
        rounded = rounded.detach() - (codes.detach() - codes)
    return rounded


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    rounding: Callable[[torch.Tensor], torch.Tensor] = torch.round,
) -> torch.Tensor:
    """Return the quantized values as float32: codes of integers, representable values of float formats.

    Integers: ``clamp(round((x - f) / scale) + o)`` with ``o, f = zero_point, 0`` or ``quant_min, minval``; halves go to
    the even number. Float formats: ``x / scale``, clamped, rounded to the nearest value.

    Args:
        x: tensor of any shape, floating point.
        scale: one entry per block, or a single one.
        zero_point: like ``scale``, or None for 0; used by the ``"zp"`` formulation.
        minval: like ``scale``; used by the ``"minval"`` formulation.
        block_size: shape of one block; divides the shape of ``x``.
        grid: the codes.
        rounding: rounds integers; replace it to give it a gradient.

    Returns:
        float32 tensor of the shape of ``x``. NaN stays NaN.

    Raises:
        ValueError: blocks do not divide, or a scale does not fit, or a needed minval is missing.
    """
    return _clamped(_unclamped(x, scale, zero_point, minval, block_size, grid, rounding), grid)


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
    """Return the values that codes stand for: ``(codes - o) * scale + f``, or ``codes * scale`` for float formats.

    Args:
        codes: what ``quantize`` returned, in any dtype that holds it.
        scale: as in ``quantize``.
        zero_point: as in ``quantize``.
        minval: as in ``quantize``.
        block_size: as in ``quantize``.
        grid: as in ``quantize``.
        output_dtype: dtype of the result; the arithmetic is float32.

    Raises:
        ValueError: as ``quantize``.
    """
    view, _, wide, counts = block_view_shape(tuple(codes.shape), block_size)
    wide = _wide_shape(wide, counts, grid, (scale, zero_point, minval))
    values = _viewed(codes.to(torch.float32), view)
    step = scale.to(torch.float32).reshape(wide)
    if grid.is_integer:
        offset, origin = _offsets(grid, zero_point, minval, wide)
        values = (values - offset) * step + origin
    else:
        values = values * step
    values = _viewed(values, tuple(codes.shape))
    # Under torch.compile of torch 2.11 the result of a custom function has no gradient if a cast of it changed nothing.
    return values if values.dtype == output_dtype else values.to(output_dtype)


def inside_range(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
) -> torch.Tensor:
    """Return which elements lie inside the grid's range, bounds included: where the gradient passes.

    Integers are compared after rounding and adding the offset, float formats before rounding. NaN is outside.

    Returns:
        bool tensor of the shape of ``x``.
    """
    pre = _unclamped(x, scale, zero_point, minval, block_size, grid, torch.round)
    return (pre >= grid.quant_min) & (pre <= grid.quant_max)


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
) -> torch.Tensor:
    """Quantize and dequantize; the gradient passes straight through where ``inside_range``.

    Args:
        x: tensor of any shape, floating point.
        scale: as in ``quantize``; gets no gradient.
        zero_point: as in ``quantize``.
        minval: as in ``quantize``.
        block_size: as in ``quantize``.
        grid: as in ``quantize``.

    Returns:
        Tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: as ``quantize``.
    """
    forward_mode = forward_ad._current_level >= 0
    if forward_mode or (torch.is_grad_enabled() and x.requires_grad):
        function = _StraightForward if forward_mode else _StraightThrough
        y: torch.Tensor
        y, _ = function.apply(  # type: ignore[no-untyped-call]
            x, scale, zero_point, minval, block_size, grid
        )
        return y
    return _forward(x, scale, zero_point, minval, block_size, grid)[0]


def _forward(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    block_size: tuple[int, ...],
    grid: Grid,
) -> tuple[torch.Tensor, torch.Tensor]:
    pre = _unclamped(x, scale, zero_point, minval, block_size, grid, torch.round)
    codes = _clamped(pre, grid)
    y = dequantize(codes, scale, zero_point, minval, block_size=block_size, grid=grid, output_dtype=x.dtype)
    if len(block_view_shape(tuple(x.shape), block_size)[0]) != x.ndim:
        y = y.clone()  # autograd lets nobody change a view that a custom function returns
    return y, pre


class _StraightThrough(torch.autograd.Function):
    """``fake_quantize`` with the gradient of the identity inside the range and zero outside, and the mask for it.

    Forward and context are apart, which function transforms (``torch.func``) ask for.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
        block_size: tuple[int, ...],
        grid: Grid,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, pre = _forward(x, scale, zero_point, minval, block_size, grid)
        return y, (pre >= grid.quant_min) & (pre <= grid.quant_max)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return grad * mask, None, None, None, None, None


class _StraightForward(_StraightThrough):
    """The same in forward mode, for tangents; apart, because ``torch.compile`` refuses functions that have ``jvp``."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        _StraightThrough.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output[1])

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, None]:
        (mask,) = ctx.saved_tensors
        return None if tangent is None else tangent * mask, None


def min_max(x: torch.Tensor, block_size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest element of every block; a NaN makes both NaN.

    Args:
        x: tensor of any shape.
        block_size: shape of one block; divides the shape of ``x``.

    Returns:
        Two tensors of the dtype of ``x`` and of shape ``x.shape // block_size``. A block without elements gives 0.

    Raises:
        ValueError: blocks do not divide.
    """
    view, inner, _, counts = block_view_shape(tuple(x.shape), block_size)
    x = x.detach()
    if x.numel() == 0:
        return x.new_zeros(counts), x.new_zeros(counts)
    blocks = x.reshape(view)
    if not inner:
        return blocks.reshape(counts).clone(), blocks.reshape(counts).clone()
    return blocks.amin(inner).reshape(counts), blocks.amax(inner).reshape(counts)


def choose_qparams(
    min_val: torch.Tensor,
    max_val: torch.Tensor,
    *,
    grid: Grid,
    scheme: str,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return scale, zero point and minval for a range, which is first widened to include zero.

    Computed in the dtype of ``min_val``, but for the number of steps, which half precision may not hold:

    * symmetric (clipping or not): ``scale = max(|min|, |max|) / ((quant_max - quant_min) / 2)``, the zero point is the
      middle code, ``minval = -max(|min|, |max|)``;
    * asymmetric: ``scale = (max - min) / (quant_max - quant_min)``, ``zero_point = quant_min - round(min / scale)``
      clamped to the codes, ``minval = min``;
    * ``scale_dtype=torch.float8_e8m0fnu``: ``bitwright.formats.power_of_two_scale``.

    The scale is at least the float32 machine epsilon (power of two: ``2**-126``).

    Args:
        min_val: smallest value of each block.
        max_val: largest value of each block, same shape and dtype.
        grid: the codes.
        scheme: ``"symmetric"``, ``"asymmetric"`` or ``"symmetric_with_clipping"``; float formats take the first.
        scale_dtype: None, or ``torch.float8_e8m0fnu`` for float formats.

    Returns:
        float32 scale, int32 zero point, float32 minval, in the shape of ``min_val``; the last two are None for float
        formats. A NaN zero point becomes the smallest int32.

    Raises:
        ValueError: unknown scheme, or one that the format does not take.
    """
    check_scheme(grid, scheme, scale_dtype)
    low = torch.minimum(min_val, torch.zeros_like(min_val))
    high = torch.maximum(max_val, torch.zeros_like(max_val))
    if scheme == "asymmetric":
        scale = torch.clamp(_divided(high - low, grid.quant_max - grid.quant_min), min=_EPS)
        zero_point = (grid.quant_min - torch.round(low / scale)).to(torch.float32)
        zero_point = torch.clamp(zero_point, grid.quant_min, grid.quant_max)
        whole = torch.nan_to_num(zero_point, nan=_INT32_MIN).to(torch.int32)
        return scale.to(torch.float32), whole, low.to(torch.float32)
    max_abs = torch.maximum(-low, high)
    if scale_dtype is not None:
        return power_of_two_scale(max_abs, grid.dtype), None, None
    scale = torch.clamp(_divided(max_abs, (grid.quant_max - grid.quant_min) / 2), min=_EPS).to(torch.float32)
    if not grid.is_integer:
        return scale, None, None
    middle = torch.full_like(scale, int((grid.quant_max + grid.quant_min + 1) / 2), dtype=torch.int32)
    return scale, middle, (-max_abs).to(torch.float32)


def _divided(x: torch.Tensor, number: float) -> torch.Tensor:
    """Divide by a number that the dtype need not hold, with one rounding to the dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # The divisor is a tensor because CUDA multiplies by the reciprocal of a number, which rounds differently.
    return (wide / torch.full_like(wide, float(number))).to(x.dtype)


def check_scheme(grid: Grid, scheme: str, scale_dtype: torch.dtype | None) -> None:
    """Raise ``ValueError`` when a scheme or a scale dtype does not go with a grid."""
    if scheme not in ("symmetric", "asymmetric", "symmetric_with_clipping"):
        raise ValueError(f"scheme must be 'symmetric', 'asymmetric' or 'symmetric_with_clipping', got {scheme!r}.")
    if scale_dtype not in (None, torch.float8_e8m0fnu):
        raise ValueError(f"scale_dtype must be None or torch.float8_e8m0fnu, got {scale_dtype}.")
    if grid.is_integer and scale_dtype is not None:
        raise ValueError(f"scale_dtype is for FP8 and FP4, got {scale_dtype} with {grid.dtype}.")
    if not grid.is_integer and scheme == "asymmetric":
        raise ValueError(f"{grid.dtype} has no zero point; use the scheme 'symmetric'.")


def observe_and_fake_quantize(
    x: torch.Tensor,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    scheme: str,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Find every block's range, choose its parameters, and fake-quantize with them.

    Args:
        x: tensor of any shape, floating point.
        block_size: shape of one block; divides the shape of ``x``.
        grid: the codes.
        scheme: as in ``choose_qparams``.
        scale_dtype: as in ``choose_qparams``.

    Returns:
        The fake-quantized tensor (with the straight-through gradient), scale, zero point and minval.

    Raises:
        ValueError: as ``min_max`` and ``choose_qparams``.
    """
    low, high = min_max(x, block_size)
    scale, zero_point, minval = choose_qparams(low, high, grid=grid, scheme=scheme, scale_dtype=scale_dtype)
    y = fake_quantize(x, scale, zero_point, minval, block_size=block_size, grid=grid)
    return y, scale, zero_point, minval


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
    """Widen a running range by a tensor, choose the parameters from it, and fake-quantize with them.

    The running range and the parameters are changed in place. The tensor's range is widened to include zero first.

    Args:
        x: tensor of any shape, floating point.
        running_min: smallest element of each block so far, in the dtype of ``x``.
        running_max: largest element of each block so far, likewise.
        scale: where the float32 scales go.
        zero_point: where the int32 zero points go; None for float formats.
        minval: where the float32 minvals go; None for float formats.
        block_size: shape of one block; divides the shape of ``x``.
        grid: the codes.
        scheme: as in ``choose_qparams``.
        scale_dtype: as in ``choose_qparams``.
        averaging_constant: weight ``c`` of this tensor in ``running = c * new + (1 - c) * running``, see
            ``moving_average``; None keeps the extremes of all tensors.
        restart: forget the running range and take this tensor's.
        quantize: False observes only.

    Returns:
        The fake-quantized tensor with its straight-through gradient, or ``x`` itself.

    Raises:
        ValueError: as ``min_max`` and ``choose_qparams``, or a running range of another shape or dtype, or a parameter
            that has not one entry per block.
    """
    low, high = min_max(x, block_size)
    check_running(low.shape, x.dtype, running_min, running_max)
    low = torch.minimum(low, torch.zeros_like(low))
    high = torch.maximum(high, torch.zeros_like(high))
    if not restart and averaging_constant is None:
        low, high = torch.minimum(running_min, low), torch.maximum(running_max, high)
    elif not restart and averaging_constant is not None:
        low, high = moving_average(low, high, running_min, running_max, averaging_constant)
    made = choose_qparams(low, high, grid=grid, scheme=scheme, scale_dtype=scale_dtype)
    pairs = zip((running_min, running_max, scale, zero_point, minval), (low, high, *made), strict=True)
    written = [(kept, new) for kept, new in pairs if kept is not None and new is not None]
    for kept, new in written:
        if kept.numel() != new.numel():
            raise ValueError(
                f"A parameter of shape {tuple(kept.shape)} cannot hold what is chosen for blocks of shape "
                f"{tuple(new.shape)}; give it one entry per block."
            )
    with torch.no_grad():
        for kept, new in written:
            kept.copy_(new.reshape(kept.shape))
    if not quantize:
        return x
    return fake_quantize(x, scale, zero_point, minval, block_size=block_size, grid=grid)


def moving_average(
    low: torch.Tensor, high: torch.Tensor, running_min: torch.Tensor, running_max: torch.Tensor, constant: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``constant * new + (1 - constant) * running`` of both ends of a range.

    A block that was zero throughout so far has no range to be averaged with, and takes the new one: an average that
    grew out of zero would clip nearly all values, and with them their gradients, for hundreds of steps.
    """
    blank = (running_min == 0) & (running_max == 0)
    below, above = constant * low + (1 - constant) * running_min, constant * high + (1 - constant) * running_max
    return torch.where(blank, low, below), torch.where(blank, high, above)


def check_running(
    counts: tuple[int, ...], dtype: torch.dtype, running_min: torch.Tensor, running_max: torch.Tensor
) -> None:
    """Raise ``ValueError`` when a running range has not one entry of the dtype, or float32, per block."""
    for name, running in (("running_min", running_min), ("running_max", running_max)):
        if running.shape != counts or running.dtype not in (dtype, torch.float32):
            raise ValueError(
                f"{name} has shape {tuple(running.shape)} and dtype {running.dtype}, but the tensor's blocks need "
                f"shape {tuple(counts)} and dtype {dtype}. Reset the observer before it sees tensors of another shape "
                "or dtype."
            )


def is_state(x: torch.Tensor, running: torch.dtype, blocks: int, integer: bool, *state: torch.Tensor | None) -> bool:
    """Return whether a kernel may write the state of an observer of ``x`` directly, taking its memory for granted.

    Args:
        x: the observed tensor.
        running: dtype that the running range must have.
        blocks: number of blocks.
        integer: whether the codes are integers, which have a zero point and a minval.
        *state: running minimum, running maximum, scale, zero point, minval.
    """
    wanted = (running, running, torch.float32, torch.int32, torch.float32)
    return all(
        not integer
        if tensor is None
        else tensor.dtype == dtype and tensor.numel() == blocks and tensor.device == x.device and tensor.is_contiguous()
        for tensor, dtype in zip(state, wanted, strict=True)
    )
