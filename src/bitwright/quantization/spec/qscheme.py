"""How a range of values is laid over the codes."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch

from bitwright import _torchao

__all__ = ["QuantizationScheme"]


class QuantizationScheme(StrEnum):
    """How the range of values determines scale and offset.

    * ``SYMMETRIC``: the range is widened to ``[-max_abs, max_abs]`` and laid over all codes.
    * ``ASYMMETRIC``: the range is used as it is.
    * ``SYMMETRIC_WITH_CLIPPING``: symmetric, and signed integers do without their lowest code, so that both sides have
      as many codes.
    """

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"
    SYMMETRIC_WITH_CLIPPING = "symmetric_with_clipping"

    @staticmethod
    def _to_mapping_type(qscheme: QuantizationScheme) -> Any:
        """Return torchao's ``MappingType`` for a scheme; both symmetric ones are ``SYMMETRIC`` there."""
        name = "ASYMMETRIC" if qscheme == QuantizationScheme.ASYMMETRIC else "SYMMETRIC"
        return _torchao.mapping_type(name)

    @staticmethod
    def _maybe_clip_bounds(
        qscheme: QuantizationScheme, dtype: torch.dtype, min_val: int, max_val: int
    ) -> tuple[int, int]:
        """Return the range of codes that the scheme leaves of ``[min_val, max_val]``."""
        if qscheme == QuantizationScheme.SYMMETRIC_WITH_CLIPPING and dtype.is_signed:
            return -max_val, max_val
        return min_val, max_val
