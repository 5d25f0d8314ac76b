"""Rounding of float32 to FP8, FP4 and power-of-two values, as plain torch."""

from __future__ import annotations

import math

import torch

from .number_format import NumberFormat, format_of

__all__ = [
    "e8m0_codes",
    "e8m0_values",
    "power_of_two_scale",
    "power_of_two_scale_by_arithmetic",
    "round_to_format",
    "round_to_fp4",
    "round_to_fp8",
]

_FP4 = format_of(torch.float4_e2m1fn_x2)
_MX_MAX_EXPONENT = {torch.float4_e2m1fn_x2: 2, torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


def round_to_fp4(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest FP4 E2M1 value: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    Ties go to the even code, values beyond ±6 (infinities too) become ±6, NaN stays NaN, the sign of zero is kept.

    Args:
        x: tensor of any shape, floating point.

    Returns:
        float32 tensor of the same shape.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.

    Example:
        >>> round_to_fp4(torch.tensor([0.25, 0.75, 2.5, 5.0, 7.0])).tolist()
        [0.0, 1.0, 2.0, 4.0, 6.0]
    """
    return round_to_format(x.to(torch.float32).clamp(-6.0, 6.0), _FP4)


def round_to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the nearest FP8 value, ties to the even code; the format's largest finite value is the limit.

    Args:
        x: tensor of any shape, floating point.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        float32 tensor of the same shape. NaN stays NaN, the sign of zero is kept.
    """
    fmt = format_of(dtype)
    return x.to(torch.float32).clamp(fmt.minimum, fmt.maximum).to(dtype).to(torch.float32)


def round_to_format(x: torch.Tensor, fmt: NumberFormat) -> torch.Tensor:
    """Round float32 within the format's range to its nearest value, by float32 arithmetic alone.

    Adding and subtracting ``2**23`` steps of the format rounds to a multiple of one step, because float32 keeps no
    more than 24 bits; the step is that of the element's own exponent, or of the smallest one for subnormals.

    Args:
        x: float32 tensor with values in ``[fmt.minimum, fmt.maximum]`` or NaN.
        fmt: a format of kind ``"float"``.
    """
    smallest = (127 + 1 - fmt.bias) << 23
    magnitude = x.abs()
    exponent = (magnitude.view(torch.int32) & 0x7F800000).clamp(min=smallest)
    anchor = (exponent + ((23 - fmt.mantissa_bits) << 23)).view(torch.float32)
    return torch.copysign((magnitude + anchor) - anchor, x)


def e8m0_codes(x: torch.Tensor) -> torch.Tensor:
    """Return the ``float8_e8m0fnu`` codes of ``2 ** floor(log2(x))``.

    Args:
        x: float32 tensor; zero and values below ``2**-127`` become ``2**-127`` (code 0), NaN, infinities and
            negative values become NaN (code 255).

    Returns:
        ``uint8`` tensor of the same shape.
    """
    field = (x.view(torch.int32) >> 23) & 0xFF
    # Code 0 is 2**-127, which float32 holds as a subnormal with the same exponent field 0.
    return torch.where((x < 0) | torch.isnan(x), torch.full_like(field, 255), field).to(torch.uint8)


def e8m0_values(codes: torch.Tensor) -> torch.Tensor:
    """Return ``2 ** (code - 127)`` as float32; code 255 is NaN.

    Args:
        codes: ``uint8`` tensor.
    """
    if torch._C._get_tracing_state() is not None:  # TorchScript has no view of another dtype
        table = [math.ldexp(1.0, code - 127) for code in range(255)]
        return torch.tensor([*table, math.nan], dtype=torch.float32, device=codes.device)[codes.long()]
    field = codes.to(torch.int32)
    bits = torch.where(field == 0, torch.full_like(field, 1 << 22), field << 23)
    return torch.where(field == 255, torch.full_like(field, 0x7FC00000), bits).view(torch.float32)


def power_of_two_scale(max_abs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the power-of-two scale of a block for a float format ("FLOOR" mode).

    ``2 ** (floor(log2(max_abs)) - P)``, at least ``2**-126``, where ``P`` is the largest exponent of the format:
    2 for FP4, 8 for ``float8_e4m3fn``, 15 for ``float8_e5m2``.

    Args:
        max_abs: largest magnitude of each block, not negative, floating point.
        dtype: the format of the elements.

    Returns:
        float32 tensor of the same shape. Zero gives ``2**-126``; infinities and NaN count as ``2**128``.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0, section 6.3.
    """
    x = max_abs.to(torch.float32)
    field = ((x.view(torch.int32) >> 23) & 0xFF) - _MX_MAX_EXPONENT[dtype]
    return (field.clamp(min=1) << 23).view(torch.float32)


def power_of_two_scale_by_arithmetic(max_abs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what :func:`power_of_two_scale` returns, for runtimes that cannot look at a number's bits.

    Halving a number's exponent seven times finds it by comparisons and by products with powers of two, which are exact.

    Args:
        max_abs: largest magnitude of each block, not negative, floating point.
        dtype: the format of the elements.
    """
    x = max_abs.to(torch.float32)
    is_large = x >= 1
    rest = torch.where(is_large, x, x * 2.0**126)
    power = torch.where(is_large, 1.0, 2.0**-126)
    for exponent in (64, 32, 16, 8, 4, 2, 1):
        factor = torch.where(rest >= 2.0**exponent, 2.0**exponent, 1.0)
        rest, power = rest / factor, power * factor
    largest = torch.finfo(torch.float32).max
    lower = 2.0 ** -_MX_MAX_EXPONENT[dtype]
    return torch.where(x <= largest, power * lower, 2.0**128 * lower).clamp(min=2.0**-126)
