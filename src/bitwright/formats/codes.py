"""Values to codes and back, for every number format. A code is the bit pattern, two's complement for integers."""

from __future__ import annotations

import torch

from .number_format import NumberFormat, format_of
from .rounding import e8m0_codes, e8m0_values, round_to_fp4

__all__ = ["decode", "encode"]

_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(values: torch.Tensor, fmt: NumberFormat | torch.dtype | str) -> torch.Tensor:
    """Return the code of each value.

    Integers are expected to be whole already and saturate. FP8 and FP4 round to the nearest value, ties to the even
    code, and saturate at the largest finite value (infinities too). ``float8_e8m0fnu`` rounds down to a power of two.

    Args:
        values: tensor of any shape and any real dtype.
        fmt: the format, its dtype or its name.

    Returns:
        Tensor of the same shape: ``int8`` for signed integers, else ``uint8``.

    Raises:
        ValueError: no such format; a NaN where the format has none (integers, FP4); a fraction where it holds integers.
    """
    fmt = format_of(fmt)
    exact = _to_odd_float32(values.detach())
    if fmt.kind == "exponent":
        return e8m0_codes(exact)
    if not (fmt.name.startswith("float8")):
        _check_no_nan(exact, fmt)
    clamped = exact.clamp(fmt.minimum, fmt.maximum)
    if fmt.kind == "int":
        if not torch.equal(clamped.trunc(), clamped):
            raise ValueError(f"Values for {fmt.name!r} must be whole numbers; round them first.")
        return clamped.to(fmt.storage)
    if fmt.bits == 8:
        return clamped.to(fmt.dtype).view(torch.uint8)
    return _encode_fp4(clamped)


def decode(codes: torch.Tensor, fmt: NumberFormat | torch.dtype | str) -> torch.Tensor:
    """Return the value of each code as float32; exact for every code.

    Args:
        codes: tensor of any shape that ``encode`` made, or a tensor of the format's storage dtype.
        fmt: the format, its dtype or its name.

    Raises:
        ValueError: no such format, or codes of a dtype that it does not use.
    """
    fmt = format_of(fmt)
    if codes.dtype == fmt.storage and fmt.kind != "exponent":
        return codes.to(torch.float32)
    if codes.dtype == fmt.storage:
        codes = codes.view(torch.uint8)
    if codes.dtype != torch.uint8 or fmt.kind == "int":
        raise ValueError(f"Codes of {fmt.name!r} have dtype uint8 or {fmt.storage}, got {codes.dtype}.")
    if fmt.kind == "exponent":
        return e8m0_values(codes)
    if fmt.bits == 8:
        return codes.view(fmt.dtype).to(torch.float32)
    table = torch.tensor([*_FP4_MAGNITUDES, *(-m for m in _FP4_MAGNITUDES)], dtype=torch.float32, device=codes.device)
    return table[codes.long() & 15]


def _to_odd_float32(values: torch.Tensor) -> torch.Tensor:
    """Return float32 that a further rounding maps as it would map ``values``: of the two neighbours the odd one.

    Source:
        S. Boldo, G. Melquiond, Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd,
        IEEE Transactions on Computers 57 (4), 2008.
    """
    nearest = values.to(torch.float32)
    if values.dtype != torch.float64:
        return nearest
    beyond = nearest.double().abs() > values.abs()
    toward_zero = torch.where(beyond, nearest.nextafter(torch.zeros_like(nearest)), nearest)
    inexact = toward_zero.double() != values
    return (toward_zero.view(torch.int32) | inexact.to(torch.int32)).view(torch.float32)


def _encode_fp4(clamped: torch.Tensor) -> torch.Tensor:
    rounded = round_to_fp4(clamped)
    magnitudes = torch.tensor(_FP4_MAGNITUDES, dtype=torch.float32, device=clamped.device)
    index = torch.bucketize(rounded.abs(), magnitudes)
    return index.to(torch.uint8) | (torch.signbit(rounded).to(torch.uint8) << 3)


def _check_no_nan(values: torch.Tensor, fmt: NumberFormat) -> None:
    if bool(torch.isnan(values).any()):
        raise ValueError(f"{fmt.name!r} has no code for NaN; remove NaN from the values before encoding.")
