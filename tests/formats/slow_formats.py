"""Number formats defined slowly, by their standards, with exact rational arithmetic: the tests' independent truth.

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2), OCP Microscaling Formats Specification 1.0 (E2M1,
E8M0).
"""

from __future__ import annotations

import math
from fractions import Fraction

# name: exponent bits, mantissa bits, bias
FLOAT_FORMATS = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float4_e2m1fn_x2": (2, 1, 1),
}


def float_value(name: str, code: int) -> float:
    """Value of a code of a float format."""
    exponent_bits, mantissa_bits, bias = FLOAT_FORMATS[name]
    mantissa = code % (1 << mantissa_bits)
    exponent = (code >> mantissa_bits) % (1 << exponent_bits)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    highest = (1 << exponent_bits) - 1
    if name == "float8_e5m2" and exponent == highest:
        return sign * math.inf if mantissa == 0 else math.nan
    if name == "float8_e4m3fn" and exponent == highest and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def finite_codes(name: str) -> list[int]:
    """Codes of finite values without sign, in order of value."""
    exponent_bits, mantissa_bits, _ = FLOAT_FORMATS[name]
    return [c for c in range(1 << (exponent_bits + mantissa_bits)) if math.isfinite(float_value(name, c))]


def nearest_code(name: str, value: float) -> int:
    """Code of the nearest value, ties to the even code, saturating. ``value`` is not NaN."""
    exponent_bits, mantissa_bits, _ = FLOAT_FORMATS[name]
    sign = 1 << (exponent_bits + mantissa_bits) if math.copysign(1.0, value) < 0 else 0
    codes = finite_codes(name)
    if math.isinf(value):
        return codes[-1] | sign
    magnitude = abs(Fraction(value))
    best = min(codes, key=lambda c: (abs(Fraction(float_value(name, c)) - magnitude), c & 1))
    return best | sign


def power_of_two_code(value: float) -> int:
    """E8M0 code of ``2 ** floor(log2(value))``; 255 is NaN."""
    if math.isnan(value) or math.isinf(value) or value < 0:
        return 255
    if value == 0:
        return 0
    return min(max(math.frexp(value)[1] - 1 + 127, 0), 254)


def bits_of(codes: list[int], bits: int) -> list[int]:
    """Bytes of a little-endian stream of codes."""
    stream = 0
    for place, code in enumerate(codes):
        stream |= (code % (1 << bits)) << (place * bits)
    size = -(-len(codes) * bits // 8)
    return list(stream.to_bytes(size, "little"))
