"""Casts of exported programs to 16-bit numbers."""

from __future__ import annotations

from ._api import (
    CastingWarning,
    cast_fp32_to_bf16,
    cast_fp32_to_fp16,
    cast_int32_to_int16,
    cast_to_16_bit_precision,
)

__all__ = [
    "CastingWarning",
    "cast_fp32_to_bf16",
    "cast_fp32_to_fp16",
    "cast_int32_to_int16",
    "cast_to_16_bit_precision",
]
