"""Vocabulary of the compression of Core AI programs."""

from __future__ import annotations

import enum

__all__ = ["CompressionGranularity", "DType", "QScheme"]


class DType(enum.StrEnum):
    """Number formats that a Core AI program can store. Members are strings, so ``dtype="int8"`` works too."""

    INT2 = "int2"
    UINT2 = "uint2"
    INT4 = "int4"
    UINT4 = "uint4"
    INT8 = "int8"
    UINT8 = "uint8"
    FP4_E2M1FN = "fp4_e2m1fn"
    FP8_E4M3FN = "fp8_e4m3fn"
    FP8_E5M2 = "fp8_e5m2"
    FP8_E8M0FNU = "fp8_e8m0fnu"

    def is_int(self) -> bool:
        """Tell whether the format holds integers."""
        return not self.value.startswith("fp")


class QScheme(enum.StrEnum):
    """How the range of a quantized tensor lies around zero."""

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"


class CompressionGranularity(enum.StrEnum):
    """Which elements of a weight share their scale or look-up table.

    ``PER_TENSOR``: all. ``PER_CHANNEL``: those of one output channel. ``PER_BLOCK``: consecutive input channels of one
    output channel. ``PER_GROUPED_CHANNEL``: those of several consecutive output channels.
    """

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    PER_BLOCK = "per_block"
    PER_GROUPED_CHANNEL = "per_grouped_channel"
