"""The quantizer of one mode, under the name that coreai-opt keeps here."""

from __future__ import annotations

from bitwright.quantization.quantizer import Quantizer

__all__ = ["EagerQuantizer"]


class EagerQuantizer(Quantizer):
    """A quantizer in eager mode."""
