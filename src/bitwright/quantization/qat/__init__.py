"""Quantization-aware training: torchao's configs, distillation, schedules over bits, and more than one process."""

from __future__ import annotations

from .distillation import DistillationLoss
from .fake_quantize_config import (
    FakeQuantizeConfig,
    FakeQuantizeConfigBase,
    Float8FakeQuantizeConfig,
    IntxFakeQuantizeConfig,
)
from .intx import Float8QuantizationSpec, IntxQuantizationSpec
from .parameters import parameter_groups, range_parameters

__all__ = [
    "DistillationLoss",
    "FakeQuantizeConfig",
    "FakeQuantizeConfigBase",
    "Float8FakeQuantizeConfig",
    "Float8QuantizationSpec",
    "IntxFakeQuantizeConfig",
    "IntxQuantizationSpec",
    "parameter_groups",
    "range_parameters",
]
