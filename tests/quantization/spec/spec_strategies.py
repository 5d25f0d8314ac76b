"""Hypothesis strategies for specs, and what several test modules build."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from bitwright.config.spec import CompressionTargetTensor
from bitwright.quantization.spec import FakeQuantizeImplBase, QuantizationComponentFactory, QuantizationSpec

WEIGHT = CompressionTargetTensor.WEIGHT
ACTIVATION = CompressionTargetTensor.ACTIVATION

INTEGERS = tuple(f"{sign}int{bits}" for bits in range(1, 9) for sign in ("", "u"))
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")


def fake_quantizer(target: CompressionTargetTensor = ACTIVATION, **fields: Any) -> FakeQuantizeImplBase:
    """Return a new simulator for ``QuantizationSpec(**fields)``."""
    return QuantizationComponentFactory.create_fake_quantizer(QuantizationSpec(**fields), target)


def calculator(target: CompressionTargetTensor = ACTIVATION, **fields: Any) -> Any:
    """Return a new qparams calculator for ``QuantizationSpec(**fields)``."""
    return QuantizationComponentFactory.create_qparams_calculator(QuantizationSpec(**fields), target)


granularities = st.one_of(
    st.just({"type": "per_tensor"}),
    st.just({"type": "per_token"}),
    st.builds(lambda axis: {"type": "per_channel", "axis": axis}, st.none() | st.integers(-4, 3)),
    st.builds(
        lambda axis, size: {"type": "per_block", "axis": axis, "block_size": size},
        st.none() | st.integers(-4, 3),
        st.integers(1, 64),
    ),
    st.builds(
        lambda sizes: {"type": "per_block", "block_size": sizes},
        st.lists(st.just(-1) | st.integers(1, 64), min_size=1, max_size=4),
    ),
)


@st.composite
def specs(draw: st.DrawFn) -> QuantizationSpec:
    """Draw a valid spec."""
    fields: dict[str, Any] = {
        "dtype": draw(st.sampled_from((*INTEGERS, *FLOATS))),
        "granularity": draw(granularities),
        "qparam_calculator_cls": draw(st.sampled_from(("default", "static", "moving_average", "global_minmax"))),
        "averaging_constant": draw(st.none() | st.floats(0.01, 1)),
        "float_range": [
            draw(st.none() | st.floats(-100, 0)),
            draw(st.none() | st.floats(0.5, 100)),
        ],
    }
    if fields["dtype"] in FLOATS:
        fields["scale_dtype"] = draw(st.sampled_from((None, "float8_e8m0fnu")))
    else:
        schemes = ["symmetric", "asymmetric", "symmetric_with_clipping"]
        fields["qscheme"] = draw(st.sampled_from(schemes[:2] if fields["dtype"] == "int1" else schemes))
        fields["qformulation"] = draw(st.sampled_from(("zp", "minval")))
    return QuantizationSpec(**fields)


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and values; NaN equals NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
