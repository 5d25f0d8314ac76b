"""Quantization of the weights of a converted program."""

from __future__ import annotations

from bitwright.coreai_utils._quantize import quantize_weights

__all__ = ["quantize_weights"]
