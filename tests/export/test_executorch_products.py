"""Products of ExecuTorch programs whose int8 weights are not one row of codes, with a scale, for each output."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("executorch.exir")

from bitwright.export.executorch import export_executorch, run_executorch
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerChannelGranularity, PerTokenGranularity
from tests.matrix import each_value
from tests.measures import sqnr

STATIC = QuantizationSpec(qscheme="asymmetric")
DYNAMIC = QuantizationSpec(qscheme="asymmetric", granularity=PerTokenGranularity(), qparam_calculator_cls="dynamic")
PORTABLE = (b"aten::addmm", b"aten::mm", b"aten::bmm", b"aten::matmul", b"aten::linear", b"quantized_decomposed::")


class Rows(nn.Module):
    """A layer whose weight has a row for each input, as GPT-2's; its bias is added with the product or after it."""

    def __init__(self, inputs, outputs, fused):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))
        self.fused = fused

    def forward(self, x):
        if not self.fused:
            return x @ self.weight + self.bias
        y = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], -1)


class Net(nn.Module):
    """Both kinds of such layers, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = Rows(32, 48, True), Rows(48, 32, False), nn.Linear(32, 24)

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.first(x))))


def _exported(rows_axis, linear_axis, activation, mode, path):
    """SQNR of a program whose weights are quantized per channel on these axes, None for per tensor; and the file."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 5, 32)
    floats = model(x)
    inputs = None if activation is None else {"*": activation}
    outputs = inputs if activation is STATIC else None

    def module(axis):
        weight = QuantizationSpec() if axis is None else QuantizationSpec(granularity=PerChannelGranularity(axis=axis))
        return ModuleQuantizerConfig(op_state_spec={"weight": weight}, op_input_spec=inputs, op_output_spec=outputs)

    config = QuantizerConfig(
        global_config=None,
        module_name_configs={"first": module(rows_axis), "second": module(rows_axis), "last": module(linear_axis)},
        execution_mode=mode,
    )
    quantizer = Quantizer(model, config)
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    (found,) = run_executorch(export_executorch(ready, (x,), path), (x,))
    assert sqnr(floats, ready(x)) < 60, "nothing is quantized"
    return sqnr(ready(x), found), path.read_bytes()


@pytest.mark.parametrize(
    ("axes", "activation", "mode"),
    each_value(
        [(1, 0), (None, None), (0, 1)], {"none": None, "dynamic": DYNAMIC, "static": STATIC}, ["eager", "graph"]
    ),
)
def test_products_run_in_xnnpack(axes, activation, mode, tmp_path, caplog):
    """With int8 weights at the first try: a scale for each output, or for each input, which is scaled by it then.

    Where both sides are calibrated int8, XNNPACK rounds a bias to a multiple of both scales, and a tie may move a code.
    """
    ratio, content = _exported(*axes, activation, mode, tmp_path / "m.pte")
    assert ratio > (35 if activation is STATIC else 100)
    assert not [op for op in PORTABLE if op in content]
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


class Product(nn.Module):
    """A product with a matrix, in one of the ways to write it."""

    def __init__(self, way):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16))
        self.way = way

    def forward(self, x):
        return self.way(x, self.weight, self.bias)


WAYS = {
    "vector": (lambda x, w, b: x[0] @ w, True),
    "two readers": (lambda x, w, b: torch.mm(torch.mm(x, w), w), True),
    "computed bias": (lambda x, w, b: torch.addmm(x.sum() * b, x, w), True),
    "scaled": (lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0), False),
    "number": (lambda x, w, b: torch.addmm(b[:1], x, w), False),
    "matrix": (lambda x, w, b: torch.addmm(b.expand(5, 16), x, w), False),
    "squared": (lambda x, w, b: x + (w @ w)[:5], False),
    "transposed too": (lambda x, w, b: x @ w @ w.t(), False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(way, marks=[] if way in ("two readers", "squared") else pytest.mark.slow) for way in WAYS]
)
def test_other_products(name, tmp_path):
    """What is no linear layer stays a product, in the first of all ways to write the file."""
    torch.manual_seed(0)
    way, is_layer = WAYS[name]
    model, x = Product(way).eval(), torch.randn(5, 16)
    weight = QuantizationSpec(granularity=PerChannelGranularity(axis=1))
    config = ModuleQuantizerConfig(op_state_spec={"weight": weight}, op_input_spec=None, op_output_spec=None)
    ready = Quantizer(model, QuantizerConfig(global_config=config, execution_mode="graph")).prepare((x,))
    path = export_executorch(ready, (x,), tmp_path / "m.pte")
    (found,) = run_executorch(path, (x,))
    assert sqnr(ready(x), found) > 100
    assert (b"quantized_decomposed::" not in path.read_bytes()) == is_layer


class Tied(nn.Module):
    """A matrix that a lookup reads too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 24)

    def forward(self, tokens):
        x = self.table(tokens).sum(-1, keepdim=True)
        return x.expand(*tokens.shape, 16) @ self.table.weight


@pytest.mark.parametrize("axis", [0, 1])
def test_matrices_with_other_readers_stay(axis, tmp_path):
    torch.manual_seed(0)
    model, tokens = Tied().eval(), torch.randint(0, 16, (2, 5))
    weight = QuantizationSpec(granularity=PerChannelGranularity(axis=axis))
    config = ModuleQuantizerConfig(op_state_spec={"weight": weight}, op_input_spec=None, op_output_spec=None)
    quantizer = Quantizer(model, QuantizerConfig(global_config=config, execution_mode="graph"))
    ready = quantizer.prepare((tokens,))
    (found,) = run_executorch(export_executorch(ready, (tokens,), tmp_path / "m.pte"), (tokens,))
    assert sqnr(ready(tokens), found) > 100


class ReadTwice(nn.Module):
    """A product with a matrix that something else reads too."""

    def __init__(self, other):
        super().__init__()
        self.first, self.last = nn.Linear(16, 256), nn.Linear(256, 16)
        self.weight, self.other = nn.Parameter(torch.randn(16, 16) / 4), other

    def forward(self, x):
        x = self.last(torch.relu(self.first(x)))
        return self.other(torch.tanh(x @ self.weight), self.weight)


OTHERS = {
    "layer": nn.functional.linear,
    "transposed": lambda x, w: x @ w.t(),
    "lookup": lambda x, w: x + nn.functional.embedding(torch.tensor([1, 2, 3, 4, 5]), w),
}


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("other", OTHERS)
def test_calibrated_products_with_a_matrix_that_is_read_twice(other, axis, tmp_path, caplog):
    """At the first try, with all weights in bytes; XNNPACK's runtime refused the product as it was."""
    torch.manual_seed(0)
    model, x = ReadTwice(OTHERS[other]).eval(), torch.randn(5, 16)
    weight = QuantizationSpec(granularity=PerChannelGranularity(axis=axis))
    config = ModuleQuantizerConfig(
        op_state_spec={"*": weight, "bias": None}, op_input_spec={"*": STATIC}, op_output_spec={"*": STATIC}
    )
    quantizer = Quantizer(model, QuantizerConfig(global_config=config, execution_mode="graph"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 100
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]


class Attention(nn.Module):
    """What attention returns goes through a view, as in GPT-2, into a product."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), Rows(16, 16, True)

    def forward(self, x):
        q, k, v = (part.view(2, 5, 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 16).contiguous()
        return self.out(y.view(-1, 16)).view(2, 5, 16)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_views_behind_attention(mode, tmp_path):
    """PyTorch's attention returns memory in another order than the products that it becomes."""
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 5, 16)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode))
    ready = quantizer.prepare((x,))
    (found,) = run_executorch(export_executorch(ready, (x,), tmp_path / "m.pte"), (x,))
    assert sqnr(ready(x), found) > 100


PRODUCTS_OF_ACTIVATIONS = {
    "a matrix and another's transpose": lambda x, y, v: torch.matmul(x, y.t()),
    "two matrices": lambda x, y, v: x @ y.reshape(16, -1),
    "a product and a sum": lambda x, y, v: torch.addmm(v, x, y.t()),
    "a scaled product and a scaled sum": lambda x, y, v: torch.addmm(v, x, y.t(), beta=0.5, alpha=2),
    "a linear layer": lambda x, y, v: F.linear(x, y, v),
    "batches": lambda x, y, v: torch.bmm(x[None], y.t()[None]),
    "three matrices": lambda x, y, v: x @ y.t() @ x,
    "a convolution": lambda x, y, v: F.conv2d(x.view(1, 4, 4, 4), y.view(4, 4, 2, 2)),
    "a cross-correlation": lambda x, y, v: F.conv2d(x.view(1, 4, 4, 4), y.view(4, 1, 4, 4)[..., :3], groups=4),
    "in one dimension": lambda x, y, v: F.conv1d(x.view(1, 4, 16), y.view(4, 1, 16)[..., :3], groups=4),
    "transposed": lambda x, y, v: F.conv_transpose2d(x.view(1, 4, 4, 4), y.view(4, 1, 4, 4)),
}


class Together(nn.Module):
    """A product of two inputs, as in models that compare images with texts, or look for a part in the whole."""

    def __init__(self, product):
        super().__init__()
        self.product = product
        self.register_buffer("vector", torch.randn(4))

    def forward(self, x, y):
        return self.product(x, y, self.vector)


@pytest.mark.parametrize("name", PRODUCTS_OF_ACTIVATIONS)
def test_products_of_two_quantized_activations(name, tmp_path, caplog):
    """XNNPACK's partitioner took some of them for layers with a weight, whose codes it read from nowhere."""
    torch.manual_seed(0)
    inputs = torch.randn(4, 16), torch.randn(4, 16)
    config = QuantizerConfig.presets.w8a8(execution_mode="eager")
    quantizer = Quantizer(Together(PRODUCTS_OF_ACTIVATIONS[name]).eval(), config)
    ready = quantizer.prepare(inputs)
    with quantizer.calibration_mode(), torch.no_grad():
        ready(*(1.1 * x for x in inputs))  # the largest number lies half-way between two codes
    path = export_executorch(ready.eval(), inputs, tmp_path / "model.pte")
    assert not [record for record in caplog.records if record.name.startswith("bitwright")]  # at the first try
    with torch.no_grad():
        expected = ready(*inputs)
    (actual,) = run_executorch(path, inputs)
    assert actual.shape == expected.shape
    assert sqnr(expected, actual) > 100
