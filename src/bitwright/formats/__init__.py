"""Number formats as data: integers of 1 to 8 bits, FP8, FP4 and power-of-two scales; ranges, codes, packing."""

from __future__ import annotations

from .codes import decode, encode
from .number_format import NumberFormat, format_names, format_of, n_bits_of, quant_range, storage_dtype
from .packing import pack, packed_size, unpack
from .rounding import (
    e8m0_codes,
    e8m0_values,
    power_of_two_scale,
    power_of_two_scale_by_arithmetic,
    round_to_fp4,
    round_to_fp8,
)

__all__ = [
    "NumberFormat",
    "decode",
    "e8m0_codes",
    "e8m0_values",
    "encode",
    "format_names",
    "format_of",
    "n_bits_of",
    "pack",
    "packed_size",
    "power_of_two_scale",
    "power_of_two_scale_by_arithmetic",
    "quant_range",
    "round_to_fp4",
    "round_to_fp8",
    "storage_dtype",
    "unpack",
]
