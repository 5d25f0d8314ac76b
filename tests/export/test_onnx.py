"""ONNX files run in ONNX Runtime and give what the prepared model computes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx

from bitwright.export.conversion import ConversionError
from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.export.onnx.nbits import nbits_operands
from bitwright.export.onnx.runtime import open_session
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity, PerTokenGranularity
from tests.artifact.strategies import weight_specs
from tests.matrix import each_pair
from tests.measures import sqnr

from .models import (
    CHANNEL,
    JOINT,
    PALETTES,
    W8,
    ConvNet,
    Deconv,
    Mlp,
    Tied,
    blocks,
    built,
    palettized,
    prepared,
    pruned_and_compressed,
    spec_of,
)

ENOUGH_DB = 60


WEIGHTS = {
    **{name: (ConvNet, spec_of(name)) for name in ("int8", "uint8", "int4", "uint4", "int2", "uint3", "int6", "int1")},
    "int8 asymmetric": (ConvNet, spec_of("int8", qscheme="asymmetric")),
    "uint4 asymmetric": (ConvNet, spec_of("uint4", qscheme="asymmetric")),
    "int8 per tensor": (ConvNet, QuantizationSpec(dtype="int8")),
    "int4 blocks": (Mlp, spec_of("int4", blocks(32))),
    "int4 blocks of channels": (Deconv, spec_of("int4", blocks(4, axis=0))),
    "int8 square blocks": (Mlp, spec_of("int8", PerBlockGranularity(block_size=(32, 32)))),
    "int4 minval": (ConvNet, spec_of("int4", qformulation="minval")),
    "uint8 minval per tensor": (ConvNet, QuantizationSpec(dtype="uint8", qformulation="minval")),
    "int4 minval blocks": (Mlp, spec_of("int4", blocks(32), qformulation="minval")),
    "fp8": (ConvNet, spec_of("float8_e4m3fn")),
    "fp8 wide": (ConvNet, spec_of("float8_e5m2")),
    "mxfp8": (Mlp, spec_of("float8_e4m3fn", blocks(32), scale_dtype="float8_e8m0fnu")),
    "fp4": (Mlp, spec_of("float4_e2m1fn_x2", blocks(32))),
}


def _exported(ready, x, tmp_path, **options):
    return export_onnx(ready, (x,), tmp_path / "model.onnx", **options)


QUICK = ["int8", "uint3", "int4 blocks", "int4 minval blocks", "int8 square blocks", "fp8", "fp4"]


def _quick(names, quick):
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", _quick(WEIGHTS, QUICK))
def test_weights(name, tmp_path):
    """Equal up to the order of float additions, with and without ONNX Runtime's graph optimizations."""
    kind, spec = WEIGHTS[name]
    model, x = built(kind)
    _, ready = prepared(model, x, spec)
    path = _exported(ready, x, tmp_path)
    for optimize in (False, True):
        assert sqnr(ready(x), run_onnx(path, (x,), optimize=optimize)[0]) > 120


ACTIVATIONS = {
    f"{dtype} {scheme} {formulation}": QuantizationSpec(dtype=dtype, qscheme=scheme, qformulation=formulation)
    for dtype in ("int8", "uint8", "int4")
    for scheme in ("symmetric", "asymmetric", "symmetric_with_clipping")
    for formulation in ("zp", "minval")
} | {
    "fp8": QuantizationSpec(dtype="float8_e4m3fn"),
    "fp8 wide": QuantizationSpec(dtype="float8_e5m2"),
}


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    "name",
    _quick(ACTIVATIONS, ["int8 symmetric zp", "uint8 asymmetric zp", "int4 symmetric_with_clipping minval", "fp8"]),
)
def test_activations(name, mode, tmp_path):
    """The codes of the output are those of the prepared model, also for inputs beyond the calibrated range.

    A float sum in another order may put a value on the other side of a rounding bound, which moves a code by one; that
    may happen to a few codes, and no more.
    """
    model, x = built(ConvNet)
    _, ready = prepared(model, x, W8, ACTIVATIONS[name], mode)
    path = _exported(ready, x, tmp_path)
    for inputs in (x, 4 * x):
        expected = ready(inputs)
        step = (expected.max() - expected.min()) / 200
        for optimize in (False, True):
            found = run_onnx(path, (inputs,), optimize=optimize)[0]
            if sqnr(expected, found) < ENOUGH_DB:
                assert float((expected - found).abs().max()) <= 4 * step
                assert float(((expected - found).abs() > 1e-5).float().mean()) < 0.35
            assert sqnr(expected, found) > 25


OTHERS = {
    "per channel": QuantizationSpec(granularity=PerChannelGranularity(axis=-1)),
    "dynamic": QuantizationSpec(qparam_calculator_cls="dynamic"),
    "dynamic asymmetric": QuantizationSpec(qparam_calculator_cls="dynamic", qscheme="asymmetric", dtype="uint8"),
    "dynamic per token": QuantizationSpec(qparam_calculator_cls="dynamic", granularity=PerTokenGranularity()),
    "blocks": QuantizationSpec(granularity=PerBlockGranularity(axis=-1, block_size=32)),
    "fp8 blocks": QuantizationSpec(dtype="float8_e4m3fn", granularity=PerBlockGranularity(axis=-1, block_size=32)),
    "fp4 blocks": QuantizationSpec(dtype="float4_e2m1fn_x2", granularity=PerBlockGranularity(axis=-1, block_size=32)),
}


@pytest.mark.parametrize("name", _quick(OTHERS, ["per channel", "dynamic asymmetric", "fp4 blocks"]))
def test_activations_that_become_arithmetic(name, tmp_path):
    """What quantize nodes cannot hold is written as plain operators, and is as exact."""
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8, OTHERS[name])
    path = _exported(ready, x, tmp_path)
    for optimize in (False, True):
        assert sqnr(ready(x), run_onnx(path, (x,), optimize=optimize)[0]) > ENOUGH_DB


class Sum(nn.Module):
    """An addition of two layers, for which ONNX Runtime has an integer operator with one scale for each operand."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return torch.add(self.one(x), self.two(x))


def test_activations_per_channel_load_in_a_default_session(tmp_path):
    torch.manual_seed(0)
    model, x = Sum().eval(), torch.randn(3, 16)
    _, ready = prepared(model, x, W8, QuantizationSpec(dtype="uint8", granularity=PerChannelGranularity(axis=-1)))
    assert sqnr(ready(x), run_onnx(_exported(ready, x, tmp_path), (x,))[0]) > 35


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"])
def test_power_of_two_scales_are_computed_at_run_time(dtype, mode, tmp_path):
    """Microscaling formats; blocks of zeros, and numbers of all sizes, have the scales that PyTorch has."""
    model, x = built(Mlp)
    spec = QuantizationSpec(
        dtype=dtype,
        granularity=PerBlockGranularity(axis=-1, block_size=32),
        scale_dtype="float8_e8m0fnu",
        qparam_calculator_cls="dynamic",
    )
    _, ready = prepared(model, x, W8, spec, mode)
    path = _exported(ready, x, tmp_path)
    for other in (x, x * 1e-30, x * 3e30, x * torch.tensor([0, 1]).repeat_interleave(32)):
        assert sqnr(ready(other), run_onnx(path, (other,))[0]) > 100


def test_pruned_weights_with_zero_points_are_transposed_right(tmp_path):
    """Dropped entries stay zero in a weight that the exporter turns around."""
    model, x = built(Mlp)
    x = x.reshape(2, 2, 64)
    for scheme in ("asymmetric", "symmetric"):
        for formulation in ("zp", "minval"):
            _, other = pruned_and_compressed(model, x, spec_of("uint3", qscheme=scheme, qformulation=formulation))
            assert sqnr(other(x), run_onnx(_exported(other, x, tmp_path), (x,))[0]) > 110


@pytest.mark.parametrize(
    ("dtype", "scheme", "rank"), [("int4", "symmetric", 2), ("int4", "asymmetric", 3), ("uint4", "asymmetric", 2)]
)
def test_matmul_nbits(dtype, scheme, rank, tmp_path):
    """Linear layers with 4-bit blocks become ONNX Runtime's own operator, which computes the same."""
    model, x = built(Mlp)
    x = x if rank == 2 else x.reshape(2, 2, 64)
    _, ready = prepared(model, x, spec_of(dtype, blocks(32), qscheme=scheme))
    path = _exported(ready, x, tmp_path, int4="matmul_nbits")
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("MatMulNBits") == 2
    assert not {"MatMul", "Gemm", "DequantizeLinear"} & set(kinds)
    assert sqnr(ready(x), run_onnx(path, (x,))[0]) > 100
    assert path.stat().st_size < 0.35 * sum(p.nbytes for p in model.parameters()) + 4000


class Returning(nn.Module):
    """A layer and its weight."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs, self.layer = outputs, nn.Linear(64, 32)

    def forward(self, x):
        return self.outputs(x, self.layer)


RETURNED = {
    "beside a layer": lambda x, layer: (layer(x), layer.weight),
    "beside a product": lambda x, layer: (x @ layer.weight.t(), layer.weight),
    "transposed": lambda x, layer: (x @ layer.weight.t(), layer.weight.t()),
}


@pytest.mark.parametrize(
    ("mode", "outputs", "int4"), each_pair(["eager", "graph"], list(RETURNED), ["qdq", "matmul_nbits"])
)
def test_weights_that_are_outputs(mode, outputs, int4, tmp_path):
    """They stay in the file beside what multiplies with them."""
    x = torch.randn(3, 64)
    model = Returning(RETURNED[outputs]).eval()
    ready = Quantizer(model, QuantizerConfig.presets.w4(execution_mode=mode)).prepare((x,))
    path = _exported(ready, x, tmp_path, int4=int4)
    for expected, found in zip(ready(x), run_onnx(path, (x,)), strict=True):
        assert sqnr(expected, found) > 90


def test_matmul_nbits_operands_follow_the_operators_definition():
    """Codes unpack to ``(code - zero point) * scale`` by the rules of the operator's documentation."""
    model, x = built(Mlp)
    _, ready = prepared(model, x, spec_of("int4", blocks(32), qscheme="asymmetric"))
    from bitwright.artifact import Artifact

    tensor = Artifact.from_model(ready)["up.weight"]
    codes, scale, points = nbits_operands(tensor)
    outputs, groups = tensor.layout.counts
    low, high = codes & 15, codes >> 4
    unpacked = torch.stack([low, high], -1).reshape(outputs, groups, 32).float()
    zero = torch.stack([points & 15, points >> 4], -1).reshape(outputs, -1)[:, :groups].float()
    values = (unpacked - zero[..., None]) * scale.reshape(outputs, groups, 1)
    assert torch.equal(values.reshape(tensor.shape), tensor.decode())


def test_dynamic_shapes_are_kept(tmp_path):
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8, QuantizationSpec())
    path = _exported(ready, x, tmp_path, dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (1, 4, 9):
        inputs = torch.randn(batch, 64)
        assert sqnr(ready(inputs), run_onnx(path, (inputs,))[0]) > ENOUGH_DB


class StepByStep(nn.Module):
    """Its loop over the steps of a sequence has one length in a program."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.stack([self.layer(x[:, step]) for step in range(x.shape[1])], 1)


class WithPositions(nn.Module):
    """A table of positions bounds the length."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.positions = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        return self.layer(x) + self.positions[: x.shape[1]]


def test_dynamic_sizes_that_a_program_fixes_are_refused(tmp_path):
    """torch.onnx would write a file that takes the example's length alone."""
    torch.manual_seed(0)
    model, x = StepByStep().eval(), torch.randn(2, 5, 8)
    _, ready = prepared(model, x, W8)
    with pytest.raises(ConversionError, match=r"Constraints violated \(length\)"):
        _exported(ready, x, tmp_path, dynamic_shapes=({1: torch.export.Dim("length")},))


@pytest.mark.parametrize("calculator", ["static", "dynamic"])
def test_sizes_that_calibrated_blocks_fix_are_named(calculator, tmp_path):
    """The message says which size has one value, and to compute parameters at run time, where they fix none."""
    x, blocks = torch.randn(2, 3, 8), PerBlockGranularity(axis=-1, block_size=4)
    fp4 = QuantizationSpec(dtype="float4_e2m1fn_x2", granularity=blocks, qparam_calculator_cls=calculator)
    config = ModuleQuantizerConfig(op_input_spec={"*": fp4}, op_output_spec=None, op_state_spec=None)
    ready = Quantizer(nn.Linear(8, 8).eval(), QuantizerConfig(global_config=config)).prepare((x,))
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    if calculator == "static":
        with pytest.raises(ConversionError, match=r"shape\[0\] is 2 and nothing else.*qparam_calculator_cls='dynamic'"):
            _exported(ready, x, tmp_path, dynamic_shapes=shapes)
    else:
        path = _exported(ready, x, tmp_path, dynamic_shapes=shapes)
        other = torch.randn(5, 3, 8)
        torch.testing.assert_close(run_onnx(path, (other,))[0], ready(other))


class InBlocks(nn.Module):
    """Attends within blocks of four, as LongT5; other lengths are padded."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        rest = -x.shape[1] % 4
        padded = nn.functional.pad(x, (0, 0, 0, rest)) if rest else x
        blocks = padded.unflatten(1, (-1, 4))
        return self.layer(blocks - blocks.mean(2, keepdim=True)).flatten(1, 2)[:, : x.shape[1]]


def test_dynamic_sizes_that_a_program_makes_multiples_are_refused(tmp_path):
    """torch.onnx would write a file for multiples alone; asked for those, other sizes are told before the file runs."""
    torch.manual_seed(0)
    model, x = InBlocks().eval(), torch.randn(2, 8, 8)
    _, ready = prepared(model, x, W8)
    with pytest.raises(ConversionError, match=r"as torch.export suggests \(_length = Dim\('_length', .*length = 4\*_"):
        _exported(ready, x, tmp_path, dynamic_shapes=({1: torch.export.Dim("length", max=64)},))
    path = _exported(ready, x, tmp_path, dynamic_shapes=({1: 4 * torch.export.Dim("blocks", max=16)},))
    longer = torch.randn(2, 12, 8)
    assert sqnr(ready(longer), run_onnx(path, (longer,))[0]) > ENOUGH_DB
    with pytest.raises(ConversionError, match="size 11 of dimension 1 of x is no multiple of 4"):
        run_onnx(path, (torch.randn(2, 11, 8),))


class AsLong(nn.Module):
    """Adds what has its length, and leaves out what has another."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, y):
        return self.layer(x) + (y if x.shape[1] == y.shape[1] else y.mean(1, keepdim=True))


def test_dynamic_sizes_that_a_program_makes_one_are_refused(tmp_path):
    """torch.onnx would write a file that has one branch for all lengths."""
    torch.manual_seed(0)
    example = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    ready = Quantizer(AsLong().eval(), QuantizerConfig.presets.w8(execution_mode="eager")).prepare(example).eval()
    dims = {name: torch.export.Dim(name, max=64) for name in ("one", "other")}
    with pytest.raises(ConversionError, match=r"as torch.export suggests \(other = one\)"):
        export_onnx(ready, example, tmp_path / "m.onnx", dynamic_shapes=({1: dims["one"]}, {1: dims["other"]}))
    shapes = ({1: dims["one"]}, {1: dims["one"]})
    path = export_onnx(ready, example, tmp_path / "m.onnx", dynamic_shapes=shapes)
    longer = torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    assert sqnr(ready(*longer), run_onnx(path, longer)[0]) > ENOUGH_DB


def test_dynamic_sizes_whose_range_a_program_narrows_are_kept(tmp_path):
    torch.manual_seed(0)
    model, x = WithPositions().eval(), torch.randn(2, 5, 8)
    _, ready = prepared(model, x, W8)
    path = _exported(ready, x, tmp_path, dynamic_shapes=({1: torch.export.Dim("length")},))
    for length in (3, 16):
        inputs = torch.randn(2, length, 8)
        assert sqnr(ready(inputs), run_onnx(path, (inputs,))[0]) > ENOUGH_DB


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((torch.randn(3, 8),), r"takes x: float\[2, 8\], got x: float32\[3, 8\].* dynamic_shapes"),
        ((torch.randn(2, 8, dtype=torch.float64),), r"got x: float64\[2, 8\]"),
        ((), r"takes x: float\[2, 8\], got 0 inputs"),
        ((torch.randn(2, 8), torch.randn(2)), "got 2 inputs"),
        ({"x": torch.randn(2, 8), "mask": torch.randn(2)}, "does not have: mask"),
    ],
)
def test_inputs_that_a_file_does_not_take(inputs, said, tmp_path):
    x = torch.randn(2, 8)
    _, ready = prepared(nn.Sequential(nn.Linear(8, 4)).eval(), x, W8)
    path = _exported(ready, x, tmp_path, input_names=["x"])
    with pytest.raises(ConversionError, match=said):
        run_onnx(path, inputs)


def test_the_smallest_opset_is_chosen_and_a_smaller_one_refused(tmp_path):
    model, x = built(Mlp)
    needs = {"int8": (CHANNEL, 18), "int4": (CHANNEL, 21), "float8_e4m3fn": (CHANNEL, 19)}
    for dtype, (granularity, opset) in needs.items():
        _, ready = prepared(model, x, spec_of(dtype, granularity))
        path = _exported(ready, x, tmp_path)
        assert [o.version for o in onnx.load(path).opset_import if o.domain == ""] == [opset]
    with pytest.raises(ValueError, match="needs ONNX opset 21, got opset=18"):
        _exported(prepared(model, x, spec_of("int4"))[1], x, tmp_path, opset=18)


def test_codes_in_the_file_are_those_of_the_artifact(tmp_path):
    """The initializers hold the packed codes themselves, four bits each."""
    from bitwright.artifact import Artifact

    model, x = built(Mlp)
    _, ready = prepared(model, x, spec_of("int4", blocks(32)))
    tensor = Artifact.from_model(ready)["up.weight"]
    stored = {i.name: i for i in onnx.load(_exported(ready, x, tmp_path)).graph.initializer}
    codes = next(i for name, i in stored.items() if name.startswith("up.weight") and name.endswith("quantized"))
    assert codes.data_type == onnx.TensorProto.INT4
    values = torch.from_numpy(onnx.numpy_helper.to_array(codes).astype("int8"))
    assert torch.equal(values.reshape(tensor.shape), tensor.codes())
    assert len(codes.raw_data) == tensor.parts["codes"].nbytes


@pytest.mark.parametrize("name", _quick(PALETTES, ["3 bits", "vectors in groups", "all together"]))
def test_palettes(name, tmp_path):
    """Look-up tables become Gather nodes; indices of up to 4 bits take 4."""
    model, x = built(Deconv)
    _, ready = palettized(model, x, **PALETTES[name])
    path = _exported(ready, x, tmp_path)
    assert sqnr(ready(x), run_onnx(path, (x,))[0]) > 110
    stored = {i.data_type for i in onnx.load(path).graph.initializer if i.name.endswith("indices")}
    small = PALETTES[name]["n_bits"] <= 4
    assert stored == {onnx.TensorProto.UINT4 if small else onnx.TensorProto.UINT8}


@pytest.mark.parametrize("name", _quick(JOINT, ["int4 asymmetric", "palette"]))
def test_pruned_and_compressed(name, tmp_path):
    model, x = built(Deconv)
    _, ready = pruned_and_compressed(model, x, JOINT[name])
    assert sqnr(ready(x), run_onnx(_exported(ready, x, tmp_path), (x,))[0]) > 110


def test_tied_weights_are_stored_once(tmp_path):
    model, x = built(Tied)
    _, ready = prepared(model, x, W8, QuantizationSpec())
    path = _exported(ready, x, tmp_path)
    assert sqnr(ready(x), run_onnx(path, (x,))[0]) > ENOUGH_DB
    initializers = onnx.load(path).graph.initializer
    assert len({i.name for i in initializers}) == len(initializers)
    assert [tuple(i.dims) for i in initializers if len(i.dims) == 2] == [(16, 16)] * 2


def test_half_precision(tmp_path):
    model, x = built(Mlp, torch.float16)
    _, ready = prepared(model, x, W8, QuantizationSpec())
    found = run_onnx(_exported(ready, x, tmp_path), (x,))[0]
    assert found.dtype == torch.float16
    assert sqnr(ready(x), found) > 35


def test_the_model_is_left_alone(tmp_path):
    model, x = built(ConvNet)
    for mode in ("eager", "graph"):
        _, ready = prepared(model, x, W8, QuantizationSpec(), mode)
        before, y = copy.deepcopy(ready.state_dict()), ready(x)
        _exported(ready, x, tmp_path)
        after = ready.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert torch.equal(ready(x), y)


def test_keyword_inputs_and_names(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x, factor=None):
            y = self.fc(x)
            return y if factor is None else y * factor

    model, x, factor = Scaled().eval(), torch.randn(2, 8), torch.randn(2, 4)
    from bitwright.quantization import Quantizer, QuantizerConfig

    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager"))
    ready = quantizer.prepare((x,), example_kwargs={"factor": factor})
    path = export_onnx(
        ready, (x,), tmp_path / "m.onnx", example_kwargs={"factor": factor}, input_names=["a", "b"], output_names=["c"]
    )
    session = open_session(path)
    assert [value.name for value in session.get_inputs()] == ["a", "b"]
    assert sqnr(ready(x, factor=factor), run_onnx(path, {"a": x, "b": factor})[0]) > 120


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weight_specs((32, 32)), st.sampled_from(["eager", "graph"]))
def test_random_weight_specs(tmp_path, spec, mode):
    """Every spec that can be prepared is exported right."""
    model, x = built(Mlp)
    _, ready = prepared(model, x, spec, mode=mode)
    assert sqnr(ready(x), run_onnx(_exported(ready, x, tmp_path), (x,))[0]) > 100


def test_unknown_options_are_refused(tmp_path):
    model, x = built(Mlp)
    with pytest.raises(ValueError, match="int4 must be"):
        _exported(prepared(model, x, W8)[1], x, tmp_path, int4="gptq")


class InChunks(nn.Module):
    """Three parts of a length that only the inputs tell."""

    def forward(self, x):
        first, _, last = x.chunk(3, 1)
        return first + 1, last * 2


def test_parts_of_a_dynamic_size_are_written(tmp_path):
    """onnxscript's optimizer fails at splits into parts of one computed length."""
    x = torch.randn(2, 9, 4)
    shapes = ({1: torch.export.Dim.DYNAMIC},)
    path = export_onnx(InChunks().eval(), (x,), tmp_path / "m.onnx", dynamic_shapes=shapes)
    for size in (9, 10, 7):
        x = torch.randn(2, size, 4)
        for found, expected in zip(run_onnx(path, (x,)), InChunks()(x), strict=True):
            assert torch.equal(found, expected)
