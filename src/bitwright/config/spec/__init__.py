"""What a compressor does to one tensor: specs, their targets, and the simulators built from them."""

from __future__ import annotations

from bitwright.common import CompressionType

from .compression_simulator import CompressionSimulatorBase
from .compression_spec import CompressionSpec
from .factory import CompressionComponentFactoryBase
from .target import CompressionTargetTensor

__all__ = [
    "CompressionComponentFactoryBase",
    "CompressionSimulatorBase",
    "CompressionSpec",
    "CompressionTargetTensor",
    "CompressionType",
]
