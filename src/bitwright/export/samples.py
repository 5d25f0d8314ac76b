"""Typical specs, and small weights that are compressed as a spec says."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from bitwright.artifact import CompressedTensor, compress_tensor
from bitwright.artifact.sites import weight_sites
from bitwright.config.spec import CompressionSpec, CompressionTargetTensor
from bitwright.palettization import PalettizationSpec
from bitwright.palettization.spec import PerGroupedChannelGranularity
from bitwright.pruning import PruningSpec
from bitwright.quantization.spec import (
    PerBlockGranularity,
    PerChannelGranularity,
    PerTokenGranularity,
    QuantizationComponentFactory,
    QuantizationSpec,
)

__all__ = ["SAMPLES", "sample_weight"]

_CHANNEL = PerChannelGranularity(axis=0)
_INPUTS = PerChannelGranularity(axis=1)
_BLOCKS = PerBlockGranularity(axis=1, block_size=32)
_SQUARE = PerBlockGranularity(block_size=(32, 32))
_POWERS = "float8_e8m0fnu"


def _q(dtype: str, granularity: Any = None, **fields: Any) -> tuple[CompressionSpec, ...]:
    where = {} if granularity is None else {"granularity": granularity}
    return (QuantizationSpec(dtype=dtype, **where, **fields),)


def _p(**fields: Any) -> tuple[CompressionSpec, ...]:
    return (PalettizationSpec(**fields),)


_HALF = PruningSpec(target_sparsity=0.75)

SAMPLES: tuple[tuple[str, str, tuple[CompressionSpec, ...]], ...] = (
    *((f"{dtype}, per channel", "weight", _q(dtype, _CHANNEL))
      for dtype in ("int8", "uint8", "int7", "int6", "int5", "int4", "uint4", "int3", "int2", "uint2", "int1")),
    ("int8, per tensor", "weight", _q("int8")),
    ("int8, per channel of the input", "weight", _q("int8", _INPUTS)),
    ("int8, per channel, asymmetric", "weight", _q("int8", _CHANNEL, qscheme="asymmetric")),
    ("int4, blocks of 32", "weight", _q("int4", _BLOCKS)),
    ("int4, blocks of 32, asymmetric", "weight", _q("int4", _BLOCKS, qscheme="asymmetric")),
    ("uint4, blocks of 32, minval", "weight", _q("uint4", _BLOCKS, qformulation="minval", qscheme="asymmetric")),
    ("int8, blocks of 32 × 32", "weight", _q("int8", _SQUARE)),
    ("float8_e4m3fn, per channel", "weight", _q("float8_e4m3fn", _CHANNEL)),
    ("float8_e5m2, per channel", "weight", _q("float8_e5m2", _CHANNEL)),
    ("float8_e4m3fn, blocks of 32, power-of-two scales", "weight", _q("float8_e4m3fn", _BLOCKS, scale_dtype=_POWERS)),
    ("float4_e2m1fn, blocks of 32, power-of-two scales", "weight", _q("float4_e2m1fn", _BLOCKS, scale_dtype=_POWERS)),
    *((f"palette of {bits} bits", "weight", _p(n_bits=bits)) for bits in (8, 6, 4, 3, 2, 1)),
    ("palette of 4 bits, groups of 4 channels", "weight",
     _p(n_bits=4, granularity=PerGroupedChannelGranularity(axis=0, group_size=4))),
    ("palette of 4 bits, vectors of 2", "weight", _p(n_bits=4, cluster_dim=2)),
    ("palette of 4 bits, int8 tables", "weight", _p(n_bits=4, lut_qspec=QuantizationSpec(dtype="int8"))),
    ("palette of 4 bits, float8_e4m3fn tables", "weight",
     _p(n_bits=4, lut_qspec=QuantizationSpec(dtype="float8_e4m3fn"))),
    ("palette of 4 bits, float8_e5m2 tables, power-of-two scales", "weight",
     _p(n_bits=4, lut_qspec=QuantizationSpec(dtype="float8_e5m2", scale_dtype=_POWERS))),
    ("palette of 4 bits, channel scales", "weight", _p(n_bits=4, enable_per_channel_scale=True)),
    ("pruned to 75 %", "weight", (_HALF,)),
    ("pruned to 75 %, int8 per channel", "weight", (_HALF, *_q("int8", _CHANNEL))),
    ("pruned to 75 %, palette of 4 bits", "weight", (_HALF, *_p(n_bits=4))),
    ("int8, per tensor", "activation", _q("int8")),
    ("uint8, per tensor, asymmetric", "activation", _q("uint8", qscheme="asymmetric")),
    ("int8, per tensor, minval", "activation", _q("int8", qformulation="minval")),
    ("int4, per tensor", "activation", _q("int4")),
    ("int8, per channel", "activation", _q("int8", PerChannelGranularity(axis=-1))),
    ("int8, per token, dynamic", "activation", _q("int8", PerTokenGranularity(), qparam_calculator_cls="dynamic")),
    ("int8, per tensor, dynamic", "activation", _q("int8", qparam_calculator_cls="dynamic")),
    ("int8, blocks of 32", "activation", _q("int8", PerBlockGranularity(axis=-1, block_size=32))),
    ("float8_e4m3fn, per tensor", "activation", _q("float8_e4m3fn")),
    ("float8_e5m2, per tensor", "activation", _q("float8_e5m2")),
    ("float4_e2m1fn, blocks of 32, power-of-two scales", "activation",
     _q("float4_e2m1fn", PerBlockGranularity(axis=-1, block_size=32), scale_dtype=_POWERS)),
    ("float4_e2m1fn, blocks of 32, power-of-two scales, dynamic", "activation",
     _q("float4_e2m1fn", PerBlockGranularity(axis=-1, block_size=32), scale_dtype=_POWERS,
        qparam_calculator_cls="dynamic")),
    ("float8_e4m3fn, blocks of 32, power-of-two scales, dynamic", "activation",
     _q("float8_e4m3fn", PerBlockGranularity(axis=-1, block_size=32), scale_dtype=_POWERS,
        qparam_calculator_cls="dynamic")),
)  # fmt: skip
"""Label, kind and specs of the capability table's rows."""


def sample_weight(specs: tuple[CompressionSpec, ...], shape: tuple[int, ...], dtype: str) -> CompressedTensor[Any]:
    """Return a random weight under the simulators of ``specs``, compressed.

    Args:
        specs: in the order of use, axes and blocks resolved.
        shape: sizes of the weight.
        dtype: name of its dtype.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    if len(specs) == 1 and isinstance(specs[0], QuantizationSpec):
        simulator = QuantizationComponentFactory.create_fake_quantizer(specs[0], CompressionTargetTensor.WEIGHT)
        simulator(weight)
        simulator.disable_observer()
        return compress_tensor(weight, [simulator], "weight")
    model = _layer(weight)
    for spec in specs:
        model = _prepared(model, spec)
    site = weight_sites(model)[0]
    return compress_tensor(site.tensor, site.simulators, "weight")


def _layer(weight: torch.Tensor) -> nn.Module:
    """A linear layer or a convolution with this weight."""
    if not 2 <= weight.ndim <= 5:
        weight = weight.reshape(len(weight), -1)
    outputs, inputs, *kernel = weight.shape
    model: nn.Module = nn.Linear(inputs, outputs, bias=False)
    if kernel:
        kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
        model = kinds[len(kernel)](inputs, outputs, tuple(kernel), bias=False)  # type: ignore[arg-type]
    model.weight = nn.Parameter(weight)
    return model


def _prepared(model: nn.Module, spec: CompressionSpec) -> nn.Module:
    from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig, ModuleKMeansPalettizerConfig
    from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig
    from bitwright.quantization import ModuleQuantizerConfig, Quantizer, QuantizerConfig

    where: Any = {"weight": copy.copy(spec)}
    held = cast("torch.Tensor", model.weight)
    x = (torch.zeros(1, *held.shape[1:], dtype=held.dtype),)
    if isinstance(spec, PruningSpec):
        pruner = MagnitudePruner(
            model, MagnitudePrunerConfig(global_config=ModuleMagnitudePrunerConfig(op_state_spec=where))
        )
        pruner.prepare(x)
        return pruner.finalize(backend="_torch")
    if isinstance(spec, PalettizationSpec):
        module = ModuleKMeansPalettizerConfig(op_state_spec=where, enable_fast_kmeans_mode=False)
        return KMeansPalettizer(model, KMeansPalettizerConfig(global_config=module)).prepare(x)
    config = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec=where)
    return Quantizer(model, QuantizerConfig(global_config=config, execution_mode="eager")).prepare(x)
