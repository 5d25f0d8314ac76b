"""Random specs and tensors for tests of artifacts and exporters."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from bitwright.config.spec import CompressionTargetTensor
from bitwright.quantization.spec import (
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    QuantizationComponentFactory,
    QuantizationSpec,
)

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9)]
FLOATS = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"]


@st.composite
def weights(draw, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    """A weight of one to four dimensions, also with equal, tiny, huge and zero channels."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    shape[-1] *= draw(st.sampled_from([1, 4, 8]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    tensor = torch.randn(shape, generator=generator) * draw(st.sampled_from([1.0, 1e-4, 30.0]))
    if draw(st.booleans()):
        tensor[0] = draw(st.sampled_from([0.0, 1.0, -2.5]))
    return tensor.to(draw(st.sampled_from(dtypes)))


@st.composite
def granularities(draw, shape):
    """A granularity that divides ``shape``."""
    kind = draw(st.sampled_from(["tensor", "channel", "block", "blocks"]))
    axis = draw(st.integers(0, len(shape) - 1))
    divisors = [d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]
    if kind == "tensor":
        return PerTensorGranularity()
    if kind == "channel":
        return PerChannelGranularity(axis=axis)
    if kind == "block":
        return PerBlockGranularity(axis=axis, block_size=draw(st.sampled_from(divisors)))
    return PerBlockGranularity(
        block_size=tuple(draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in shape)
    )


@st.composite
def weight_specs(draw, shape):
    """A quantization spec that fits a weight of ``shape``."""
    dtype = draw(st.sampled_from(INTEGERS + FLOATS))
    granularity = draw(granularities(shape))
    if dtype in FLOATS:
        power_of_two = dtype.startswith("float4") or draw(st.booleans())
        return QuantizationSpec(
            dtype=dtype, granularity=granularity, scale_dtype="float8_e8m0fnu" if power_of_two else None
        )
    schemes = ["symmetric", "asymmetric"] + (["symmetric_with_clipping"] if dtype not in ("int1", "uint1") else [])
    return QuantizationSpec(
        dtype=dtype,
        granularity=granularity,
        qscheme=draw(st.sampled_from(schemes)),
        qformulation=draw(st.sampled_from(["zp", "minval"])),
    )


@st.composite
def quantized_weights(draw):
    """A weight, its spec, and the simulator of it after it has observed the weight."""
    weight = draw(weights())
    spec = draw(weight_specs(tuple(weight.shape)))
    return weight, spec, observed(spec, weight)


def observed(spec, weight):
    """The simulator of a weight, observed once and then frozen."""
    simulator = QuantizationComponentFactory.create_fake_quantizer(spec, CompressionTargetTensor.WEIGHT)
    simulator(weight)
    simulator.disable_observer()
    return simulator
