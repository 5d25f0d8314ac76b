"""Names, operators and in-place calls that converters stumble over."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright import ExportBackend
from bitwright.export.capabilities import check_plan
from bitwright.export.conversion import ConversionError
from bitwright.export.targets import TARGETS
from bitwright.planning import Severity
from bitwright.quantization import QuantizationSpec, Quantizer
from tests.measures import sqnr

from .models import W8, palettized, prepared

A8 = QuantizationSpec(dtype="uint8", qscheme="asymmetric")


class Named(nn.Module):
    """Modules whose names contain the words by which coreai-torch tells operands apart."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.indices = nn.Linear(8, 8)

    def forward(self, x):
        return self.indices(torch.relu(self.convolution(x)).mean((2, 3)))


@pytest.mark.parametrize("spec", [{"n_bits": 4}, {"n_bits": 2, "cluster_dim": 2}], ids=["scalars", "vectors"])
def test_core_ai_finds_tables_under_any_name(spec, tmp_path):
    target = TARGETS["coreai"]
    if target.missing() is not None:
        pytest.skip(target.missing())
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    _, ready = palettized(Named().eval(), x, **spec)
    path = target.write(ready, (x,), tmp_path / "m.aimodel", {}, None)
    assert sqnr(ready(x), target.run(path, [x])[0]) > 100


class Differences(nn.Module):
    """Neighbours' differences, of numbers and of truth values, and a residual added in place."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.one(x)
        y += self.two(torch.relu(x))
        steps = torch.diff(y, dim=-1, prepend=y[..., :1]) + torch.diff(y, n=2, dim=0).sum()
        mask = x.new_ones((), dtype=torch.bool) & torch.diff(y > 0, dim=0)[:1]
        return torch.where(mask, steps, y * x.new_ones(8))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_core_ml_takes_differences_and_sums_in_place(mode, tmp_path):
    """coremltools has neither ``diff`` and ``new_ones`` nor copies of whole tensors."""
    pytest.importorskip("coremltools")
    from bitwright.export.coreml_package import compressed_constants, export_coreml

    torch.manual_seed(0)
    x = torch.randn(4, 8)
    activation = QuantizationSpec(dtype="uint8", qscheme="asymmetric")
    _, ready = prepared(Differences().eval(), x, W8, activation, mode)
    path = export_coreml(ready, (x,), tmp_path / "m.mlpackage", precision="float32")
    weights = [constant for _, constant in compressed_constants(path) if constant.shape == (8, 8)]
    assert len(weights) == 2


class Copies(nn.Module):
    """The model's own copy into a whole tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        kept = x.clone()
        kept.copy_(self.first(x))
        return self.second(kept)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_core_ml_takes_copies_into_whole_tensors(mode, tmp_path):
    """What is read is what was copied: both weights are in the file."""
    pytest.importorskip("coremltools")
    from bitwright.export.coreml_package import compressed_constants, export_coreml

    torch.manual_seed(0)
    x = torch.randn(4, 8)
    _, ready = prepared(Copies().eval(), x, W8, QuantizationSpec(dtype="uint8", qscheme="asymmetric"), mode)
    path = export_coreml(ready, (x,), tmp_path / "m.mlpackage", precision="float32")
    assert len([constant for _, constant in compressed_constants(path) if constant.shape == (8, 8)]) == 2


class Sums(nn.Module):
    """Sums and products in place, by operator and by method, with a ReLU whose result is not looked at."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        identity = self.first(x)
        out = self.second(identity)
        out += identity
        out.mul_(identity)
        torch.relu_(out)
        return out - x


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_coremltools_takes_a_trace_of_sums_in_place(mode):
    """The user's own ``torch.jit.trace`` of a finalized model, as with coreai-opt; the trace computes the same."""
    converters = pytest.importorskip("coremltools")
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    activation = QuantizationSpec(dtype="uint8", qscheme="asymmetric")
    quantizer, ready = prepared(Sums().eval(), x, W8, activation, mode)
    with torch.no_grad():
        expected = ready(x).clone()
        finalized = quantizer.finalize(backend=ExportBackend.CoreML)
        traced = torch.jit.trace(finalized, (x,))
        torch.testing.assert_close(traced(x), expected)
    program = converters.convert(
        traced, inputs=[converters.TensorType(shape=(4, 8))], convert_to="milinternal",
        minimum_deployment_target=converters.target.iOS18,
    )  # fmt: skip
    found = [operation.op_type for operation in program.functions["main"].operations]
    assert (found.count("add"), found.count("mul"), found.count("relu"), found.count("sub")) == (1, 1, 1, 1)


def test_core_ml_operators_of_ours_compute_what_torch_does():
    """On constants, which coremltools computes while it converts."""
    converters = pytest.importorskip("coremltools")
    from bitwright.export.coreml_ops import register_missing_ops

    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(5, 7))

        def expected(self):
            steps = torch.diff(self.table, n=2, dim=1, prepend=self.table[:, :1], append=self.table[:, -2:])
            return torch.diff(steps, dim=0) + self.table.new_ones(8)

        def forward(self, x):
            return x + self.expected()

    torch.manual_seed(0)
    register_missing_ops()
    model = Constants().eval()
    traced = torch.jit.trace(model, (torch.zeros(4, 8),), check_trace=False)
    program = converters.convert(
        traced, inputs=[converters.TensorType(shape=(4, 8))], convert_to="milinternal",
        compute_precision=converters.precision.FLOAT32,
    )  # fmt: skip
    values = [op.y.val for op in program.functions["main"].operations if op.op_type == "add" and op.y.val is not None]
    assert any(value.shape == (4, 8) and (abs(value - model.expected().numpy()) < 1e-5).all() for value in values)


TRANSPOSED = {
    "output padding alone": nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1),
    "more than the padding": nn.ConvTranspose2d(4, 6, 3, stride=3, padding=1, output_padding=2),
    "in one dimension": nn.ConvTranspose2d(4, 6, 3, stride=(2, 3), padding=(1, 0), output_padding=(0, 2), groups=2),
    "dilated": nn.ConvTranspose1d(4, 6, 2, dilation=3, output_padding=2, bias=False),
    "volumes": nn.ConvTranspose3d(4, 6, 3, stride=2, padding=1, output_padding=1),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_core_ml_transposed_convolutions(name):
    """The operators that are written, computed with PyTorch's, are the layer."""
    converters = pytest.importorskip("coremltools")
    from bitwright.export.coreml_ops import register_missing_ops

    register_missing_ops()
    torch.manual_seed(0)
    layer = TRANSPOSED[name].eval()
    rank = layer.weight.ndim - 2
    x = torch.randn(2, 4, *(5, 4, 3)[:rank])
    program = converters.convert(
        torch.jit.trace(layer, (x,)), inputs=[converters.TensorType(shape=tuple(x.shape))], convert_to="milinternal",
        compute_precision=converters.precision.FLOAT32, minimum_deployment_target=converters.target.iOS18,
    )  # fmt: skip
    (function,) = program.functions.values()
    y = x
    for op in function.operations:
        value = {key: var.val for key, var in op.inputs.items() if var is not None and hasattr(var, "val")}
        if op.op_type == "pad":
            sides = [int(side) for side in value["pad"]]
            y = F.pad(y, [side for at in range(len(sides) - 2, -1, -2) for side in sides[at : at + 2]])
        elif op.op_type == "conv_transpose":
            assert value["pad_type"] == "valid"
            turned = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
            bias = value.get("bias")
            y = turned(
                y, torch.tensor(value["weight"]), None if bias is None else torch.tensor(bias),
                stride=value["strides"].tolist(), groups=int(value["groups"]), dilation=value["dilations"].tolist(),
            )  # fmt: skip
        elif op.op_type == "slice_by_index":
            masks = zip(value["begin"], value["begin_mask"], value["end"], value["end_mask"], strict=True)
            y = y[tuple(slice(None if all_ else int(b), None if rest else int(e)) for b, all_, e, rest in masks)]
        else:
            assert op.op_type == "const"
    (output,) = function.outputs
    assert tuple(output.shape) == tuple(y.shape)
    torch.testing.assert_close(y, layer(x))


class Tied(nn.Module):
    """An embedding whose table is the weight of the head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_plans_tell_what_checkpoints_refuse(mode, tmp_path):
    """The weights that the error names are those that the plan named."""
    target = TARGETS["compressed-tensors"]
    if target.missing() is not None:
        pytest.skip(target.missing())
    tokens = torch.randint(0, 16, (2, 3))
    quantizer, ready = prepared(Tied().eval(), tokens, W8, mode=mode)
    plan = Quantizer(Tied().eval(), quantizer._config).plan((tokens,))
    refused = [problem.where for problem in check_plan(plan, target.name) if problem.severity is Severity.ERROR]
    assert refused == ["embed.weight"]
    with pytest.raises(ValueError, match=r"(embed|head)\.weight: only weights of linear layers") as error:
        target.write(ready, (tokens,), tmp_path / "out", {}, None)
    assert len(str(error.value).splitlines()) == 2


class Keywords(nn.Module):
    """Modules and a tensor whose names are keywords of Python; ``names`` are theirs."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        self.heads = nn.ModuleDict({names[0]: nn.Linear(8, 8)})
        self.add_module(names[1], nn.Linear(8, 8))
        self.register_parameter(names[2], nn.Parameter(torch.linspace(-1, 1, 8)))

    def forward(self, x):
        head, last, bias = self.names
        return getattr(self, last)(torch.relu(self.heads[head](x))) + getattr(self, bias)


def keywords_and_plain():
    """The same model with such names and with others."""
    made = []
    for names in (("class", "lambda", "None"), ("a", "b", "c")):
        torch.manual_seed(0)
        made.append(Keywords(*names).eval())
    return made


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_names_may_be_keywords_of_python(mode):
    """Prepared, copied and pickled, the model computes what it computes under other names."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    (_, ready), (_, plain) = (prepared(model, x, W8, A8, mode) for model in keywords_and_plain())
    with torch.no_grad():
        for form in (ready, copy.deepcopy(ready), pickle.loads(pickle.dumps(ready))):
            assert torch.equal(form(x), plain(x))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", ["onnx", "coreai", "coreml", "executorch"])
def test_targets_take_names_that_are_keywords(name, mode, tmp_path):
    """What torch.fx generates for converters reads them too."""
    target = TARGETS[name]
    if target.missing() is not None:
        pytest.skip(target.missing())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    _, ready = prepared(keywords_and_plain()[0], x, W8, A8, mode)
    path = target.write(ready, (x,), tmp_path / f"m{target.suffix}", {}, None)
    if target.run is not None:
        assert sqnr(ready(x), target.run(path, [x])[0]) > 40


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_programs_that_torch_could_not_run_are_not_written(mode, tmp_path):
    """``torch.export.load(...).module()`` generates code that reads ``self.heads.class``."""
    x = torch.randn(4, 8)
    _, ready = prepared(keywords_and_plain()[0], x, W8, A8, mode)
    with pytest.raises(ConversionError, match=r"(?s)torch\.export\.load .*keyword of Python\. Rename"):
        TARGETS["torch"].write(ready, (x,), tmp_path / "m.pt2", {}, None)
    assert not (tmp_path / "m.pt2").exists()
