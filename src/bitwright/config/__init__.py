"""Where compression applies: configs by op, by module and for a whole model, their files, and the matching of names."""

from __future__ import annotations

from bitwright.common import CompressionType

from .compression_config import CompressionConfig
from .module_config import ModuleCompressionConfig, WeightOnlyModuleValidationMixin
from .op_config import OpCompressionConfig, WeightOnlyOpValidationMixin
from .spec import CompressionSpec

__all__ = [
    "CompressionConfig",
    "CompressionSpec",
    "CompressionType",
    "ModuleCompressionConfig",
    "OpCompressionConfig",
    "WeightOnlyModuleValidationMixin",
    "WeightOnlyOpValidationMixin",
]
