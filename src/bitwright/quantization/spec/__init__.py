"""Specs of quantization and what they are made of: granularities, calculators, fake quantizers."""

from __future__ import annotations

from .factory import QuantizationComponentFactory
from .fake_quantize import FakeQuantizeImplBase, fp4_forward
from .granularity import (
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
    QuantizationGranularity,
    resolve_block_sizes,
)
from .learned import LearnedQParamsCalculatorBase, LSQPlusQParamsCalculator, LSQQParamsCalculator, PACTQParamsCalculator
from .learned_fake_quantize import LearnedFakeQuantizeBase, LSQFakeQuantize, LSQPlusFakeQuantize, PACTFakeQuantize
from .observers import HistogramRangeCalculator, MSERangeCalculator, PercentileRangeCalculator
from .qformulation import QuantizationFormulation
from .qparams_calculator import (
    AccumulatedQParamsCalculator,
    DynamicQParamsCalculator,
    GlobalMinMaxQParamsCalculator,
    MovingAverageQParamsCalculator,
    QParamsCalculatorBase,
    RunningRangeMixin,
    StatefulQParamsCalculatorBase,
    StatelessQParamsCalculatorBase,
    StaticQParamsCalculator,
)
from .qscheme import QuantizationScheme
from .range_calculator import MinMaxRangeCalculator, RangeCalculatorBase
from .spec import QuantizationSpec, default_activation_quantization_spec, default_weight_quantization_spec

__all__ = [
    "AccumulatedQParamsCalculator",
    "DynamicQParamsCalculator",
    "FakeQuantizeImplBase",
    "GlobalMinMaxQParamsCalculator",
    "HistogramRangeCalculator",
    "LSQFakeQuantize",
    "LSQPlusFakeQuantize",
    "LSQPlusQParamsCalculator",
    "LSQQParamsCalculator",
    "LearnedFakeQuantizeBase",
    "LearnedQParamsCalculatorBase",
    "MSERangeCalculator",
    "MinMaxRangeCalculator",
    "MovingAverageQParamsCalculator",
    "PACTFakeQuantize",
    "PACTQParamsCalculator",
    "PerBlockGranularity",
    "PerChannelGranularity",
    "PerTensorGranularity",
    "PerTokenGranularity",
    "PercentileRangeCalculator",
    "QParamsCalculatorBase",
    "QuantizationComponentFactory",
    "QuantizationFormulation",
    "QuantizationGranularity",
    "QuantizationScheme",
    "QuantizationSpec",
    "RangeCalculatorBase",
    "RunningRangeMixin",
    "StatefulQParamsCalculatorBase",
    "StatelessQParamsCalculatorBase",
    "StaticQParamsCalculator",
    "default_activation_quantization_spec",
    "default_weight_quantization_spec",
    "fp4_forward",
    "resolve_block_sizes",
]
