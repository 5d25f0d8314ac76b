"""Compression of programs that are converted to Core AI already.

The functions need coreai-core and coreai-torch: ``pip install "bitwright[coreai]"``.
"""

from __future__ import annotations

from ._palettize import palettize_weights
from ._quantize import quantize_weights
from ._sparsify import sparsify_weights
from .common import CompressionGranularity, DType, QScheme

__all__ = [
    "CompressionGranularity",
    "DType",
    "QScheme",
    "palettize_weights",
    "quantize_weights",
    "sparsify_weights",
]
