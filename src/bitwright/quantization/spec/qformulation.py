"""The two ways in which an integer code stands for a value."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["QuantizationFormulation"]


class QuantizationFormulation(StrEnum):
    """How codes and values are related.

    * ``MINVAL``: ``q = clamp(round((x - minval) / scale) + q_min)``, ``x' = (q - q_min) * scale + minval``.
    * ``ZP``: ``q = clamp(round(x / scale) + zero_point)``, ``x' = (q - zero_point) * scale``.
    """

    MINVAL = "minval"
    ZP = "zp"
