"""The configurations that the demo compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity

__all__ = ["RECIPES", "Recipe"]

_DEPTHWISE_AND_STEM = (r"stem\.0", r".*\.depthwise")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row of the demo.

    Attributes:
        name: what the table calls it.
        config: builds the configuration.
        calibrate: whether activations are calibrated.
        epochs: epochs of quantization-aware training, 0 for none.
    """

    name: str
    config: Callable[[], QuantizerConfig]
    calibrate: bool = False
    epochs: int = 0


def _weights(**spec: Any) -> ModuleQuantizerConfig:
    return ModuleQuantizerConfig(
        op_input_spec=None,
        op_output_spec=None,
        op_state_spec={"weight": QuantizationSpec(**spec)},
    )


def _with_narrow_layers(config: QuantizerConfig, narrow: ModuleQuantizerConfig) -> QuantizerConfig:
    """Give the layers with one input channel per group a config that needs no blocks along the input."""
    for name in _DEPTHWISE_AND_STEM:
        config.set_module_name(name, narrow)
    return config


def _w4_per_block() -> QuantizerConfig:
    return _with_narrow_layers(
        QuantizerConfig.presets.w4_per_block(block_size=32), ModuleQuantizerConfig.presets.w4(axis=0)
    )


def _w8a8() -> QuantizerConfig:
    return QuantizerConfig()


def _fp8() -> QuantizerConfig:
    spec = {"dtype": "float8_e4m3fn", "granularity": PerChannelGranularity(axis=0)}
    return QuantizerConfig(global_config=_weights(**spec))


def _fp4() -> QuantizerConfig:
    blocks = _weights(dtype="float4_e2m1fn", granularity=PerBlockGranularity(axis=1, block_size=32))
    narrow = _weights(dtype="float8_e4m3fn", granularity=PerChannelGranularity(axis=0))
    return _with_narrow_layers(QuantizerConfig(global_config=blocks), narrow)


def _w4a4() -> QuantizerConfig:
    activation = QuantizationSpec(dtype="int4", qscheme="asymmetric", qparam_calculator_cls="moving_average")
    weight = QuantizationSpec(dtype="int4", granularity=PerChannelGranularity(axis=0))
    return QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_input_spec={"*": activation}, op_output_spec={"*": activation}, op_state_spec={"weight": weight}
        )
    )


RECIPES: tuple[Recipe, ...] = (
    Recipe("w8", QuantizerConfig.presets.w8),
    Recipe("w4", QuantizerConfig.presets.w4),
    Recipe("w4_per_block", _w4_per_block),
    Recipe("w8a8 calibrated", _w8a8, calibrate=True),
    Recipe("fp8 (e4m3)", _fp8),
    Recipe("fp4 (e2m1, blocks of 32)", _fp4),
    Recipe("w4a4 calibrated", _w4a4, calibrate=True),
    Recipe("w4a4 by QAT", _w4a4, calibrate=True, epochs=6),
)
"""Every quantized row of the demo, in the order of the table."""
