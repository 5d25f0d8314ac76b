"""The ways in which the demo makes the network smaller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bitwright.common import ExportBackend
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig
from bitwright.quantization import ExecutionMode, ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity

from .digits import Digits
from .network import train

__all__ = ["EXPORT_RECIPES", "RECIPES", "Recipe"]

_NARROW_LAYERS = (r"stem\.0", r".*\.depthwise")
_ANY_BATCH = {"images": {0: torch.export.Dim.DYNAMIC}}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row of the demo.

    Attributes:
        name: what the table calls it.
        compress: takes a copy of the float model, the data and a seed; returns the finalized model.
    """

    name: str
    compress: Callable[[nn.Module, Digits, int], nn.Module]


def _quantize(
    config: Callable[[], QuantizerConfig],
    model: nn.Module,
    digits: Digits,
    seed: int,
    *,
    calibrate: bool = False,
    epochs: int = 0,
) -> nn.Module:
    quantizer = Quantizer(model, config())
    graph = quantizer.applied_config.execution_mode == ExecutionMode.GRAPH
    shapes: dict[str, Any] = {"dynamic_shapes": _ANY_BATCH} if graph else {}
    prepared = quantizer.prepare((digits.train_images[:64],), **shapes)
    if calibrate:
        with quantizer.calibration_mode(), torch.no_grad():
            for images in torch.split(digits.train_images, 64)[:8]:
                prepared(images)
    if epochs:
        with quantizer.training_mode():
            train(prepared, digits, epochs=epochs, learning_rate=2e-3, seed=seed)
    return quantizer.finalize(backend=ExportBackend._TORCH)


def _palettize(model: nn.Module, digits: Digits, seed: int) -> nn.Module:
    whole = ModuleKMeansPalettizerConfig(op_state_spec={"weight": PalettizationSpec(n_bits=4)})
    palettizer = KMeansPalettizer(model, KMeansPalettizerConfig(global_config=whole))
    palettizer.prepare((digits.train_images[:64],))
    return palettizer.finalize(backend=ExportBackend._TORCH)


def _prune(model: nn.Module, digits: Digits, seed: int) -> nn.Module:
    pruner = MagnitudePruner(model, MagnitudePrunerConfig())
    prepared = pruner.prepare((digits.train_images[:64],))
    with pruner.training_mode():
        train(prepared, digits, epochs=3, learning_rate=2e-3, seed=seed)
    return pruner.finalize(backend=ExportBackend._TORCH)


def _weights(**spec: Any) -> ModuleQuantizerConfig:
    return ModuleQuantizerConfig(
        op_input_spec=None,
        op_output_spec=None,
        op_state_spec={"weight": QuantizationSpec(**spec)},
    )


def _with_narrow_layers(config: QuantizerConfig, narrow: ModuleQuantizerConfig) -> QuantizerConfig:
    """Give the layers with one input channel per group a config that needs no blocks along the input."""
    for name in _NARROW_LAYERS:
        config.set_module_name(name, narrow)
    return config


def _w4_per_block() -> QuantizerConfig:
    return _with_narrow_layers(
        QuantizerConfig.presets.w4_per_block(block_size=32), ModuleQuantizerConfig.presets.w4(axis=0)
    )


def _eager_w4() -> QuantizerConfig:
    return QuantizerConfig(
        global_config=_weights(dtype="int4", granularity=PerChannelGranularity(axis=0)), execution_mode="eager"
    )


def _w4_blocks_in_the_head() -> QuantizerConfig:
    """For formats that pack linear layers only."""
    blocks = _weights(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=32))
    config = QuantizerConfig(global_config=None, execution_mode=ExecutionMode.EAGER)
    return config.set_module_name("head", blocks)


def _fp8() -> QuantizerConfig:
    return QuantizerConfig(global_config=_weights(dtype="float8_e4m3fn", granularity=PerChannelGranularity(axis=0)))


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


def _eager_w8() -> QuantizerConfig:
    return QuantizerConfig.presets.w8(execution_mode=ExecutionMode.EAGER)


def _prune_and_quantize(model: nn.Module, digits: Digits, seed: int) -> nn.Module:
    return _quantize(_eager_w8, _prune(model, digits, seed), digits, seed)


def _palettize_and_quantize_activations(model: nn.Module, digits: Digits, seed: int) -> nn.Module:
    activations = functools.partial(QuantizerConfig, execution_mode=ExecutionMode.EAGER)
    return _quantize(activations, _palettize(model, digits, seed), digits, seed, calibrate=True)


def _quantization(name: str, config: Callable[[], QuantizerConfig], **how: Any) -> Recipe:
    options: Mapping[str, Any] = how
    return Recipe(name, functools.partial(_quantize, config, **options))


RECIPES: tuple[Recipe, ...] = (
    _quantization("w8", QuantizerConfig.presets.w8),
    _quantization("w4", QuantizerConfig.presets.w4),
    _quantization("w4_per_block", _w4_per_block),
    _quantization("w8a8 calibrated", QuantizerConfig, calibrate=True),
    _quantization("fp8 (e4m3)", _fp8),
    _quantization("fp4 (e2m1, blocks of 32)", _fp4),
    _quantization("w4a4 calibrated", _w4a4, calibrate=True),
    _quantization("w4a4 by QAT", _w4a4, calibrate=True, epochs=5),
    Recipe("palette of 16 values", _palettize),
    Recipe("palette, int8 activations", _palettize_and_quantize_activations),
    Recipe("half pruned, retrained", _prune),
    Recipe("half pruned, rest int8", _prune_and_quantize),
)
"""Every compressed row of the demo, in the order of the table."""

EXPORT_RECIPES: tuple[tuple[Recipe, tuple[str, ...]], ...] = (
    (
        _quantization("w8a8", QuantizerConfig, calibrate=True),
        ("torch", "aot-inductor", "onnx", "coreai", "coreml", "executorch"),
    ),
    (_quantization("w4", _eager_w4), ("artifact", "torch", "onnx", "coreai", "coreml", "executorch")),
    (_quantization("w4 blocks, head", _w4_blocks_in_the_head), ("onnx-nbits", "compressed-tensors", "gguf")),
    (Recipe("palette of 16", _palettize), ("onnx", "coreai", "coreml")),
    (Recipe("half pruned, int8", _prune_and_quantize), ("artifact", "onnx", "coreai", "coreml")),
)
"""What the demo writes for which targets."""
