"""What models take and return besides tensors: right in the runtimes, or refused in the plan."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bitwright.export.conversion import ConversionError, captured
from bitwright.export.decomposing import decomposed
from bitwright.export.operators import check_operators
from bitwright.export.signatures import drop_constants, with_states_copied
from bitwright.export.targets import TARGETS
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
INPUTS = {
    "nothing and numbers": ((X, None, 3), {"flag": True}, lambda f, x, m, n, flag: f(x) * n if flag else x),
    "by name": ((X,), {"mask": None, "other": X + 1}, lambda f, x, mask, other: f(x) * other),
    "in a list and a tuple": (([X, (X + 1, None)],), {}, lambda f, xs: f(xs[0]) + xs[1][0]),
    "in a dictionary": (({"a": X, "b": X + 1, "c": 2},), {}, lambda f, d: f(d["a"]) * d["b"] + d["c"]),
    "in another order": ((X.T.contiguous().T, X[:1].expand(2, 8)), {}, lambda f, x, y: f(x) + y),
    "written to": ((X,), {}, lambda f, x: f(x.mul_(2)) + x),
    "written to in parts": (
        (X, X + 1),
        {},
        lambda f, x, y: (y.chunk(2)[0].add_(1), x.view(-1)[1:].relu_(), f(x) + y)[2],
    ),
}
OUTPUTS = {
    "one tensor twice": lambda f, x: (lambda y: (y, y.relu(), y, y))(f(x)),
    "one mask twice": lambda f, x: (lambda y: (y, y > 0, y > 0))(f(x)),
    "nothing between": lambda f, x: (f(x), None, f(x) * 2),
    "inputs": lambda f, x: {"x": x, "y": f(x)},
}
RUNTIMES = ["coreai", "executorch", "onnx", "torch"]


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, *args, **kwargs):
        return self.function(self.layer, *args, **kwargs)


def _tensors(values):
    return [value.clone() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _check(target, model, args, kwargs, folder):
    if TARGETS[target].missing() is not None:
        pytest.skip(TARGETS[target].missing())
    assert check_operators(model, target, args, kwargs) == []
    config = QuantizerConfig.presets.w8(execution_mode="eager")
    ready = Quantizer(model, config).prepare(args, example_kwargs=kwargs).eval()
    path = TARGETS[target].write(ready, args, folder / f"m{TARGETS[target].suffix}", kwargs, None)
    actual = TARGETS[target].run(path, _tensors((args, kwargs)))
    with torch.no_grad():
        expected = _tensors(ready(*args, **kwargs))
    assert len(actual) == len(expected)
    for one, other in zip(expected, actual, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other) or sqnr(one.float(), other.float()) > 100


@pytest.mark.parametrize("target", RUNTIMES)
@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name, target, tmp_path):
    args, kwargs, function = copy.deepcopy(INPUTS[name])
    _check(target, Model(function).eval(), args, kwargs, tmp_path)


@pytest.mark.parametrize("target", RUNTIMES)
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name, target, tmp_path):
    _check(target, Model(OUTPUTS[name]).eval(), (X,), {}, tmp_path)


def test_only_inputs_that_are_written_to_are_copied():
    function = lambda f, x, y: f(x).relu_() + y.mul_(2)  # noqa: E731
    program = captured(Model(function).eval(), (X, X + 1))
    drop_constants(program)
    copied = [node.args[0].name for node in program.graph.nodes if node.target is torch.ops.aten.clone.default]
    assert copied == [program.graph_signature.user_inputs[1]]


@pytest.mark.parametrize("size", [torch.export.Dim("n", max=8), torch.export.Dim.DYNAMIC(max=8)])
def test_dynamic_sizes_beside_what_is_no_tensor(size):
    """torch's checks of sizes are written for the inputs that are there no more."""
    model = Model(lambda f, none, xs, number, y: f(xs[1]) * y * number).eval()
    shapes = ((None, [None, {0: size}], None, {0: size}),)
    program = captured(model, (None, [3, X], 2.0, X + 1), None, shapes)
    drop_constants(program)
    program = decomposed(decomposed(program))
    x, y = torch.randn(5, 8), torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(with_states_copied(program)([x], y), model(None, [3, x], 2.0, y))


@pytest.mark.parametrize("target", ["coreai", "onnx"])
def test_numbers_are_refused_as_outputs(target, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(TARGETS[target].missing())
    model = Model(lambda f, x: (f(x), 3)).eval()
    (problem,) = check_operators(model, target, (X,))
    assert "output 1 is 3" in problem.message
    with pytest.raises(ConversionError, match="Return tensors only"):
        TARGETS[target].write(model, (X,), tmp_path / f"m{TARGETS[target].suffix}", {}, None)


@pytest.mark.parametrize("name", ["nothing and numbers", "in a list and a tuple", "in a dictionary"])
def test_core_ml_takes_tensors_of_containers(name, tmp_path):
    coremltools = pytest.importorskip("coremltools")
    args, kwargs, function = INPUTS[name]
    model = Model(function).eval()
    assert check_operators(model, "coreml", args, kwargs) == []
    path = TARGETS["coreml"].write(model, args, tmp_path / "m.mlpackage", kwargs, None)
    package = coremltools.models.MLModel(str(path), skip_model_load=True)
    assert len(package.get_spec().description.input) == len(_tensors((args, kwargs)))
