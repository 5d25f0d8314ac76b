"""Number formats as data."""

from __future__ import annotations

import pytest
import torch

from bitwright.formats import (
    NumberFormat,
    format_names,
    format_of,
    n_bits_of,
    quant_range,
    storage_dtype,
)

from .slow_formats import FLOAT_FORMATS, finite_codes, float_value


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("sign", ["", "u"])
def test_integers_are_twos_complement(bits: int, sign: str) -> None:
    """Range, bits and storage of every integer format follow from its name."""
    fmt = format_of(f"{sign}int{bits}")
    codes = range(1 << bits) if sign else range(-(1 << bits) // 2, (1 << bits) // 2)
    assert (fmt.minimum, fmt.maximum) == (min(codes), max(codes))
    assert fmt.bits == bits == n_bits_of(fmt.dtype)
    assert fmt.count == len(codes)
    assert fmt.storage is storage_dtype(fmt.dtype) is (torch.uint8 if sign else torch.int8)
    assert fmt.dtype is getattr(torch, fmt.name)
    assert quant_range(fmt.dtype) == (min(codes), max(codes))


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_float_ranges_are_the_largest_finite_values(name: str) -> None:
    """The range is that of the slow definition."""
    fmt = format_of(name)
    largest = float_value(name, finite_codes(name)[-1])
    assert (fmt.minimum, fmt.maximum) == (-largest, largest) == quant_range(name)
    assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.bias) == FLOAT_FORMATS[name]


def test_fp4_is_stored_in_fp8_which_holds_every_value() -> None:
    """FP4 counts 4 bits, and its storage represents all its values."""
    assert n_bits_of("float4_e2m1fn_x2") == 4
    assert storage_dtype("float4_e2m1fn_x2") is torch.float8_e4m3fn
    values = torch.tensor([float_value("float4_e2m1fn_x2", c) for c in range(16)])
    assert torch.equal(values.to(torch.float8_e4m3fn).float(), values)


def test_clipped_range_is_symmetric_for_signed_integers_only() -> None:
    """Clipping drops the lowest code of signed integers."""
    assert quant_range("int8", clip_symmetric=True) == (-127, 127)
    assert quant_range("int2", clip_symmetric=True) == (-1, 1)
    assert quant_range("uint4", clip_symmetric=True) == (0, 15)
    assert quant_range("float8_e4m3fn", clip_symmetric=True) == (-448.0, 448.0)
    with pytest.raises(ValueError, match="'int1' holds only -1 and 0"):
        quant_range("int1", clip_symmetric=True)


def test_lookup() -> None:
    """Every name, dtype and format leads to the same format; the names are complete."""
    assert len(format_names()) == 20
    for name in format_names():
        fmt = format_of(name)
        assert isinstance(fmt, NumberFormat)
        assert format_of(fmt.dtype) is fmt is format_of(fmt)


@pytest.mark.parametrize(
    ("key", "hint"), [("int9", "int"), ("float8_e4m3", "'float8_e4m3fn'"), (torch.float32, "Known|mean")]
)
def test_unknown_format_proposes_a_name(key: object, hint: str) -> None:
    """An unknown key is named, and a near name proposed."""
    with pytest.raises(ValueError, match=hint):
        format_of(key)  # type: ignore[arg-type]
