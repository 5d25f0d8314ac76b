"""Finalizing for Core ML: rounded dense weights, metadata, torch's quantize calls. Needs nothing but torch."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from bitwright.common import CoreMLExportError, ExportBackend
from bitwright.export.targets import TARGETS
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity
from tests.artifact.strategies import weight_specs
from tests.measures import sqnr

from .models import CHANNEL, W8, ConvNet, Mlp, Tied, blocks, built, prepared


def _metadata(model, prefix):
    return {name.removeprefix(prefix): value for name, value in model.state_dict().items() if name.startswith(prefix)}


WEIGHTS = {
    "w8": W8,
    "w4": QuantizationSpec(dtype="int4", granularity=CHANNEL),
    "w4 blocks": QuantizationSpec(dtype="int4", granularity=blocks(8)),
    "uint8 asymmetric": QuantizationSpec(dtype="uint8", qscheme="asymmetric", granularity=CHANNEL),
    "uint4": QuantizationSpec(dtype="uint4", granularity=CHANNEL),
    "w8 clipped": QuantizationSpec(dtype="int8", qscheme="symmetric_with_clipping", granularity=CHANNEL),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_and_metadata(name):
    """The dense weight is what the prepared model computed, and the metadata gives back its codes exactly."""
    model, x = built(Mlp)
    quantizer, ready = prepared(model, x, WEIGHTS[name])
    expected, y = ready.up.weight.clone(), ready(x)
    final = quantizer.finalize(backend=ExportBackend.CoreML)
    assert torch.equal(final(x), y)
    assert torch.equal(final.up.weight, expected)
    meta = _metadata(final, "up._COREML_/weight/")
    assert meta["compression_type"].tolist() == [3]
    assert meta["quantization_n_bits"].item() == WEIGHTS[name].n_bits
    scale, zero = meta["quantization_scale"], meta["zero_point"]
    assert scale.ndim == expected.ndim
    for dim in range(2):
        repeats = expected.shape[dim] // scale.shape[dim]
        scale, zero = scale.repeat_interleave(repeats, dim), zero.repeat_interleave(repeats, dim)
    codes = torch.round(expected / scale) + zero
    low, high = (0, 2 ** WEIGHTS[name].n_bits - 1) if zero.dtype == torch.uint8 else (-128, 127)
    assert codes.min() >= low
    assert codes.max() <= high
    assert torch.equal((codes - zero) * scale, expected)
    assert final.state_dict()["_COREML_/metadata_version"].item() == 1


@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric", "symmetric_with_clipping"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_activations(dtype, scheme):
    """Also what saturates: the finalized model computes what the prepared one did, beyond the calibrated range too."""
    model, x = built(ConvNet)
    quantizer, ready = prepared(model, x, W8, QuantizationSpec(dtype=dtype, qscheme=scheme))
    inputs = (x, 5 * x, -7 * x)
    expected = [ready(value) for value in inputs]
    final = quantizer.finalize(backend="coreml")
    for value, y in zip(inputs, expected, strict=True):
        assert sqnr(y, final(value)) > 90
    assert {"quantize", "dequantize"} <= set(dict(final.fc.linear_quantize_input.named_children()))


def test_half_precision_activations():
    model, x = built(Mlp, torch.float16)
    quantizer, ready = prepared(model, x, W8, QuantizationSpec())
    expected = ready(x)
    final = quantizer.finalize(backend="coreml")
    assert final(x).dtype == torch.float16
    assert sqnr(expected, final(x)) > 60


def test_tied_weights_stay_tied_and_all_owners_have_metadata():
    model, x = built(Tied)
    quantizer, ready = prepared(model, x, W8)
    y = ready(x)
    final = quantizer.finalize(backend="coreml")
    assert final.embed.weight is final.head.weight
    assert type(final.head).__name__ == "Linear"
    assert _metadata(final, "embed._COREML_/weight/").keys() == _metadata(final, "head._COREML_/weight/").keys()
    assert torch.equal(final(x), y)


@pytest.mark.parametrize("spare", [False, True])
def test_tied_weights_of_graphs_stay_tied(spare):
    """No dense copy stays under the other names of a weight, whether the forward reads them or not."""
    model, x = built(Tied)
    if spare:
        model.head.weight, model.spare = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 16, bias=False)
        model.spare.weight = model.embed.weight
    quantizer, ready = prepared(model, x, W8, mode="graph")
    y, dense = ready(x), ready.embed.weight.clone()
    final = quantizer.finalize(backend="coreml")
    assert final.embed.weight is (final.spare if spare else final.head).weight
    assert not torch.equal(final.embed.weight, dense)
    assert torch.equal(ready.embed.weight, dense)
    assert torch.equal(final(x), y)


class Words(nn.Module):
    """A table of vectors that the layer in front of the output reads too."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.table(tokens)))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_tied_table_is_stored_packed(mode, tmp_path):
    """Coremltools reads a tied weight's metadata under one of its names, whichever."""
    target = TARGETS["coreml"]
    if target.missing() is not None:
        pytest.skip(target.missing())
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 8), dtype=torch.int32)
    _, ready = prepared(Words().eval(), tokens, QuantizationSpec(dtype="int4", granularity=CHANNEL), mode=mode)
    package = target.write(ready, (tokens,), tmp_path / "m.mlpackage", {}, None)
    stored = sum(path.stat().st_size for path in package.rglob("weight.bin"))
    assert 64 * 32 / 2 < stored < 64 * 32 * 2, "not one table of int4 codes, nor two"


def test_arithmetic_with_sizes_is_no_call_while_tracing():
    """Sizes are tensors in ``torch.jit.trace``; the second addition is the one that is quantized there, too."""

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x):
            keep = x.size(1) + 0 - 1
            return (x + self.fc(x))[:, :keep] * (x.size(0) * 2)

    torch.manual_seed(0)
    model, x = Cut().eval(), torch.randn(3, 16)
    quantizer, ready = prepared(model, x, W8, QuantizationSpec())
    expected = ready(x)
    traced = torch.jit.trace(quantizer.finalize(backend="coreml"), (x,), check_trace=False)
    assert torch.equal(traced(x), expected)


REFUSED = {
    "int2": (QuantizationSpec(dtype="int2"), None),
    "uint2": (QuantizationSpec(dtype="uint2"), None),
    "int3": (QuantizationSpec(dtype="int3"), None),
    "fp8": (QuantizationSpec(dtype="float8_e4m3fn"), None),
    "fp4": (QuantizationSpec(dtype="float4_e2m1fn_x2", granularity=blocks(32)), None),
    "minval weight": (QuantizationSpec(qformulation="minval"), None),
    "int4 activation": (W8, QuantizationSpec(dtype="int4")),
    "fp8 activation": (W8, QuantizationSpec(dtype="float8_e5m2")),
    "activation per channel": (W8, QuantizationSpec(granularity=PerChannelGranularity(axis=-1))),
    "minval activation": (W8, QuantizationSpec(qformulation="minval")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_core_ml_lacks_is_refused_and_nothing_is_touched(name):
    weight, activation = REFUSED[name]
    model, x = built(Mlp)
    quantizer, ready = prepared(model, x, weight, activation)
    before, y = copy.deepcopy(ready.state_dict()), ready(x)
    with pytest.raises(CoreMLExportError, match=r"CoreML export does not support .*'(up|down)\."):
        quantizer.finalize(backend="coreml")
    after = ready.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(ready(x), y)


@settings(max_examples=25, deadline=None)
@given(weight_specs((32, 32)))
def test_random_specs_are_exported_exactly_or_refused(spec):
    """Never wrong, never another error."""
    model, x = built(Mlp)
    quantizer, ready = prepared(model, x, spec)
    y = ready(x)
    try:
        final = quantizer.finalize(backend="coreml")
    except CoreMLExportError:
        assert torch.equal(ready(x), y)
    else:
        assert torch.equal(final(x), y)


def test_dynamic_activations_are_refused():
    model, x = built(Mlp)
    quantizer, _ = prepared(model, x, W8, QuantizationSpec(qparam_calculator_cls="dynamic"))
    with pytest.raises(NotImplementedError, match="dynamic quantization"):
        quantizer.finalize(backend="coreml")


def test_a_second_finalize_is_refused():
    """The finalized model is no prepared model any more; it is not exported twice by mistake."""
    model, x = built(Mlp)
    quantizer, _ = prepared(model, x, W8)
    quantizer.finalize(backend="coreml")
    with pytest.raises(RuntimeError, match="must be prepared before finalization"):
        quantizer.finalize(backend="coreml")


def test_finalize_while_calibrating_is_refused():
    model, x = built(Mlp)
    quantizer, _ = prepared(model, x, W8)
    with quantizer.calibration_mode(), pytest.raises(RuntimeError, match="calibrat"):
        quantizer.finalize(backend="coreml")


class Scaled(nn.Module):
    """A layer behind a product with a number, which the forward makes a tensor without dimensions of."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(x * torch.tensor(5.7, dtype=x.dtype))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_quantized_numbers_without_dimensions_are_converted(mode, tmp_path):
    """Coremltools folds the quantization of a constant into an op that takes no scalars."""
    target = TARGETS["coreml"]
    if target.missing() is not None:
        pytest.skip(target.missing())
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    quantizer, ready = prepared(Scaled().eval(), x, W8, QuantizationSpec(), mode)
    expected = ready(x)
    assert target.write(ready, (x,), tmp_path / "m.mlpackage", {}, None).exists()
    assert sqnr(expected, quantizer.finalize(backend="coreml")(x)) > 120


@pytest.mark.parametrize(
    ("granularity", "remedy"),
    [
        (PerChannelGranularity(axis=-1), "Use ExportBackend.CoreAI"),
        (PerBlockGranularity(axis=-1, block_size=16), "Use PerTensorGranularity"),
    ],
)
def test_the_advice_for_an_activation_is_one_that_works(granularity, remedy):
    """Core AI takes activations by channel, and no blocks either."""
    spec = QuantizationSpec(granularity=granularity)
    where = ModuleQuantizerConfig(op_state_spec=None, op_input_spec={"*": spec}, op_output_spec=None)
    for mode in ("eager", "graph"):
        quantizer = Quantizer(nn.Linear(32, 8), QuantizerConfig(global_config=where, execution_mode=mode))
        quantizer.prepare((torch.randn(2, 32),))
        with pytest.raises(CoreMLExportError, match=rf"Granularity on activation '.*'\. {remedy}"):
            quantizer.finalize(backend=ExportBackend.CoreML)
