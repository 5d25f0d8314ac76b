"""The functions of ``bitwright.coreai_utils`` in modules of their own, as coreai-opt has them."""

from __future__ import annotations

from bitwright.coreai_utils._weights import CONSUMERS as _OPS_WEIGHT_NEED_COMPRESSION

__all__ = ["_OPS_WEIGHT_NEED_COMPRESSION"]
