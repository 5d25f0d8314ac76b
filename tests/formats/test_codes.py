"""Encoding and decoding against the slow definition, for every code and around every boundary between codes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from bitwright.formats import (
    decode,
    encode,
    format_of,
    power_of_two_scale,
    power_of_two_scale_by_arithmetic,
    round_to_fp4,
    round_to_fp8,
)
from bitwright.formats.rounding import round_to_format

from .slow_formats import FLOAT_FORMATS, finite_codes, float_value, nearest_code, power_of_two_code

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9)]


def float_codes(name: str) -> range:
    """All codes of a float format."""
    return range(1 << format_of(name).bits)


def boundary_values(name: str) -> list[float]:
    """Every value, every middle between neighbours, the floats next to each, of both signs, and beyond the range."""
    values = [float_value(name, c) for c in finite_codes(name)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    points = torch.tensor([*values, *middles, values[-1] * 1.03, values[-1] * 1.07, values[-1] * 2, 1e30, 1e-40])
    up = torch.nextafter(points, torch.tensor(math.inf))
    down = torch.nextafter(points, torch.tensor(-math.inf))
    every = torch.cat([points, up, down])
    return torch.cat([every, -every]).tolist()


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_decode_of_every_float_code(name: str) -> None:
    """Each code has the value of the standard, the sign of zero included."""
    codes = torch.tensor(list(float_codes(name)), dtype=torch.uint8)
    expected = torch.tensor([float_value(name, c) for c in float_codes(name)])
    mine = decode(codes, name)
    assert mine.dtype == torch.float32
    assert torch.equal(torch.isnan(mine), torch.isnan(expected))
    assert torch.equal(mine.nan_to_num(0.5), expected.nan_to_num(0.5))
    assert torch.equal(torch.signbit(mine.nan_to_num(0.5)), torch.signbit(expected.nan_to_num(0.5)))


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_encode_inverts_decode_for_every_finite_code(name: str) -> None:
    """A value keeps its code."""
    codes = torch.tensor([c for c in float_codes(name) if math.isfinite(float_value(name, c))], dtype=torch.uint8)
    assert torch.equal(encode(decode(codes, name), name), codes)


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_encode_rounds_to_nearest_even_and_saturates(name: str) -> None:
    """Around every boundary the code is that of exact rational arithmetic."""
    values = [*boundary_values(name), math.inf, -math.inf]
    expected = [nearest_code(name, v) for v in values]
    assert encode(torch.tensor(values), name).tolist() == expected


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_float64_is_rounded_once(name: str) -> None:
    """Numbers beside the middle of two codes, which float32 would move onto it, go to the nearer code."""
    positive = [float_value(name, code) for code in finite_codes(name)]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(positive)]
    near = [math.nextafter(middle, end) for middle in middles for end in (0, math.inf)]
    values = [*middles, *near, *(-value for value in (*middles, *near))]
    values += [math.inf, -math.inf, 1e300, -1e300, 1e-300, -1e-300]
    assert encode(torch.tensor(values, dtype=torch.float64), name).tolist() == [nearest_code(name, v) for v in values]


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_rounding_functions_agree_with_encode_and_decode(name: str) -> None:
    """Rounding is encoding and decoding, in each of its spellings; NaN stays."""
    fmt = format_of(name)
    x = torch.tensor(boundary_values(name))
    expected = decode(encode(x, fmt), fmt)
    rounded = round_to_fp4(x) if fmt.bits == 4 else round_to_fp8(x, fmt.dtype)
    by_arithmetic = round_to_format(x.clamp(fmt.minimum, fmt.maximum), fmt)
    for mine in (rounded, by_arithmetic):
        assert torch.equal(mine, expected)
        assert torch.equal(torch.signbit(mine), torch.signbit(expected))
    nan = torch.tensor([math.nan])
    assert torch.isnan(round_to_fp4(nan) if fmt.bits == 4 else round_to_fp8(nan, fmt.dtype)).all()
    assert torch.isnan(round_to_format(nan, fmt)).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_keep_their_value_and_saturate(name: str) -> None:
    """Whole numbers are their own codes; those outside become the nearest code."""
    fmt = format_of(name)
    low, high = int(fmt.minimum), int(fmt.maximum)
    values = torch.arange(low - 3, high + 4)
    codes = encode(values, fmt)
    assert codes.dtype == fmt.storage
    assert codes.tolist() == [min(max(v, low), high) for v in values.tolist()]
    assert torch.equal(decode(codes, fmt), codes.float())


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e5m2])
def test_power_of_two_scales_by_arithmetic_are_those_by_bits(dtype: torch.dtype) -> None:
    """Next to each power of two, of numbers from all over float32, and of what is not finite."""
    powers = torch.ldexp(torch.ones(255), torch.arange(-127, 128))
    neighbours = [torch.nextafter(powers, torch.tensor(to)) for to in (0.0, float("inf"))]
    spread = torch.arange(0, 2**31, 99_991).to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, 1e-45, torch.finfo(torch.float32).max, float("inf"), float("nan")])
    x = torch.cat([powers, *neighbours, spread, special])
    assert torch.equal(power_of_two_scale_by_arithmetic(x, dtype), power_of_two_scale(x, dtype))


def test_e8m0_codes_are_powers_of_two() -> None:
    """Every code decodes to 2 ** (code - 127) and back; 255 is NaN; other values round down."""
    codes = torch.arange(256).to(torch.uint8)
    values = decode(codes, "float8_e8m0fnu")
    assert values[:255].double().tolist() == [2.0 ** (c - 127) for c in range(255)]
    assert math.isnan(values[255].item())
    assert torch.equal(encode(values, "float8_e8m0fnu"), codes)
    assert torch.equal(decode(codes.view(torch.float8_e8m0fnu), "float8_e8m0fnu")[:255], values[:255])
    probes = [0.0, 1e-45, 5e-39, 1.17e-38, 0.75, 1.0, 1.99, 3.0, 3.4e38, math.inf, -1.0, math.nan]
    assert encode(torch.tensor(probes), "float8_e8m0fnu").tolist() == [power_of_two_code(v) for v in probes]


def test_decode_takes_the_storage_dtype() -> None:
    """A tensor in storage decodes as its codes do."""
    values = torch.tensor([0.5, -6.0, 3.0])
    for name in FLOAT_FORMATS:
        assert torch.equal(decode(values.to(format_of(name).storage), name), values)


@pytest.mark.parametrize("name", ["int4", "uint8", "float4_e2m1fn_x2"])
def test_nan_has_no_code(name: str) -> None:
    """NaN cannot be encoded where the format has none."""
    with pytest.raises(ValueError, match=f"'{name}' has no code for NaN"):
        encode(torch.tensor([1.0, math.nan]), name)


def test_fp8_encodes_nan() -> None:
    """FP8 has NaN."""
    for name in ("float8_e4m3fn", "float8_e5m2"):
        assert torch.isnan(decode(encode(torch.tensor([math.nan]), name), name)).all()


def test_wrong_input_is_an_error() -> None:
    """Fractions for integers, and codes of another dtype."""
    with pytest.raises(ValueError, match="must be whole numbers"):
        encode(torch.tensor([0.5]), "int4")
    with pytest.raises(ValueError, match="must be whole numbers"):
        encode(torch.tensor([2.0000000001], dtype=torch.float64), "int8")
    with pytest.raises(ValueError, match="have dtype uint8"):
        decode(torch.tensor([1]), "float8_e5m2")
    with pytest.raises(ValueError, match="have dtype uint8"):
        decode(torch.tensor([1], dtype=torch.uint8), "int8")
