"""Number formats as data: what a tensor's codes look like, which values they stand for, where they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import torch

__all__ = ["NumberFormat", "format_names", "format_of", "n_bits_of", "quant_range", "storage_dtype"]

FormatKind = Literal["int", "float", "exponent"]


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A number format with at most eight bits.

    Attributes:
        name: the name without ``torch.``, such as ``"int4"`` or ``"float8_e4m3fn"``.
        dtype: the torch dtype that names the format. ``torch.float4_e2m1fn_x2`` stands for one FP4 number here, not
            for a pair.
        bits: bits of one code.
        kind: ``"int"`` for two's complement and unsigned integers, ``"float"`` for sign, exponent and mantissa,
            ``"exponent"`` for a power of two without sign or mantissa.
        signed: whether negative values exist.
        minimum: smallest finite value.
        maximum: largest finite value.
        storage: dtype of a tensor that holds one quantized value per element.
        exponent_bits: bits of the exponent field; 0 for integers.
        mantissa_bits: bits of the mantissa field; 0 for integers.
        bias: what is subtracted from the exponent field; 0 for integers.
        has_infinity: whether the largest exponent holds infinities and NaN as in IEEE 754 (only ``float8_e5m2``).
    """

    name: str
    dtype: torch.dtype
    bits: int
    kind: FormatKind
    signed: bool
    minimum: float
    maximum: float
    storage: torch.dtype
    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int = 0
    has_infinity: bool = False

    @property
    def count(self) -> int:
        """Number of codes, NaN and infinities included."""
        return 1 << self.bits


def _integers() -> list[NumberFormat]:
    formats = []
    for bits in range(1, 9):
        half = 1 << (bits - 1)
        signed = getattr(torch, f"int{bits}")
        unsigned = getattr(torch, f"uint{bits}")
        formats.append(
            NumberFormat(f"int{bits}", signed, bits, "int", True, -half, half - 1, torch.int8),
        )
        formats.append(
            NumberFormat(f"uint{bits}", unsigned, bits, "int", False, 0, 2 * half - 1, torch.uint8),
        )
    return formats


def _floats() -> list[NumberFormat]:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    e2m1, e8m0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
    return [
        NumberFormat("float8_e4m3fn", e4m3, 8, "float", True, -448.0, 448.0, e4m3, 4, 3, 7),
        NumberFormat("float8_e5m2", e5m2, 8, "float", True, -57344.0, 57344.0, e5m2, 5, 2, 15, True),
        NumberFormat("float4_e2m1fn_x2", e2m1, 4, "float", True, -6.0, 6.0, e4m3, 2, 1, 1),
        NumberFormat("float8_e8m0fnu", e8m0, 8, "exponent", False, 2.0**-127, 2.0**127, e8m0, 8, 0, 127),
    ]


def _wide_integers() -> list[NumberFormat]:
    """Formats that are simulated where a program widens ``QuantizationSpec.SUPPORTED_DTYPES``, and never stored."""
    return [
        NumberFormat(f"int{bits}", getattr(torch, f"int{bits}"), bits, "int", True, -(1 << bits - 1),
                     (1 << bits - 1) - 1, getattr(torch, f"int{bits}"))
        for bits in (16, 32)
    ]  # fmt: skip


_BY_NAME: dict[str, NumberFormat] = {f.name: f for f in (*_integers(), *_floats())}
_BY_DTYPE: dict[torch.dtype, NumberFormat] = {f.dtype: f for f in (*_BY_NAME.values(), *_wide_integers())}


def format_names() -> tuple[str, ...]:
    """Return the names of all formats, integers first."""
    return tuple(_BY_NAME)


def format_of(key: torch.dtype | str | NumberFormat) -> NumberFormat:
    """Return the format that a dtype or a name stands for.

    Args:
        key: a torch dtype, a bare name such as ``"int4"``, or a format, which is returned as it is.

    Raises:
        ValueError: no such format; the message proposes the nearest name.

    Example:
        >>> format_of("uint3").maximum
        7
    """
    if isinstance(key, NumberFormat):
        return key
    found = _BY_DTYPE.get(key) if isinstance(key, torch.dtype) else _BY_NAME.get(key)
    if found is None:
        near = get_close_matches(str(key).removeprefix("torch."), _BY_NAME, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known formats: {', '.join(_BY_NAME)}."
        raise ValueError(f"No number format for {key!r}. {hint}")
    return found


def n_bits_of(dtype: torch.dtype | str) -> int:
    """Return the bits of one code: 1 to 8 for integers, 8 for FP8 and e8m0, 4 for FP4.

    Raises:
        ValueError: no such format.
    """
    return format_of(dtype).bits


def storage_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of a tensor that holds one quantized value per element.

    Integers of any width live in ``int8`` or ``uint8``, FP4 in ``float8_e4m3fn`` (every FP4 value is exact there),
    the others in themselves.

    Raises:
        ValueError: no such format.
    """
    return format_of(dtype).storage


def quant_range(dtype: torch.dtype | str, clip_symmetric: bool = False) -> tuple[int, int] | tuple[float, float]:
    """Return the smallest and the largest quantized value of a format: ints for integers, else floats.

    Args:
        dtype: the format.
        clip_symmetric: leave out the lowest code of a signed integer, so that the range is symmetric about zero.

    Raises:
        ValueError: no such format, or ``clip_symmetric`` leaves only the value 0 (``int1``).

    Example:
        >>> quant_range(torch.int8), quant_range(torch.int8, clip_symmetric=True)
        ((-128, 127), (-127, 127))
    """
    fmt = format_of(dtype)
    if fmt.kind != "int":
        return fmt.minimum, fmt.maximum
    low, high = int(fmt.minimum), int(fmt.maximum)
    if clip_symmetric and fmt.signed:
        if high == 0:
            raise ValueError(
                f"{fmt.name!r} holds only -1 and 0, so a range clipped to be symmetric holds only 0. "
                "Use the scheme 'symmetric' or 'asymmetric', or at least 2 bits."
            )
        low = -high
    return low, high
