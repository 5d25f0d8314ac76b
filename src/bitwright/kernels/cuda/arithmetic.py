"""The formulas of ``kernels.reference`` for Triton.

Division is rounded as IEEE 754 says (``div_rn``), and every kernel is launched with ``enable_fp_fusion=False``, because
a fused multiply-add rounds once where the reference rounds twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = [
    "block_of_row",
    "byte_of",
    "choose",
    "code_of",
    "code_of_byte",
    "jitted",
    "jitted_for_all",
    "narrow",
    "order_key",
    "round_to",
    "unclamped",
    "value_of",
    "value_of_key",
    "widen",
]


def jitted(function: Callable[..., Any]) -> Any:
    """``triton.jit``, with a type. Annotations inside must be attributes of a module, the only names that it allows."""
    return triton.jit(function)


def jitted_for_all(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """``jitted``, without code of its own for numbers like 1 or multiples of 16 among these parameters.

    Shapes differ from tensor to tensor, and every combination would be compiled.
    """
    return lambda function: triton.jit(function, do_not_specialize=list(names))


_EPS = tl.constexpr(1.1920928955078125e-07)
_INT32_MIN = tl.constexpr(-2147483648)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_EXPONENT = tl.constexpr(0x7F800000)
_WHOLE = tl.constexpr(8388608.0)


@jitted
def round_even(values: tl.tensor) -> tl.tensor:
    """Round to whole numbers, halves to even.

    Below ``2**23`` adding and subtracting that number rounds to whole ones; above, every float32 is whole.
    """
    magnitude = tl.abs(values)
    near = (magnitude + _WHOLE) - _WHOLE
    signed = tl.where(values < 0, -near, near)
    return tl.where(magnitude < _WHOLE, signed, values)


@jitted
def clamp(values: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Clamp; NaN stays NaN."""
    above = tl.where(values < low, low, values)
    return tl.where(above > high, high, above)


@jitted
def _code_of_float(values: tl.tensor, smallest: tl.tensor, anchor: tl.tensor) -> tl.tensor:
    """Round clamped values to a float format; see ``cpu.arithmetic.code_of_float``."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = (bits & _MAGNITUDE).to(tl.float32, bitcast=True)
    exponent = tl.maximum(bits & _EXPONENT, smallest)
    steps = (exponent + anchor).to(tl.float32, bitcast=True)
    rounded = ((magnitude + steps) - steps).to(tl.int32, bitcast=True)
    return ((rounded & _MAGNITUDE) | (bits & ~_MAGNITUDE)).to(tl.float32, bitcast=True)


@jitted
def unclamped(
    values: tl.tensor, scale: tl.tensor, offset: tl.tensor, origin: tl.tensor, INTEGER: tl.constexpr
) -> tl.tensor:
    """What the range is compared with: ``round((x - f) / s) + o``, or ``x / s`` for float formats."""
    if INTEGER:
        return round_even(tl.div_rn(values - origin, scale)) + offset
    return tl.div_rn(values, scale)


@jitted
def code_of(
    pre: tl.tensor, low: tl.tensor, high: tl.tensor, smallest: tl.tensor, anchor: tl.tensor, INTEGER: tl.constexpr
) -> tl.tensor:
    """The quantized value, as float32."""
    codes = clamp(pre, low, high)
    if not INTEGER:
        codes = _code_of_float(codes, smallest, anchor)
    return codes


@jitted
def byte_of(
    codes: tl.tensor, low: tl.tensor, smallest: tl.tensor, anchor: tl.tensor, INTEGER: tl.constexpr
) -> tl.tensor:
    """A byte for a quantized value.

    For integers how far it is from the lowest one, for float formats sign, exponent and mantissa. NaN gets 1 or 0x7F.
    """
    if INTEGER:
        byte = tl.where(codes == codes, codes - low, 1.0).to(tl.uint8)
    else:
        bits = codes.to(tl.int32, bitcast=True)
        magnitude = bits & _MAGNITUDE
        shift, first = anchor >> 23, smallest >> 23  # bits of the mantissa that float32 has more; smallest exponent
        normal = (magnitude >> shift) - ((first - 1) << (23 - shift))
        steps_in_one = ((277 - first - shift) << 23).to(tl.float32, bitcast=True)
        steps = (tl.where(magnitude < smallest, tl.abs(codes), 0.0) * steps_in_one).to(tl.int32)
        number = tl.where(magnitude < smallest, steps, normal)
        number = tl.where(codes == codes, number, 0x7F)
        byte = (number | tl.where(bits < 0, 0x80, 0)).to(tl.uint8)
    return byte


@jitted
def code_of_byte(
    byte: tl.tensor, kept: tl.tensor, low: tl.tensor, smallest: tl.tensor, anchor: tl.tensor, INTEGER: tl.constexpr
) -> tl.tensor:
    """The quantized value that ``byte_of`` made a byte of, from it and its bit of the mask.

    The mask tells the 1 of a NaN from that of a code: what else it leaves out was clipped to one of the two ends.
    """
    if INTEGER:
        above = byte.to(tl.float32)
        codes = tl.where((kept == 0) & (above == 1.0), float("nan"), above + low)
    else:
        number = byte.to(tl.int32) & 0x7F
        shift, first = anchor >> 23, smallest >> 23
        normal = ((number + ((first - 1) << (23 - shift))) << shift).to(tl.float32, bitcast=True)
        step = ((first + shift - 23) << 23).to(tl.float32, bitcast=True)
        magnitude = tl.where(number < (1 << (23 - shift)), number.to(tl.float32) * step, normal)
        magnitude = tl.where(number == 0x7F, float("nan"), magnitude).to(tl.int32, bitcast=True)
        codes = (magnitude | ((byte.to(tl.int32) & 0x80) << 24)).to(tl.float32, bitcast=True)
    return codes


@jitted
def value_of(
    codes: tl.tensor, scale: tl.tensor, offset: tl.tensor, origin: tl.tensor, INTEGER: tl.constexpr
) -> tl.tensor:
    """What a quantized value stands for."""
    if INTEGER:
        return (codes - offset) * scale + origin
    return codes * scale


@jitted
def order_key(values: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats; see ``cpu.arithmetic.order_key``."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _MAGNITUDE)


@jitted
def value_of_key(low_key: tl.tensor, high_key: tl.tensor) -> tl.tensor:
    """The range that two keys stand for; a NaN makes both ends NaN."""
    nan = (high_key > _EXPONENT) | (low_key < ~_EXPONENT)
    low = (low_key ^ ((low_key >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)
    high = (high_key ^ ((high_key >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)
    return tl.where(nan, float("nan"), low), tl.where(nan, float("nan"), high)


@jitted
def _bf16_bits(values: tl.tensor) -> tl.tensor:
    """Round to the upper half of the bits, ties to even; every NaN becomes 0x7FC0."""
    raw = values.to(tl.int32, bitcast=True)
    rounded = raw + 0x7FFF + ((raw >> 16) & 1)
    return tl.where(values != values, 0x7FC00000, rounded) >> 16


@jitted
def widen(raw: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """What was loaded as float32. bfloat16 (dtype 1) is loaded and stored as int16."""
    if DTYPE == 1:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@jitted
def narrow(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Round float32 to what is stored: 0 float32, 1 bfloat16 as int16, 2 float16."""
    # One result for all branches: Triton wants every return of a function to have the same type.
    if DTYPE == 1:
        result = _bf16_bits(values).to(tl.int16)
    elif DTYPE == 2:
        result = values.to(tl.float16)
    else:
        result = values
    return result


@jitted
def round_to(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The float32 nearest in the dtype."""
    return widen(narrow(values, DTYPE), DTYPE)


@jitted
def choose(
    low: tl.tensor,
    high: tl.tensor,
    quant_min: tl.tensor,
    quant_max: tl.tensor,
    DTYPE: tl.constexpr,
    SCHEME: tl.constexpr,
) -> tl.tensor:
    """Scale, zero point and minval of blocks; see ``cpu.arithmetic.choose``."""
    low = tl.where(low >= 0, 0.0, low)
    high = tl.where(high <= 0, 0.0, high)
    max_abs = tl.where((-low > high) | (low != low), -low, high)
    point = tl.zeros_like(low)
    origin = low
    if SCHEME == 1:
        scale = round_to(tl.div_rn(round_to(high - low, DTYPE), tl.zeros_like(low) + (quant_max - quant_min)), DTYPE)
        scale = tl.where(scale < _EPS, _EPS, scale)
        steps = round_even(round_to(tl.div_rn(low, scale), DTYPE))
        point = clamp(round_to(quant_min - steps, DTYPE), quant_min, quant_max)
    elif SCHEME == 0:
        half = tl.zeros_like(low) + (quant_max - quant_min) * 0.5
        scale = round_to(tl.div_rn(max_abs, half), DTYPE)
        scale = tl.where(scale < _EPS, _EPS, scale)
        point = tl.zeros_like(low) + (quant_max + quant_min + 1.0) * 0.5
        origin = -max_abs
    else:
        field = ((max_abs.to(tl.int32, bitcast=True) >> 23) & 0xFF) - (SCHEME - 2)
        scale = (tl.maximum(field, 1) << 23).to(tl.float32, bitcast=True)
    known = tl.where(point == point, point, 0.0).to(tl.int32)
    return scale, tl.where(point == point, known, _INT32_MIN), origin


@jitted
def block_of_row(
    row: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
    n3: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
    s3: tl.tensor,
    OUTER: tl.constexpr,
) -> tl.tensor:
    """First block of a row from at most four outer runs, of which only ``OUTER`` (innermost last) count."""
    block = row * 0
    if OUTER >= 4:
        above = row // n3
        block += (row - above * n3) * s3
        row = above
    if OUTER >= 3:
        above = row // n2
        block += (row - above * n2) * s2
        row = above
    if OUTER >= 2:
        above = row // n1
        block += (row - above * n1) * s1
        row = above
    if OUTER >= 1:
        block += row * s0
    return block
