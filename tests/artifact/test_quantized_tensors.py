"""Packed weights decode to what the simulator computes, and take the bytes that the plan predicts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from bitwright.artifact import ArtifactError, DenseTensor, QuantizedTensor, compress_tensor
from bitwright.config.spec import CompressionTargetTensor
from bitwright.formats import format_of
from bitwright.planning.packed_sizes import quantized_bytes
from bitwright.quantization.spec import PerChannelGranularity, QuantizationSpec
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase, _DefaultFakeQuantizeImpl

from .strategies import observed, quantized_weights


@settings(max_examples=120, deadline=None)
@given(quantized_weights())
def test_decodes_to_what_the_simulator_computes(case):
    """Every format, scheme, formulation, granularity and dtype: bit for bit."""
    weight, _, simulator = case
    packed = compress_tensor(weight, [simulator], "w")
    assert packed.dtype == weight.dtype
    assert torch.equal(packed.decode(), simulator(weight))
    packed.check_values()


@settings(max_examples=60, deadline=None)
@given(quantized_weights())
def test_decodes_by_the_formula_in_float64(case):
    """An independent decoder, element by element in float64, gives the same values up to float32 rounding."""
    weight, spec, simulator = case
    packed = compress_tensor(weight, [simulator], "w")
    layout, codes, scale = packed.layout, packed.codes().double(), packed.scale().double()
    block = torch.tensor(layout.block_size)
    where = torch.stack(torch.meshgrid(*map(torch.arange, weight.shape), indexing="ij"), -1) // block
    index = tuple(where.unbind(-1))
    if spec.dtype.is_floating_point:
        expected = codes * scale[index]
    elif spec.qformulation == "minval":
        expected = (codes - layout.quant_min) * scale[index] + packed.minval().double()[index]
    else:
        expected = (codes - packed.zero_point().double()[index]) * scale[index]
    tolerance = 2 * torch.finfo(weight.dtype).eps * max(1e-30, float(expected.abs().max()))
    assert torch.allclose(packed.decode().double(), expected, rtol=0, atol=tolerance)
    assert packed.zero_point() is None or packed.zero_point().shape == scale.shape


@settings(max_examples=120, deadline=None)
@given(quantized_weights())
def test_takes_the_bytes_that_the_plan_predicts(case):
    weight, spec, simulator = case
    packed = compress_tensor(weight, [simulator], "w")
    block = spec.granularity.get_block_size(tuple(weight.shape), CompressionTargetTensor.WEIGHT)
    assert packed.nbytes == sum(part.nbytes for part in packed.parts.values())
    assert packed.nbytes == quantized_bytes(spec, tuple(weight.shape), block, weight.dtype)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_n_bits_take_n_bits(bits):
    weight = torch.randn(8, 24)
    spec = QuantizationSpec(dtype=f"int{bits}", granularity=PerChannelGranularity(axis=0))
    packed = compress_tensor(weight, [observed(spec, weight)], "w")
    assert packed.parts["codes"].nbytes == math.ceil(weight.numel() * bits / 8)
    assert format_of(packed.layout.format).bits == bits


def test_a_weight_with_nan_is_refused_by_name():
    weight = torch.randn(4, 4)
    simulator = observed(QuantizationSpec(), weight)
    weight[1, 2] = float("nan")
    with pytest.raises(ArtifactError, match=r"'fc\.weight' holds NaN"):
        compress_tensor(weight, [simulator], "fc.weight")


def test_switched_off_simulators_are_exported_as_if_on():
    """Compression is what export is for; a switch that was left off must not write a dense weight as compressed."""
    weight = torch.randn(4, 8)
    simulator = observed(QuantizationSpec(dtype="int4"), weight)
    expected = simulator(weight)
    simulator.disable_fake_quant()
    assert torch.equal(compress_tensor(weight, [simulator], "w").decode(), expected)


class _Doubling(_DefaultFakeQuantizeImpl):
    """A custom simulator that computes something else than its base class."""

    def _fake_quantize(self, tensor, scale, zero_point, minval):
        return 2 * super()._fake_quantize(tensor, scale, zero_point, minval)


def test_a_simulator_that_no_form_fits_is_refused():
    """What is stored always decodes to what the model computes; otherwise nothing is stored."""
    FakeQuantizeImplBase.REGISTRY["test_doubling"] = _Doubling
    try:
        weight = torch.randn(4, 8)
        simulator = observed(QuantizationSpec(fake_quantize_cls="test_doubling"), weight)
        with pytest.raises(ArtifactError, match=r"'w': what _Doubling computes is not what its codes"):
            compress_tensor(weight, [simulator], "w")
    finally:
        del FakeQuantizeImplBase.REGISTRY["test_doubling"]


def test_a_disabled_simulator_leaves_the_weight_dense():
    """A quantizer that took itself out of use, because its blocks do not divide, stores the weight as it is."""
    weight = torch.randn(4, 8)
    simulator = observed(QuantizationSpec(), weight)
    simulator._set_switch("_disabled", True)
    packed = compress_tensor(weight, [simulator], "w")
    assert isinstance(packed, DenseTensor)
    assert torch.equal(packed.decode(), weight)


def test_parts_that_do_not_fit_the_layout_are_refused():
    weight = torch.randn(4, 8)
    packed = compress_tensor(weight, [observed(QuantizationSpec(dtype="int4"), weight)], "w")
    for broken in (
        {"codes": packed.parts["codes"]},
        {**packed.parts, "extra": torch.zeros(1)},
        {**packed.parts, "codes": packed.parts["codes"][1:]},
        {**packed.parts, "scale": packed.parts["scale"].double()},
    ):
        with pytest.raises(ArtifactError):
            QuantizedTensor(packed.layout, broken)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_no_scales_are_found(value):
    weight = torch.randn(4, 8)
    packed = compress_tensor(weight, [observed(QuantizationSpec(), weight)], "w")
    bad = QuantizedTensor(packed.layout, {**packed.parts, "scale": torch.full_like(packed.parts["scale"], value)})
    with pytest.raises(ArtifactError, match="scale"):
        bad.check_values()


def test_codes_outside_a_clipped_range_are_found():
    weight = torch.randn(4, 8)
    packed = compress_tensor(weight, [observed(QuantizationSpec(qscheme="symmetric_with_clipping"), weight)], "w")
    bad = QuantizedTensor(packed.layout, {**packed.parts, "codes": torch.full((4, 8), -128, dtype=torch.int8)})
    with pytest.raises(ArtifactError, match="code"):
        bad.check_values()
