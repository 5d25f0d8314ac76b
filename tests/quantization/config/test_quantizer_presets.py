"""Ready-made configs: what each of them says, on both classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from bitwright.quantization.config import ExecutionMode, ModuleQuantizerConfig, QuantizerConfig
from bitwright.quantization.spec import (
    DynamicQParamsCalculator,
    LSQFakeQuantize,
    MovingAverageQParamsCalculator,
    MSERangeCalculator,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
    QuantizationFormulation,
    QuantizationScheme,
    default_activation_quantization_spec,
)

OFF = {"*": None}
PER_CHANNEL, PER_BLOCK = PerChannelGranularity(), PerBlockGranularity(block_size=32)
FP8, FP4, E8M0 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu

WEIGHTS: dict[str, tuple[torch.dtype, Any, torch.dtype | None]] = {
    "w8": (torch.int8, PER_CHANNEL, None),
    "w4": (torch.int4, PER_CHANNEL, None),
    "w4_per_block": (torch.int4, PER_BLOCK, None),
    "w8a8": (torch.int8, PER_CHANNEL, None),
    "w4a8": (torch.int4, PER_CHANNEL, None),
    "w4a4": (torch.int4, PER_CHANNEL, None),
    "w2a4": (torch.int2, PER_CHANNEL, None),
    "w8a8_dynamic": (torch.int8, PER_CHANNEL, None),
    "fp8": (FP8, PER_CHANNEL, None),
    "mxfp8": (FP8, PER_BLOCK, E8M0),
    "mxfp4": (FP4, PER_BLOCK, E8M0),
}
OWNERS: list[Any] = [ModuleQuantizerConfig, QuantizerConfig]


def module_of(config: Any) -> Any:
    """The module config that a preset made."""
    return config.global_config if isinstance(config, QuantizerConfig) else config


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("name", list(WEIGHTS))
def test_weights(owner: Any, name: str) -> None:
    config = getattr(owner.presets, name)()
    assert type(config) is owner
    module = module_of(config)
    assert list(module.op_state_spec) == ["weight"]
    weight = module.op_state_spec["weight"]
    dtype, granularity, scale_dtype = WEIGHTS[name]
    assert (weight.dtype, weight.granularity, weight.scale_dtype) == (dtype, granularity, scale_dtype)
    assert weight.qscheme is QuantizationScheme.SYMMETRIC
    assert weight.qformulation is QuantizationFormulation.ZP


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("name", ["w8", "w4", "w4_per_block", "mxfp8", "mxfp4"])
def test_weight_only_presets_switch_activations_off(owner: Any, name: str) -> None:
    module = module_of(getattr(owner.presets, name)())
    assert module.op_input_spec == module.op_output_spec == OFF


@pytest.mark.parametrize("name", ["w8a8", "w4a8"])
def test_int8_activations_are_the_default_ones(name: str) -> None:
    module = getattr(ModuleQuantizerConfig.presets, name)()
    assert module.op_input_spec == module.op_output_spec == {"*": default_activation_quantization_spec()}


def test_two_bit_weights_learn_their_step() -> None:
    weight = ModuleQuantizerConfig.presets.w2a4().op_state_spec["weight"]
    assert weight.fake_quantize_cls is LSQFakeQuantize
    assert weight.range_calculator_cls is MSERangeCalculator


@pytest.mark.parametrize("name", ["w4a4", "w2a4"])
def test_int4_inputs_have_the_range_of_least_squared_error(name: str) -> None:
    module = getattr(ModuleQuantizerConfig.presets, name)()
    assert module.op_input_spec is not None
    spec = module.op_input_spec["*"]
    assert spec is not None
    assert (spec.dtype, spec.granularity, spec.qscheme) == (
        torch.int4,
        PerTensorGranularity(),
        QuantizationScheme.ASYMMETRIC,
    )
    assert spec.range_calculator_cls is MSERangeCalculator
    assert module.op_output_spec == OFF


def test_fp8_activations_are_per_tensor_and_calibrated() -> None:
    module = ModuleQuantizerConfig.presets.fp8()
    assert module.op_input_spec is not None
    assert module.op_input_spec == module.op_output_spec
    spec = module.op_input_spec["*"]
    assert spec is not None
    assert (spec.dtype, spec.granularity) == (FP8, PerTensorGranularity())
    assert spec.qparam_calculator_cls is MovingAverageQParamsCalculator


@pytest.mark.parametrize("per_token", [True, False])
def test_dynamic_inputs_need_no_calibration_and_outputs_stay_in_float(per_token: bool) -> None:
    module = ModuleQuantizerConfig.presets.w8a8_dynamic(per_token=per_token)
    assert module.op_input_spec is not None
    spec = module.op_input_spec["*"]
    assert spec is not None
    assert spec.qparam_calculator_cls is DynamicQParamsCalculator
    assert spec.granularity == (PerTokenGranularity() if per_token else PerTensorGranularity())
    assert module.op_output_spec == OFF


@pytest.mark.parametrize(("name", "dtype"), [("mxfp8", FP8), ("mxfp4", FP4)])
def test_microscaling_inputs_are_blocks_of_32_along_the_last_axis(name: str, dtype: torch.dtype) -> None:
    module = getattr(ModuleQuantizerConfig.presets, name)(activations=True)
    spec = module.op_input_spec["*"]
    assert (spec.dtype, spec.scale_dtype) == (dtype, E8M0)
    assert spec.granularity == PerBlockGranularity(axis=-1, block_size=32)
    assert spec.qparam_calculator_cls is DynamicQParamsCalculator


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("name", list(WEIGHTS))
def test_axis_is_the_weights(owner: Any, name: str) -> None:
    weight = module_of(getattr(owner.presets, name)(axis=1)).op_state_spec["weight"]
    assert weight.granularity.axis == 1


@pytest.mark.parametrize("owner", OWNERS)
def test_block_size(owner: Any) -> None:
    for config in (owner.presets.w4_per_block(block_size=64), owner.presets.w4a8(block_size=64)):
        weight = module_of(config).op_state_spec["weight"]
        assert weight.granularity == PerBlockGranularity(block_size=64)
        assert weight.dtype is torch.int4


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_both_classes_offer_the_same(name: str) -> None:
    whole = getattr(QuantizerConfig.presets, name)()
    assert whole == QuantizerConfig(global_config=getattr(ModuleQuantizerConfig.presets, name)())
    assert whole.execution_mode is ExecutionMode.GRAPH
    eager = getattr(QuantizerConfig.presets, name)(execution_mode=ExecutionMode.EAGER)
    assert eager == whole.set_execution_mode("eager")


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_calls_give_independent_configs(name: str) -> None:
    first, second = (getattr(QuantizerConfig.presets, name)() for _ in range(2))
    first.global_config.op_state_spec["bias"] = None
    assert first != second


def test_arguments_are_keywords_and_checked() -> None:
    with pytest.raises(TypeError):
        QuantizerConfig.presets.w8(0)  # type: ignore[misc]
    with pytest.raises(TypeError):
        ModuleQuantizerConfig.presets.w8(execution_mode="eager")  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        QuantizerConfig.presets.w4_per_block(block_size=0)


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_files(name: str) -> None:
    config = getattr(QuantizerConfig.presets, name)()
    assert QuantizerConfig.from_yaml(config.to_yaml()) == config
    assert QuantizerConfig.from_json(config.to_json()) == config


def test_presets_compose_with_setters() -> None:
    config = (
        QuantizerConfig.presets.w4()
        .set_module_type(nn.Embedding, ModuleQuantizerConfig.presets.w8())
        .set_module_name("head", ModuleQuantizerConfig.presets.fp8())
        .without(nn.LayerNorm)
    )
    assert config.module_type_configs is not None
    assert list(config.module_type_configs) == [
        "torch.nn.modules.sparse.Embedding",
        "torch.nn.modules.normalization.LayerNorm",
    ]
    assert config.module_name_configs == {"head": ModuleQuantizerConfig.presets.fp8()}
