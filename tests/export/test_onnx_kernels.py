"""Which kernels ONNX Runtime runs exported files on, and that none of them computes something else."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime

from bitwright.errors import ConfigMatchWarning
from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerChannelGranularity
from tests.measures import sqnr

from .models import BYTES, W8, ConvNet, Deconv, Mlp, blocks, built, palettized, prepared, spec_of

ENOUGH_DB = 60
BYTE_TYPES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)


def _exported(ready, x, tmp_path, **options):
    return export_onnx(ready, (x,), tmp_path / "model.onnx", **options)


def _quick(names, quick):
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


def _kinds_at_run_time(path):
    """Operators that ONNX Runtime makes of a file; a convolution with an activation is a convolution."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_name("optimized.onnx"))
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(path.with_name("optimized.onnx")).graph.node]
    return ["Conv" if kind == "FusedConv" else kind for kind in kinds]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_int8_models_run_on_integer_kernels(mode, tmp_path):
    """ONNX Runtime finds its integer convolutions and products in the file, not only dequantized float ones."""
    model, x = built(ConvNet)
    _, ready = prepared(model, x, W8, QuantizationSpec(), mode)
    kinds = _kinds_at_run_time(_exported(ready, x, tmp_path, integer_kernels="fused"))
    assert kinds.count("QLinearConv") == 2
    assert kinds.count("QGemm") + kinds.count("QLinearMatMul") == 2
    assert "Conv" not in kinds


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_small_models_have_exact_sums(mode, tmp_path):
    """In larger ones of narrow convolutions ONNX Runtime's fused kernels round the biases."""
    torch.manual_seed(0)
    small = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
    for size, kind in ((12, "Conv"), (48, "QLinearConv")):
        x = torch.randn(2, 16, size, size)
        _, ready = prepared(copy.deepcopy(small).eval(), x, W8, BYTES, mode)
        path = _exported(ready, x, tmp_path)
        assert {"Conv", "QLinearConv"} & set(_kinds_at_run_time(path)) == {kind}
        assert sqnr(ready(x), run_onnx(path, (x,))[0]) > (ENOUGH_DB if kind == "Conv" else 40)
    shapes = ({0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO},)
    if mode == "eager":
        path = _exported(ready, x, tmp_path, dynamic_shapes=shapes)
        assert "Conv" not in _kinds_at_run_time(path)


class Narrow(nn.Module):
    """Convolutions of few channels or with groups, and one that is wider, for images."""

    def __init__(self, wider):
        super().__init__()
        self.stem, self.groups = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 16, 3, groups=2)
        self.narrow, self.wider = nn.Conv2d(16, 16, 3), nn.Conv2d(32, 32, 3) if wider else nn.Identity()

    def forward(self, x):
        x = torch.relu(self.narrow(torch.relu(self.groups(torch.relu(self.stem(x))))))
        return self.wider(torch.cat([x, -x], 1))


@pytest.mark.parametrize("wider", [False, True])
def test_narrow_convolutions_have_exact_sums(wider, tmp_path):
    """However much work they are: an integer kernel would not be quicker."""
    torch.manual_seed(0)
    model, x = Narrow(wider).eval(), torch.randn(1, 3, 70, 70)
    _, ready = prepared(model, x, W8, BYTES)
    path = _exported(ready, x, tmp_path)
    kinds = _kinds_at_run_time(path)
    assert (kinds.count("Conv"), kinds.count("QLinearConv")) == (3, int(wider))
    assert sqnr(ready(x), run_onnx(path, (x,))[0]) > (40 if wider else ENOUGH_DB)


@pytest.mark.parametrize("channels", [8, 48])
def test_weights_that_are_computed_have_exact_sums_too(channels, tmp_path):
    """Those of weight_norm are quantized in the file, with the quantizer of an activation."""
    torch.manual_seed(0)
    layers = weight_norm(nn.Conv1d(channels, 16, 3, padding=1)), weight_norm(nn.Conv1d(16, 8, 1))
    model, x = nn.Sequential(layers[0], nn.ReLU(), layers[1]).eval(), torch.randn(4, channels, 40)
    _, ready = prepared(model, x, None, BYTES)
    kinds = {}
    for kernels in ("fused", "exact"):
        path = _exported(ready, x, tmp_path, integer_kernels=kernels)
        kinds[kernels] = _kinds_at_run_time(path)
    assert kinds["fused"].count("QLinearConv") == 2
    assert kinds["exact"].count("MatMulIntegerToFloat") == (1 if channels < 48 else 2)
    assert sqnr(ready(x), run_onnx(path, (x,))[0]) > ENOUGH_DB


class Extremes(nn.Module):
    """A convolution and a linear layer whose weights are all the largest, or the smallest, that there are."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(channels, 16, 3, padding=1), nn.Linear(16, 32)
        for layer in (self.conv, self.linear):
            signs = torch.arange(layer.weight.shape[0]) % 2 * 2 - 1
            layer.weight.data = (signs.view(-1, *[1] * (layer.weight.dim() - 1)) / 8).expand_as(layer.weight).clone()

    def forward(self, x):
        return self.linear(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize("kernels", ["fused", "exact"])
@pytest.mark.parametrize("weight", ["int8", "uint8", "int7"])
@pytest.mark.parametrize("channels", [8, 48])
def test_sums_of_the_largest_codes_fit(channels, weight, kernels, tmp_path):
    """x86 without VNNI adds products of unsigned and signed codes in 16 bits, unless the weights are unsigned or small.

    The kernels for small signed ones are the quicker ones, so large matrices are halved when the file is opened.
    """
    torch.manual_seed(0)
    model, x = Extremes(channels).eval(), torch.rand(2, channels, 6, 6)
    _, ready = prepared(model, x, spec_of(weight), BYTES)
    path = _exported(ready, x, tmp_path, integer_kernels=kernels)
    assert sqnr(ready(x), run_onnx(path, (x,))[0]) > (ENOUGH_DB if kernels == "exact" else 40)
    _kinds_at_run_time(path)
    tensors = onnx.load(path.with_name("optimized.onnx")).graph.initializer
    weights = [onnx.numpy_helper.to_array(t) for t in tensors if t.data_type in BYTE_TYPES and math.prod(t.dims) >= 512]
    signed = [int(abs(codes.astype(int)).max()) for codes in weights if codes.dtype == "int8"]
    halved = weight == "int8" and kernels == "exact"
    assert len(weights) == (1 if kernels == "exact" and channels == 8 else 2)
    assert signed == [64] * (1 if halved else len(weights) if weight == "int7" else 0)


@pytest.mark.parametrize("layer", [nn.Linear(24, 40), nn.Linear(24, 40, bias=False), nn.Conv1d(24, 40, 1)])
def test_halved_weights_have_the_same_sums(layer, tmp_path):
    """The file holds them once, and readers of one activation or one weight share nothing that is another's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(copy.deepcopy(layer), nn.ReLU()).eval(), torch.randn(2, 24, 24)
    _, ready = prepared(model, x, W8, BYTES)
    path = _exported(ready, x, tmp_path, integer_kernels="exact")
    stored = [i for i in onnx.load(path).graph.initializer if i.data_type in BYTE_TYPES and math.prod(i.dims) > 1]
    assert max(math.prod(i.dims) for i in stored) == 24 * 40
    whole = _exported(ready, x, tmp_path, integer_kernels=False)
    assert torch.equal(*(run_onnx(file, (x,))[0] for file in (path, whole)))


class Queries(nn.Module):
    """A linear function of a parameter, with a weight; both are too large to be multiplied at export."""

    def __init__(self):
        super().__init__()
        self.queries, self.weight = nn.Parameter(torch.randn(1024, 64)), nn.Parameter(torch.randn(32, 64) / 8)

    def forward(self, x):
        return x + nn.functional.linear(self.queries, self.weight)


@pytest.mark.parametrize("unsigned", [True, False])
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("activation", [None, BYTES])
def test_products_of_two_weights(activation, mode, unsigned, tmp_path):
    """Neither factor is an activation."""
    torch.manual_seed(0)
    model, x = Queries().eval(), torch.randn(2, 1024, 32)
    activations = None if activation is None else {"*": activation}
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_state_spec={"*": W8}, op_input_spec=activations, op_output_spec=activations
        ),
        execution_mode=mode,
    )
    quantizer = Quantizer(model, config)
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    path = _exported(ready, x, tmp_path, unsigned_activations=unsigned)
    graph = onnx.load(path).graph
    codes = {initializer.name for initializer in graph.initializer}
    assert sum(node.op_type == "DequantizeLinear" and node.input[0] in codes for node in graph.node) == 2
    assert sqnr(ready(x), run_onnx(path, (x,))[0]) > (ENOUGH_DB if activation is None else 40)


class Wide(nn.Module):
    """A convolution of many channels and linear layers, all with biases, for images of any size."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(48, 64, 3, stride=2, padding=1)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 32, bias=False)
        for bias in (self.conv.bias, self.up.bias):
            nn.init.normal_(bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(torch.relu(self.conv(x)).flatten(2).mT)))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_wide_int8_layers_are_integer_products_that_do_not_round_biases(mode, tmp_path):
    """Also for images of another size than the example."""
    torch.manual_seed(0)
    model, x = Wide().eval(), torch.randn(2, 48, 10, 10)
    _, ready = prepared(model, x, W8, BYTES, mode)
    shapes = ({0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO},)
    path = _exported(ready, x, tmp_path, dynamic_shapes=None if mode == "graph" else shapes)
    kinds = _kinds_at_run_time(path)
    assert kinds.count("MatMulIntegerToFloat") == 2
    assert not {"QLinearConv", "QGemm", "Conv", "Gemm", "MatMul"} & set(kinds)
    for inputs in (x,) if mode == "graph" else (x, torch.randn(1, 48, 7, 12)):
        assert sqnr(ready(inputs), run_onnx(path, (inputs,))[0]) > ENOUGH_DB


class TiedLayers(nn.Module):
    """Pairs of layers with one weight, whose biases and strides are their own."""

    def __init__(self):
        super().__init__()
        self.near = nn.Conv2d(48, 48, 3, padding=1)
        self.far = nn.Conv2d(48, 48, 3, stride=2, padding=2, dilation=2)
        self.up, self.down = nn.Linear(48, 48), nn.Linear(48, 48)
        self.far.weight, self.down.weight = self.near.weight, self.up.weight
        for layer in (self.near, self.far, self.up, self.down):
            nn.init.normal_(layer.bias)

    def forward(self, x):
        x = torch.relu(self.far(torch.relu(self.near(x)))).flatten(2).mT
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_layers_with_one_weight_keep_their_own_biases_and_strides(mode, tmp_path):
    torch.manual_seed(0)
    model, x = TiedLayers().eval(), torch.randn(2, 48, 9, 8)
    _, ready = prepared(model, x, W8, BYTES, mode)
    path = _exported(ready, x, tmp_path, integer_kernels="exact")
    assert _kinds_at_run_time(path).count("MatMulIntegerToFloat") == 4
    codes = [i for i in onnx.load(path).graph.initializer if i.data_type in BYTE_TYPES]
    sizes = [math.prod(i.dims) for i in codes if not i.name.endswith("zero_point")]
    assert sum(sizes) == model.near.weight.numel() + model.up.weight.numel()
    assert sqnr(ready(x), run_onnx(path, (x,))[0]) > ENOUGH_DB


class Branches(nn.Module):
    """One quantized tensor that several convolutions read, wide ones, and small ones that stay in floating point."""

    def __init__(self, width, groups):
        super().__init__()
        self.stem = nn.Conv2d(8, width, 3)
        self.left, self.right = (nn.Conv2d(width, width, 1, groups=groups) for _ in range(2))
        self.wide = nn.Conv2d(width, 64, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return torch.relu(self.left(x)), self.right(x), self.wide(x)


@pytest.mark.parametrize("kernels", [True, "exact", "fused", False])
@pytest.mark.parametrize(("width", "groups"), [(16, 1), (48, 4), (64, 1)])
def test_one_tensor_for_several_kernels(width, groups, kernels, tmp_path):
    """The file is valid, whichever of its readers are integer products."""
    torch.manual_seed(0)
    model, x = Branches(width, groups).eval(), torch.randn(2, 8, 6, 6)
    _, ready = prepared(model, x, W8, BYTES, "graph")
    found = run_onnx(_exported(ready, x, tmp_path, integer_kernels=kernels), (x,))
    for expected, result in zip(ready(x), found, strict=True):
        assert sqnr(expected, result) > (ENOUGH_DB if kernels in ("exact", False) else 40)


def test_layers_stay_whole_for_other_readers(tmp_path):
    """With signed activations, and on request, convolutions and their biases are left as they are."""
    torch.manual_seed(0)
    model, x = Wide().eval(), torch.randn(2, 48, 10, 10)
    _, ready = prepared(model, x, W8, QuantizationSpec())
    for options in ({"unsigned_activations": False}, {"integer_kernels": "fused"}):
        kinds = {node.op_type for node in onnx.load(_exported(ready, x, tmp_path, **options)).graph.node}
        assert "Conv" in kinds
        assert not {"Sub", "Slice"} & kinds
    with pytest.raises(ValueError, match="integer_kernels must be True, False, 'exact' or 'fused', got 'fast'"):
        _exported(ready, x, tmp_path, integer_kernels="fast")


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 3), nn.Linear(8, 8)])
@pytest.mark.parametrize("kernels", [True, "fused"])
def test_biases_of_channels_without_weights_are_kept(layer, kernels, tmp_path):
    """A scale next to nothing makes such a bias too large for 32 bits, and ONNX Runtime counts it as zero."""
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(layer), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2] = 0, 60.0
    x = torch.randn(4, 8, 6, 6) if isinstance(layer, nn.Conv2d) else torch.randn(20, 8)
    _, ready = prepared(model, x, W8, BYTES, "graph")
    found = run_onnx(_exported(ready, x, tmp_path, integer_kernels=kernels), (x,))[0]
    assert torch.equal(ready(x).select(1, 2), found.select(1, 2))


def test_signed_activations_on_request(tmp_path):
    model, x = built(Mlp)
    _, ready = prepared(model, x, W8, QuantizationSpec())
    path = _exported(ready, x, tmp_path, unsigned_activations=False)
    types = {i.name: i.data_type for i in onnx.load(path).graph.initializer if "zero_point" in i.name}
    assert set(types.values()) == {onnx.TensorProto.INT8}
    assert sqnr(ready(x), run_onnx(path, (x,), optimize=False)[0]) > ENOUGH_DB


APART = {
    "blocks": (Mlp, spec_of("int8", blocks(16)), None),
    "int4 blocks": (Mlp, spec_of("int4", blocks(32)), None),
    "8-bit rows": (Mlp, spec_of("uint8"), None),
    "blocks beside activations": (Mlp, spec_of("int8", blocks(16)), QuantizationSpec(dtype="uint8")),
    "inputs beside activations": (Mlp, spec_of("int8", PerChannelGranularity(axis=1)), QuantizationSpec()),
    "int4 beside activations": (Mlp, spec_of("int4"), QuantizationSpec()),
    "zero points of channels": (ConvNet, spec_of("int8", qscheme="asymmetric"), QuantizationSpec()),
}


@pytest.mark.parametrize("name", _quick(APART, ["int4 blocks", "blocks beside activations", "zero points of channels"]))
def test_weights_are_kept_from_kernels_that_round_or_refuse_them(name, tmp_path):
    """A default session neither rounds the activations of float products to 8 bits nor fails on fused ones."""
    kind, weight, activation = APART[name]
    model, x = built(kind)
    _, ready = prepared(model, x, weight, activation)
    path = _exported(ready, x, tmp_path)
    found = run_onnx(path, (x,))[0]
    if activation is None:
        assert sqnr(ready(x), found) > 120
    else:
        assert sqnr(run_onnx(path, (x,), optimize=False)[0], found) > 35


@pytest.mark.parametrize("kind", [ConvNet, Deconv, Mlp])
@pytest.mark.parametrize("weights", ["palette", "float", "fp4"])
def test_weights_that_are_no_integers_stay_as_they_are_between_quantized_activations(kind, weights, tmp_path):
    """A default session rounds such weights to 8 bits of its own choice where it finds the chance."""
    model, x = built(kind)
    if weights == "palette":
        model = palettized(model, x, n_bits=4)[0].finalize(backend="_torch")
    blocks_of_32 = spec_of("float4_e2m1fn", blocks(32), scale_dtype="float8_e8m0fnu")
    _, ready = prepared(model, x, blocks_of_32 if weights == "fp4" and kind is Mlp else None, QuantizationSpec())
    for options in ({}, {"integer_kernels": False}):
        assert sqnr(ready(x), run_onnx(_exported(ready, x, tmp_path, **options), (x,))[0]) > ENOUGH_DB


class _Adding(nn.Module):
    """A linear layer whose results are added to rows of themselves along one dimension."""

    def __init__(self, axis, rows):
        super().__init__()
        self.layer, self.axis = nn.Linear(8, 8), axis
        self.register_buffer("rows", torch.tensor(rows))

    def forward(self, x):
        x = self.layer(x)
        added = x.index_select(self.axis, self.rows) * 3
        replaced, summed = x.clone(), x.clone()
        where = (slice(None),) * self.axis + (self.rows,)
        replaced[where] = added
        summed.index_put_((torch.arange(x.shape[0])[:, None], self.rows), added, accumulate=True)
        return x.index_add(self.axis, self.rows, added), replaced, summed


@pytest.mark.parametrize("rows", [[0, 1], [1, 0, 1]])
def test_what_is_added_to_all_rows_in_order_is_added(rows, tmp_path):
    """The optimizer takes such a ScatterND for one that replaces them."""
    torch.manual_seed(0)
    model, x = _Adding(1, rows).eval(), torch.randn(2, 2, 3, 8)
    _, ready = prepared(model, x, W8, None)
    for expected, found in zip(ready(x), run_onnx(_exported(ready, x, tmp_path), (x,)), strict=True):
        assert sqnr(expected, found) > 110


class BlocksOnDiagonal(nn.Module):
    """A matrix for each head, with biases, as in recurrent blocks of language models."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 8, 8) / 3), nn.Parameter(torch.randn(4, 1, 8))

    def forward(self, x):
        heads = self.layer(x).reshape(-1, 4, 8).permute(1, 0, 2)
        return torch.baddbmm(self.bias, heads, self.weight).permute(1, 0, 2).reshape(-1, 32)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_batch_of_matrices_with_a_scale_for_each_output_is_kept_from_the_integer_kernel(mode, tmp_path):
    """ONNX Runtime's takes one scale for them, and ends when it runs."""
    torch.manual_seed(0)
    x = torch.randn(6, 32)
    quantizer = Quantizer(BlocksOnDiagonal().eval(), QuantizerConfig.presets.w8a8(execution_mode=mode))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        ready(x)
    (actual,) = run_onnx(_exported(ready, x, tmp_path), (x,))
    assert sqnr(ready(x).detach(), actual) > ENOUGH_DB


class Normalized(nn.Module):
    """Multiplies by a matrix that is made of a parameter, as under spectral normalization."""

    def __init__(self):
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32))

    def forward(self, x):
        return nn.functional.elu(nn.functional.linear(x, self.matrix / self.matrix.norm(), self.bias))


def test_matrices_that_are_computed_beforehand_are_kept_from_the_kernel_that_rounds(tmp_path):
    """ONNX Runtime quantizes a stored matrix on opening the file, and took it for a weight beside float activations."""
    torch.manual_seed(0)
    x, model = torch.randn(2, 8, 32), Normalized().eval()
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="graph"))
    with pytest.warns(ConfigMatchWarning, match="computed-weight"):
        ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    path = _exported(ready, x, tmp_path)
    assert "MatMulNBits" not in _kinds_at_run_time(path)
    with torch.no_grad():
        assert sqnr(ready(x), run_onnx(path, (x,))[0]) > ENOUGH_DB
