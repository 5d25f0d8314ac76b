"""Where and how a model is quantized."""

from __future__ import annotations

from .execution_mode import ExecutionMode, InvalidExecutionModeError
from .kv_cache import KVCacheQuantConfig
from .op_quantizer_config import OpQuantizerConfig
from .qat_schedule import QATSchedule
from .quantization_config import ModuleQuantizerConfig, QuantizerConfig

__all__ = [
    "ExecutionMode",
    "InvalidExecutionModeError",
    "KVCacheQuantConfig",
    "ModuleQuantizerConfig",
    "OpQuantizerConfig",
    "QATSchedule",
    "QuantizerConfig",
]
