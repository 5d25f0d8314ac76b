"""A write to a weight that a simulator stands on reaches the weight, or the user is told that it is lost."""

from __future__ import annotations

import copy
import warnings
from types import FunctionType

import pytest
import torch
from torch import nn

from bitwright.errors import BitwrightWarning, PlanError
from bitwright.palettization import KMeansPalettizer
from bitwright.quantization import Quantizer, QuantizerConfig


def set_data(layer):
    layer.weight.data = layer.weight.data.clamp(-0.1, 0.1)


def data_in_place(layer):
    layer.weight.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def in_place(layer):
    layer.weight.mul_(0.5)


@torch.no_grad()
def copied(layer):
    layer.weight.copy_(layer.weight * 0.5)


def detached(layer):
    layer.weight.detach().mul_(0.5)


@torch.no_grad()
def item(layer):
    layer.weight[0] = 0.0


@torch.no_grad()
def rows(layer):
    layer.weight[1:] = 0.0


def entry_of_data(layer):
    layer.weight.data[0, 1] = 0.0


def sum_of_data(layer):
    layer.weight.data += 1.0


def sum_of_entry(layer):
    layer.weight.data[0] += 1.0


def by_name(layer):
    getattr(layer, "weight").data.mul_(0.5)  # noqa: B009


@torch.no_grad()
def augmented_part(layer):
    layer.weight[1:].mul_(0.5)


@torch.no_grad()
def by_variable(layer):
    weight = layer.weight
    weight.mul_(0.5)


def initialised(layer):
    nn.init.constant_(layer.weight, 0.1)


@torch.no_grad()
def out(layer):
    torch.mul(layer.weight, 0.5, out=layer.weight)


SHOWN_BY_CODE = [set_data, data_in_place, in_place, copied, detached, item, rows, entry_of_data, by_name, sum_of_data]
SHOWN_BY_CODE += [sum_of_entry]
SEEN_IN_TRACE = [*SHOWN_BY_CODE, augmented_part, by_variable, initialised, out]
EXPORTABLE = [in_place, copied, detached, item, rows, augmented_part, by_variable]


class Constrained(nn.Module):
    """Changes the weight of a layer in its forward."""

    def __init__(self, write):
        super().__init__()
        self.fc, self.write = nn.Linear(4, 4), write

    def forward(self, x):
        self.write(self.fc)
        return self.fc(x)


def quantizer_of(model, mode="eager"):
    return Quantizer(model.eval(), QuantizerConfig(execution_mode=mode))


@pytest.mark.parametrize("write", SEEN_IN_TRACE)
@pytest.mark.filterwarnings("ignore:.*which is lost:bitwright.errors.BitwrightWarning")
def test_the_plan_tells_of_writes_in_forward(write):
    """The problem names the weight and where to write instead; with ``strict`` it is an error."""
    x = torch.randn(2, 4)
    model = Constrained(write)
    (problem,) = [p for p in quantizer_of(model).plan((x,)).problems if p.code == "written-weight"]
    assert problem.where == "fc.weight"
    assert "'fc.parametrizations.weight.original'" in problem.message
    assert "op_state_spec" in problem.message
    with pytest.warns(BitwrightWarning, match=r"written-weight\] fc\.weight"):
        quantizer_of(copy.deepcopy(model)).prepare((x,))
    with pytest.raises(PlanError, match="written-weight"):
        quantizer_of(model).prepare((x,), strict=True)
    assert any(p.code == "written-weight" for p in KMeansPalettizer(model).plan((x,)).problems)


@pytest.mark.parametrize("write", EXPORTABLE)
def test_the_plan_of_a_graph_tells_of_writes(write):
    """torch.export keeps the op that writes, which in the prepared graph writes to what the simulator returned."""
    problems = quantizer_of(Constrained(write), "graph").plan((torch.randn(2, 4),)).problems
    assert [problem.where for problem in problems if problem.code == "written-weight"] == ["fc.weight"]


def test_the_first_values_of_lazy_modules_are_no_problem():
    """They come once, before any simulator; what the forward writes afterwards is told of."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.LazyLinear(4), nn.LazyLinear(2)

        def forward(self, x):
            y = self.last(self.first(x))
            with torch.no_grad():
                self.last.weight.mul_(0.5)
            return y

    for model in (nn.Sequential(nn.LazyConv1d(4, 1), nn.Flatten(), nn.LazyLinear(2)), Scaled()):
        x = torch.randn(2, 4) if isinstance(model, Scaled) else torch.randn(2, 3, 4)
        problems = quantizer_of(model).plan((x,)).problems
        written = [problem.where for problem in problems if problem.code == "written-weight"]
        assert written == (["last.weight"] if isinstance(model, Scaled) else [])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_weights_that_are_only_read_are_no_problem(mode):
    """Nor writes to a copy of one, nor to a bias, on which no simulator stands."""

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                self.fc.weight.clone().mul_(0.5)
                self.fc.bias.mul_(0.5)
            return self.fc(x)

    problems = quantizer_of(Reading(), mode).plan((torch.randn(2, 4),)).problems
    assert not [problem for problem in problems if problem.code == "written-weight"]


@pytest.mark.parametrize("write", SHOWN_BY_CODE)
def test_writes_between_steps_are_told(write):
    """Each place in the code once; and the remedy that the message names reaches the weight."""
    x = torch.randn(2, 4)
    prepared = quantizer_of(nn.Sequential(nn.Linear(4, 4))).prepare((x,))
    before = prepared[0].parametrizations.weight.original.detach().clone()
    plain = getattr(write, "__wrapped__", write)
    fresh = FunctionType(plain.__code__.replace(), plain.__globals__)  # a place that nobody has looked at yet
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with torch.no_grad():
                fresh(prepared[0])
    (told,) = [entry for entry in caught if issubclass(entry.category, BitwrightWarning)]
    assert f"{write.__name__} writes to 'weight' of the Linear by '.weight" in str(told.message)
    assert told.filename == __file__
    assert torch.equal(prepared[0].parametrizations.weight.original, before)
    prepared[0].parametrizations.weight.original.data.mul_(0.5)
    assert torch.equal(prepared[0].parametrizations.weight.original, before * 0.5)


def data_of_variable(layer):
    weight = layer.weight.data
    weight.mul_(0.5)


def initialised_data(layer):
    nn.init.constant_(layer.weight.data, 0.1)


def numpy_array(layer):
    layer.weight.detach().numpy()[...] = 0.1


@pytest.mark.parametrize("compressor", [Quantizer, KMeansPalettizer])
@pytest.mark.filterwarnings("ignore:.*which is lost:bitwright.errors.BitwrightWarning")
def test_what_a_simulator_keeps_is_not_written_to(compressor):
    """Such writes advance no version counter, and in eval mode without gradients the weight is made once."""
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    prepared = (quantizer_of(model) if compressor is Quantizer else KMeansPalettizer(model)).prepare((x,))
    with torch.no_grad():
        expected = prepared(x)
        for write in (data_in_place, detached, entry_of_data, data_of_variable, initialised_data, numpy_array):
            write(prepared[0])
            assert torch.equal(prepared(x), expected), write.__name__


def reads(layer, table):
    table["w"] = layer.weight
    table["w", 0] = layer.weight[0]
    table["data"] = layer.weight.data
    table["sum"] = layer.weight.data.sum() + layer.weight.detach().abs().max()
    table["size"] = layer.weight.shape[0]
    for weight in (layer.weight, layer.weight.t()):
        table["norm"] = weight.norm()
    return layer.weight.requires_grad_()


@pytest.mark.filterwarnings("error::bitwright.errors.BitwrightWarning")
def test_reads_are_not_taken_for_writes():
    """Also where what is read is stored under a key."""
    prepared = quantizer_of(nn.Sequential(nn.Linear(4, 4))).prepare((torch.randn(2, 4),))
    table: dict[object, object] = {}
    reads(prepared[0], table)
    assert len(table) == 6


def test_an_assigned_parameter_is_the_weight():
    """``layer.weight = nn.Parameter(...)`` reaches what the simulator reads, with a range of its own."""
    torch.manual_seed(0)
    x, new = torch.randn(2, 4), nn.Parameter(3 * torch.randn(4, 4))
    quantizer = quantizer_of(nn.Sequential(nn.Linear(4, 4)))
    prepared = quantizer.prepare((x,))
    layer = prepared[0]
    layer.weight = new
    assert layer.parametrizations.weight.original is new
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    step = new.detach().abs().amax(1, keepdim=True) / 127
    assert ((layer.weight - new).abs() <= step * 0.51).all()
    with quantizer.training_mode():
        prepared(x).sum().backward()
    assert new.grad is not None
    layer.extra = nn.Parameter(torch.zeros(1))
    assert layer.extra is layer._parameters["extra"]
