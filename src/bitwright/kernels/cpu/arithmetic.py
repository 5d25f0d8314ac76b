"""The formulas of ``kernels.reference`` for sixteen elements, and for the parameters of one block."""

from __future__ import annotations

import numpy as np

from .compiling import has_fused_multiply_add, inlined
from .lanes import (
    Lanes,
    Scalar,
    add_product,
    as_bits,
    as_float,
    float_from_bits,
    float_to_bits,
    load_bf16,
    load_f16,
    load_f32,
    maximum,
    rint,
    round_to_bf16,
    round_to_f16,
    select,
    splat_int,
    store_bf16,
    store_f16,
    store_f32,
    subtract_product,
    with_sign,
)

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "can_multiply",
    "choose",
    "clamp",
    "code_of_float",
    "code_of_integer",
    "first_value",
    "has_nan",
    "load",
    "order_key",
    "quotient",
    "round_to",
    "store",
    "value_of_key",
]

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
_EPS = np.float32(np.finfo(np.float32).eps)
_INFINITY_KEY = 0x7F800000
_FUSED = has_fused_multiply_add()
_LEAST_STEP, _MOST_STEP, _MOST_QUOTIENT = np.float32(2.0**-60), np.float32(2.0**60), np.float32(2.0**20)
_INT32_MIN = -(1 << 31)


@inlined
def load(address: int, dtype: int) -> Lanes:
    """Sixteen elements as float32."""
    if dtype == FLOAT32:
        return load_f32(address)
    if dtype == BFLOAT16:
        return load_bf16(address)
    return load_f16(address)


@inlined
def store(address: int, values: Lanes, dtype: int) -> None:
    """Round sixteen elements to the dtype and write them."""
    if dtype == FLOAT32:
        store_f32(address, values)
    elif dtype == BFLOAT16:
        store_bf16(address, values)
    else:
        store_f16(address, values)


@inlined
def code_of_integer(values: Lanes, step: Lanes, offset: Lanes, origin: Lanes) -> Lanes:
    """``round((x - f) / s) + o``, not clamped."""
    return rint((values - origin) / step) + offset


@inlined
def can_multiply(step: Scalar, least: Scalar, most: Scalar) -> bool:
    """Whether ``quotient`` may be used for a step and quotients from ``least`` to ``most``."""
    small = least >= -_MOST_QUOTIENT and most <= _MOST_QUOTIENT
    return bool(_FUSED and small and _LEAST_STEP <= step <= _MOST_STEP)


@inlined
def quotient(values: Lanes, step: Lanes, inverse: Lanes, rest: Lanes) -> Lanes:
    """``values / step`` to the last bit, but for the sign of zero, in a fraction of the time of a division.

    The first line is next to the quotient, since ``inverse + rest`` has twice the digits. The second corrects it by
    what is left over of the dividend, which a fused multiplication gives exactly; rounding that is right as
    ``inverse`` is the float nearest to ``1 / step`` (P. W. Markstein, "Computation of elementary functions on the IBM
    RISC System/6000 processor", IBM Journal of Research and Development 34(1), 1990, theorem 8.1). Below ``2**-30``
    something may underflow; the caller rounds such quotients to 0.

    Args:
        values: dividends; NaN stays NaN.
        step: the same divisor in every lane; see ``can_multiply``.
        inverse: ``1 / step``, rounded.
        rest: ``1 / step - inverse``.
    """
    near = add_product(values, inverse, values * rest)
    return add_product(subtract_product(near, step, values), inverse, near)


@inlined
def first_value(code: Scalar, step: Scalar) -> Scalar:
    """The smallest float32 whose quotient rounds to at least ``code``; see ``can_multiply`` for both.

    By symmetry, ``-first_value(-code, step)`` is the largest one whose quotient rounds to at most ``code``.
    """
    value = np.float32(np.float32(code - np.float32(0.5)) * step)  # at most a few floats away, and not zero
    while np.rint(np.float32(value / step)) >= code:
        value = float_from_bits(np.int32(float_to_bits(value) + (1 if value < 0 else -1)))
    while np.rint(np.float32(value / step)) < code:
        value = float_from_bits(np.int32(float_to_bits(value) + (-1 if value < 0 else 1)))
    return value


@inlined
def clamp(values: Lanes, low: Lanes, high: Lanes) -> Lanes:
    """Clamp; NaN stays NaN."""
    above = select(values < low, low, values)
    return select(high < above, high, above)


@inlined
def code_of_float(values: Lanes, smallest_exponent: int, anchor: int) -> Lanes:
    """Round clamped values to a float format.

    Adding and subtracting ``2**23`` steps of the format leaves a multiple of one step, ties to even. The step follows
    from the element's exponent field, which is at least that of the smallest normal number.

    Args:
        values: float32 lanes inside the format's range, or NaN.
        smallest_exponent: exponent field of the smallest normal number, in place in a float32.
        anchor: ``23 - mantissa_bits`` in the place of the exponent field.
    """
    bits = as_bits(values)
    magnitude = as_float(bits & splat_int(np.int32(0x7FFFFFFF)))
    exponent = maximum(bits & splat_int(np.int32(0x7F800000)), splat_int(np.int32(smallest_exponent)))
    steps = as_float(exponent + splat_int(np.int32(anchor)))
    return with_sign((magnitude + steps) - steps, values)


@inlined
def order_key(values: Lanes) -> Lanes:
    """Integers in the order of the floats: NaN of either sign beyond the infinities, -0 below +0."""
    bits = as_bits(values)
    return bits ^ ((bits >> splat_int(np.int32(31))) & splat_int(np.int32(0x7FFFFFFF)))


@inlined
def value_of_key(key: Scalar) -> Scalar:
    """The float that a key stands for."""
    return float_from_bits(np.int32(key ^ ((key >> 31) & 0x7FFFFFFF)))


@inlined
def has_nan(low_key: Scalar, high_key: Scalar) -> Scalar:
    """Whether the range of keys contains a NaN."""
    return high_key > _INFINITY_KEY or low_key < ~_INFINITY_KEY


@inlined
def round_to(value: Scalar, dtype: int) -> Scalar:
    """The float32 nearest in the dtype."""
    if dtype == BFLOAT16:
        return round_to_bf16(np.float32(value))
    if dtype == FLOAT16:
        return round_to_f16(np.float32(value))
    return np.float32(value)


@inlined
def choose(
    low: Scalar, high: Scalar, dtype: int, scheme: int, quant_min: Scalar, quant_max: Scalar
) -> tuple[Scalar, Scalar, Scalar]:
    """Scale, zero point and minval of one block; see ``reference.choose_qparams``.

    Args:
        low: smallest element, as float32.
        high: largest element, as float32.
        dtype: dtype of the range, to which every result is rounded.
        scheme: 0 symmetric, 1 asymmetric, 2 + P for a power-of-two scale with largest element exponent P.
        quant_min: smallest code.
        quant_max: largest code.
    """
    zero = np.float32(0)
    low = zero if low >= zero else np.float32(low)
    high = zero if high <= zero else np.float32(high)
    if scheme == 1:
        scale = round_to(round_to(high - low, dtype) / np.float32(quant_max - quant_min), dtype)
        scale = _EPS if scale < _EPS else scale
        point = np.rint(round_to(low / scale, dtype))
        point = round_to(np.float32(quant_min) - point, dtype)
        if np.isnan(point):
            return scale, np.int32(_INT32_MIN), low
        point = min(max(point, np.float32(quant_min)), np.float32(quant_max))
        return scale, np.int32(point), low
    max_abs = -low if (-low > high or np.isnan(low)) else high
    if scheme >= 2:
        field = ((float_to_bits(max_abs) >> 23) & 0xFF) - (scheme - 2)
        return float_from_bits(np.int32(max(field, 1) << 23)), np.int32(0), zero
    scale = round_to(max_abs / np.float32((quant_max - quant_min) / 2), dtype)
    scale = _EPS if scale < _EPS else scale
    return scale, np.int32((quant_max + quant_min + 1) / 2), -max_abs
