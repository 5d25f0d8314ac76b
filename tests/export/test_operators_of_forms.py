"""Operators that a converter lacks, in models that were prepared or captured before, and with all kinds of inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitwright.export.conversion import ConversionError, captured
from bitwright.export.operators import check_operators
from bitwright.export.specimens import specimens
from bitwright.export.targets import TARGETS
from bitwright.palettization import KMeansPalettizer
from bitwright.planning import Severity
from bitwright.pruning import MagnitudePruner
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.matrix import each_pair
from tests.measures import sqnr

CONVERTERS = ["coreai", "coreml", "executorch", "onnx"]
DYNAMIC = torch.export.Dim.DYNAMIC


class Gamma(nn.Module):
    """Two layers, and between them an operator that no converter has."""

    def __init__(self, lacking=True):
        super().__init__()
        self.lacking, self.first, self.last = lacking, nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.first(x).exp()
        return self.last(torch.lgamma(x) if self.lacking else x)


class Scaled(nn.Module):
    """A keyword input that is a tensor, and one that is not."""

    def __init__(self, lacking=False):
        super().__init__()
        self.lacking, self.linear = lacking, nn.Linear(8, 8)

    def forward(self, x, scale=None, negate=False):
        y = self.linear(x)
        y = y if scale is None else y * scale
        y = torch.lgamma(y) if self.lacking else y
        return -y if negate else y


class Normed(nn.Module):
    """A batch norm behind a convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


class Pooled(nn.Module):
    """Pooling to a given size, which Core AI has for known sizes only."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        return nn.functional.adaptive_avg_pool1d(self.conv(x), 3)


def _skip_without(name):
    if TARGETS[name].missing() is not None:
        pytest.skip(TARGETS[name].missing())


def _errors(plan):
    return [problem for problem in plan.problems if problem.severity == Severity.ERROR]


def _w8(mode):
    return QuantizerConfig.presets.w8(execution_mode=mode)


@pytest.mark.parametrize(("target", "mode", "lacking"), each_pair(CONVERTERS, ["eager", "graph"], [True, False]))
def test_a_second_technique_is_planned_with_operators(target, mode, lacking):
    _skip_without(target)
    x = (torch.randn(2, 16),)
    prepared = MagnitudePruner(Gamma(lacking).eval()).prepare(x)
    before = prepared(*x)
    plan = Quantizer(prepared, _w8(mode)).plan(x, target=target)
    named = [problem for problem in plan.problems if "lgamma" in problem.message]
    assert len(named) == lacking
    assert torch.equal(prepared(*x), before)
    assert hasattr(prepared.first, "parametrizations")


@pytest.mark.parametrize("target", CONVERTERS)
def test_the_float_model_below_a_prepared_one_is_asked(target):
    """Quantized activations and folded batch norms, in both modes, and one technique on the other."""
    _skip_without(target)
    x = (torch.randn(2, 16),)
    for mode in ("eager", "graph"):
        for lacking in (True, False):
            quantizer = Quantizer(Gamma(lacking).eval(), QuantizerConfig.presets.w8a8(execution_mode=mode))
            ready = quantizer.prepare(x)
            with quantizer.calibration_mode():
                ready(*x)
            before = ready(*x)
            assert bool(check_operators(ready, target, x)) == lacking
            assert torch.equal(ready(*x), before)
    images = (torch.randn(2, 3, 8, 8),)
    assert check_operators(Quantizer(Normed().eval(), _w8("graph")).prepare(images), target, images) == []


@pytest.mark.parametrize("target", CONVERTERS)
def test_modules_of_torch_export_are_asked(target):
    _skip_without(target)
    x = (torch.randn(2, 16),)
    for lacking in (True, False):
        module = torch.export.export(Gamma(lacking).eval(), x).module()
        assert bool(check_operators(module, target, x)) == lacking
        plans = [Quantizer(copy.deepcopy(module), _w8(mode)).plan(x, target=target) for mode in ("eager", "graph")]
        plans.append(KMeansPalettizer(copy.deepcopy(module)).plan(x, target=target))
        assert [any("lgamma" in problem.message for problem in plan.problems) for plan in plans] == [lacking] * 3


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_dynamic_shapes_are_asked(mode, tmp_path):
    """And what was refused with them leaves nothing on the inputs that would have fixed shapes refused too."""
    _skip_without("coreai")
    x, shapes = (torch.randn(2, 4, 8),), ({2: DYNAMIC},)
    quantizer = Quantizer(Pooled().eval(), _w8(mode))
    assert _errors(quantizer.plan(x, shapes, target="coreai"))
    assert not _errors(quantizer.plan(x, target="coreai"))
    ready = quantizer.prepare(x, shapes)
    with pytest.raises(ConversionError):
        TARGETS["coreai"].write(ready, x, tmp_path / "dynamic.aimodel", {}, shapes)


@pytest.mark.parametrize("target", ["coreai", "onnx", "torch"])
def test_sizes_that_a_model_fixes_are_told_and_leave_no_marks(target):
    _skip_without(target)
    model, x = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.MaxPool1d(2)), (torch.randn(2, 4, 8),)
    assert "Constraints violated" in check_operators(model, target, x, None, ({2: DYNAMIC},))[0].message
    assert not vars(x[0])
    assert check_operators(model, target, x) == []


def test_what_cannot_be_captured_is_refused_for_programs():
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    for target in ("torch", "aot-inductor"):
        if TARGETS[target].missing() is None:
            assert "data-dependent" in check_operators(Branch(), target, (torch.randn(3),))[0].message


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_core_ml_takes_inputs_by_name(mode, tmp_path):
    """Tensors among them are inputs of the package, all else is what it was."""
    _skip_without("coreml")
    import coremltools

    x, kwargs = (torch.randn(2, 8),), {"scale": torch.randn(2, 8), "negate": True}
    quantizer = Quantizer(Scaled().eval(), _w8(mode))
    assert not _errors(quantizer.plan(x, example_kwargs=kwargs, target="coreml"))
    ready, path = quantizer.prepare(x, example_kwargs=kwargs), tmp_path / "m.mlpackage"
    TARGETS["coreml"].write(ready, x, path, kwargs, None)
    spec = coremltools.models.MLModel(str(path), skip_model_load=True).get_spec()
    assert [tuple(one.type.multiArrayType.shape) for one in spec.description.input] == [(2, 8), (2, 8)]
    operations = [op.type for op in spec.mlProgram.functions["main"].block_specializations["CoreML8"].operations]
    assert operations.count("mul") == 2  # by the scale, and by minus one
    lacking = Quantizer(Scaled(lacking=True).eval(), _w8(mode)).plan(x, example_kwargs=kwargs, target="coreml")
    assert "lgamma" in _errors(lacking)[0].message


def test_batch_norms_that_are_folded_are_not_asked_about(tmp_path, monkeypatch):
    """A converter that had none would still take the graph."""
    _skip_without("coreai")
    from coreai_torch import _aten_to_core

    monkeypatch.delitem(_aten_to_core._aten_to_core_resolver, "_native_batch_norm_legit_no_training.default")
    model, x = Normed().eval(), (torch.randn(2, 3, 8, 8),)
    assert _errors(Quantizer(copy.deepcopy(model), _w8("eager")).plan(x, target="coreai"))[0].where == "norm"
    quantizer = Quantizer(model, _w8("graph"))
    assert not _errors(quantizer.plan(x, target="coreai"))
    ready, path = quantizer.prepare(x, target="coreai"), tmp_path / "m.aimodel"
    TARGETS["coreai"].write(ready, x, path, {}, None)
    assert sqnr(ready(*x), TARGETS["coreai"].run(path, x)[0]) > 100


class Layers(nn.Module):
    """Equal layers, and one more call at the end."""

    def __init__(self, count, last):
        super().__init__()
        self.layers, self.last = nn.ModuleList([nn.Linear(8, 8) for _ in range(count)]), last

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


def test_specimens_are_one_call_of_each_kind():
    program = captured(Layers(12, lambda x: x.reshape(4, 4).relu().sum(0)), (torch.randn(2, 8),))
    calls = [node for node in specimens(program).graph.nodes if node.op == "call_function"]
    found = [(str(node.target), tuple(node.meta["val"].shape)) for node in calls]
    assert sorted(found) == [
        ("aten.linear.default", (2, 8)),
        ("aten.relu.default", (2, 8)),
        ("aten.relu.default", (4, 4)),
        ("aten.reshape.default", (4, 4)),
        ("aten.sum.dim_IntList", (4,)),
    ]


def test_what_nothing_reads_is_no_specimen():
    """Such as what a distribution asks of its parameters: no converter sees it."""

    def unread(x):
        x.lgamma().sum()
        return x * 2

    program = captured(Layers(2, unread), (torch.randn(2, 8),))
    assert any("lgamma" in str(node.target) for node in program.graph.nodes)
    assert not any("lgamma" in str(node.target) for node in specimens(program).graph.nodes)


@pytest.mark.parametrize("target", ["coreai", "onnx"])
def test_the_last_of_many_layers_is_asked(target):
    _skip_without(target)
    x = (torch.randn(2, 8),)
    (problem,) = check_operators(Layers(6, torch.lgamma), target, x)
    assert "lgamma" in problem.message
    assert check_operators(Layers(6, torch.tanh), target, x) == []


def test_only_specimens_are_converted_where_nothing_is_lacking(monkeypatch):
    """Planning would take as long as the export otherwise."""
    from bitwright.export import operators

    asked = []
    monkeypatch.setitem(operators._BY_PROGRAM, "coreai", lambda program: asked.append(len(program.graph.nodes)))
    _skip_without("coreai")
    check_operators(Layers(50, torch.tanh), "coreai", (torch.randn(2, 8),))
    assert asked == [7]  # weight, bias, input, linear, relu, tanh, output


def test_writes_into_states_and_arguments_are_specimens_too():
    """A counter in a buffer, an update in place, a sub-graph, and numbers that decide."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(8))
            self.register_buffer("order", torch.tensor([1, 0]))
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            self.calls.add_(1)
            y = self.linear(x)[self.order].relu_()
            return torch.cond(y.sum() > 0, lambda v: v + 1, lambda v: v - 1, (y,)), y.chunk(2, -1)

    program = captured(Odd(), (torch.randn(2, 8),))
    found = {str(node.target) for node in specimens(program).graph.nodes if node.op == "call_function"}
    assert {"aten.add_.Tensor", "aten.relu_.default", "cond", "aten.index.Tensor", "aten.chunk.default"} <= found
