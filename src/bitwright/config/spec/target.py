"""Kinds of tensors that can be compressed."""

from __future__ import annotations

import enum

__all__ = ["CompressionTargetTensor"]


class CompressionTargetTensor(enum.Enum):
    """What a compressed tensor is in the model: a weight, an activation, or the look-up table of a palette."""

    WEIGHT = "weight"
    ACTIVATION = "activation"
    LUT = "lut"
