"""The numbers of torchao's integer and FP8 fake quantization, differentiable in the tensor and in the parameters.

Unlike ``bitwright.kernels`` the arithmetic runs in the dtype that torch's promotion gives for tensor and scale, and
divides by multiplying with the reciprocal.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from bitwright.kernels.grid import block_view_shape

__all__ = ["Domain", "choose_intx", "decode_intx", "encode_intx", "fake_quantize_float8", "fake_quantize_intx"]

Domain = Literal["INT", "FLOAT", "NONE"]

_FLOAT_DOMAIN_EPS = 1e-6


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _RoundTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _round(x: torch.Tensor) -> torch.Tensor:
    rounded: torch.Tensor = _Round.apply(x)  # type: ignore[no-untyped-call]
    return rounded


def choose_intx(
    low: torch.Tensor,
    high: torch.Tensor,
    *,
    bits: int,
    bounds: tuple[int, int],
    symmetric: bool,
    float_domain: bool,
    eps: float | None,
    scale_precision: torch.dtype,
    zero_point_precision: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of a range.

    * symmetric: ``scale = max(|low|, |high|) / ((2**bits - 1) / 2)``, zero point 0;
    * asymmetric, ``float_domain``: the range is not widened to include zero; ``scale = (high - low) / (2**bits - 1)``,
      ``zero_point = low + scale * 2**(bits - 1)``;
    * asymmetric otherwise: the range includes zero; ``scale = (high - low) / (max - min)``,
      ``zero_point = clamp(min - round(low / scale))`` with ``min, max = bounds``.

    Args:
        low: smallest value of each block; its dtype is the one computed in.
        high: largest value of each block.
        bits: bits of a code.
        bounds: smallest and largest code.
        symmetric: which of the formulas.
        float_domain: which of the asymmetric formulas.
        eps: smallest scale; None for 1e-6 in the float domain and the dtype's smallest normal number elsewhere.
        scale_precision: dtype of the scale.
        zero_point_precision: dtype of the zero point; casting to an integer cuts off the fraction.
    """
    tiny = torch.finfo(low.dtype).smallest_normal
    if symmetric:
        max_abs = torch.maximum(-low.clamp(max=0), high.clamp(min=0))
        scale = torch.clamp(max_abs / (float(2**bits - 1) / 2), min=tiny if eps is None else eps)
        return scale.to(scale_precision), torch.zeros_like(scale).to(zero_point_precision)
    if float_domain:
        scale = torch.clamp((high - low) / float(2**bits - 1), min=_FLOAT_DOMAIN_EPS if eps is None else eps)
        origin = (low + scale * float(2 ** (bits - 1))).to(scale_precision)
        return scale.to(scale_precision), origin.to(zero_point_precision)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = torch.clamp((high - low) / float(bounds[1] - bounds[0]), min=tiny if eps is None else eps)
    zero_point = torch.clamp(bounds[0] - torch.round(low / scale), *bounds)
    return scale.to(scale_precision), zero_point.to(zero_point_precision)


def encode_intx(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    block_size: tuple[int, ...],
    bounds: tuple[int, int],
    domain: Domain,
) -> torch.Tensor:
    """Return the codes in floating point.

    ``INT``: ``clamp(round(x * (1 / scale)) + zero_point)``; ``NONE``: the same without a zero point; ``FLOAT``:
    ``clamp(round((x - zero_point + scale * middle) / scale))`` with ``middle = (max + min + 1) / 2``.
    """
    view, _, wide, _ = block_view_shape(tuple(x.shape), block_size)
    values, step = x.reshape(view), scale.reshape(wide)
    if domain == "FLOAT":
        assert zero_point is not None
        origin = zero_point.reshape(wide) - step * _middle(bounds)
        codes = _round((values - origin) / step)
    else:
        codes = _round(values * (1.0 / step))
        if domain == "INT" and zero_point is not None:
            codes = codes + zero_point.reshape(wide)
    return torch.clamp(codes, *bounds).reshape(x.shape)


def decode_intx(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    block_size: tuple[int, ...],
    bounds: tuple[int, int],
    domain: Domain,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the values of codes: ``(codes - zero_point) * scale``, ``(codes - middle) * scale + zero_point``, or
    ``codes * scale``, by domain as in :func:`encode_intx`."""
    view, _, wide, _ = block_view_shape(tuple(codes.shape), block_size)
    values, step = codes.reshape(view), scale.reshape(wide)
    if domain == "FLOAT":
        assert zero_point is not None
        # In place, so that gradients of scale and zero point are rounded to the output's dtype, as in torchao.
        values = (values - _middle(bounds)).to(output_dtype)
        values *= step
        values += zero_point.reshape(wide)
    else:
        values = values.to(output_dtype)
        if domain == "INT" and zero_point is not None:
            values = values - zero_point.reshape(wide).to(output_dtype)
        values = values * step
    return values.reshape(codes.shape).to(output_dtype)


def fake_quantize_intx(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    block_size: tuple[int, ...],
    bounds: tuple[int, int],
    domain: Domain,
) -> torch.Tensor:
    """Encode and decode; rounding passes gradients straight through, also to scale and zero point."""
    codes = encode_intx(x, scale, zero_point, block_size, bounds, domain)
    return decode_intx(codes, scale, zero_point, block_size, bounds, domain, x.dtype)


def fake_quantize_float8(
    x: torch.Tensor, block_size: tuple[int, ...], dtype: torch.dtype, low: float | None, high: float | None
) -> torch.Tensor:
    """Fake-quantize to FP8 with ``scale = clamp(max_abs, low, high) / largest`` of each block, in float32.

    Bounds and scale are rounded to the dtype of ``x``. A block whose scale is zero comes out as zeros; torchao makes
    its zeros NaN. The gradient passes straight through each rounding and flows through the scale, in float32.
    """
    view, inner, wide, _ = block_view_shape(tuple(x.shape), block_size)
    blocks = x.reshape(view).to(torch.float32)
    max_abs = blocks.abs().amax(inner, keepdim=True) if inner else blocks.abs()
    if low is not None or high is not None:
        max_abs = _round_to(torch.clamp(max_abs, min=low, max=high), x.dtype)
    largest = torch.finfo(dtype).max
    scale = _round_to((max_abs / largest).reshape(wide), x.dtype)
    scaled = blocks / torch.where(scale == 0, 1.0, scale)
    values = _round_to(torch.clamp(scaled, -largest, largest), dtype)
    return (values * scale).reshape(x.shape).to(x.dtype)


def _round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded: torch.Tensor = _RoundTo.apply(x, dtype)  # type: ignore[no-untyped-call]
    return rounded


def _middle(bounds: tuple[int, int]) -> float:
    return (bounds[0] + bounds[1] + 1) / 2
