"""The eager front end sees what a forward does, and leaves no trace in the model."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.errors import TraceError
from bitwright.program import ValueKind, trace_eager
from bitwright.program.protect import preserved_state


class Mixed(nn.Module):
    """Calls modules, functions, operators and a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.fc.weight
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.fc(x)
        y = F.relu(self.norm(y)) * self.scale
        y = y + y
        y = torch.cat([y, self.tied(x)], dim=1)
        return y + shift


@pytest.fixture
def traced():
    model = Mixed()
    program = trace_eager(model, (torch.randn(3, 4),), {"shift": torch.randn(3, 8)})
    return model, program


def test_ops_are_named_by_module_function_and_count(traced):
    """The second call of a function in a module gets _1."""
    expected = ["fc.linear", "norm.batch_norm", "relu", "mul", "add", "tied.linear", "cat", "add_1"]
    assert [op.name for op in traced[1].ops if op.name in expected] == expected


def test_values_connect_producer_and_consumers(traced):
    """The output of one op is the same value object as the input of the next."""
    ops = {op.name: op for op in traced[1].ops}
    assert ops["relu"].arguments[0].value is ops["norm.batch_norm"].outputs[0]
    assert [a.label for a in ops["cat"].arguments] == ["tensors_0", "tensors_1"]
    assert ops["cat"].arguments[1].value is ops["tied.linear"].outputs[0]


def test_a_tensor_that_is_assigned_to_becomes_a_result():
    """After ``y[0] = z`` the tensor is what the assignment returned; it read the tensor as it was, and ``z``."""

    class Assigning(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y[0] = x[1] + 1
            return y - 1

    ops = {op.name: op for op in trace_eager(Assigning(), (torch.ones(2, 3),)).ops}
    assignment = ops["__setitem__"]
    assert [a.value for a in assignment.arguments] == [ops["mul"].outputs[0], ops["add"].outputs[0]]
    assert ops["sub"].arguments[0].value is assignment.outputs[0]


def test_tied_weights_are_one_state_with_all_names(traced):
    """Aliases are found once, in the program."""
    state = traced[1].states["fc.weight"]
    assert state.names == ("fc.weight", "tied.weight")
    assert {use.op.name for use in state.uses} == {"fc.linear", "tied.linear"}


def test_keyword_inputs_are_inputs(traced):
    """Inputs are numbered in the order of forward's signature, keywords included."""
    call = traced[1].calls[""]
    assert call.input_names == ["x", "shift"]
    assert all(value.kind is ValueKind.INPUT for value in call.inputs)
    add = next(op for op in traced[1].ops if op.name == "add_1")
    assert add.arguments[1].value is call.inputs[1]


def test_model_is_as_before():
    """Statistics, buffers, modes and random state survive tracing."""
    model = Mixed().train()
    model.norm.eval()
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    trace_eager(model, (torch.randn(3, 4, generator=torch.Generator()),), {"shift": torch.zeros(3, 8)})
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training
    assert not model.norm.training
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert torch.equal(random_state, torch.get_rng_state())


def test_module_called_twice_is_recorded_once():
    """Only the first call of a module is recorded; the second runs through."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.fc(x))

    program = trace_eager(Twice(), (torch.randn(1, 2),))
    assert [op.name for op in program.ops] == ["fc.linear"]


def test_failing_forward_names_the_module_and_restores_the_model():
    """The error says where, keeps the cause, and no hook stays behind."""

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("missing")

    model = nn.Sequential(nn.Linear(2, 2), Failing())
    with pytest.raises(TraceError, match=r"KeyError.*module '1'") as caught:
        trace_eager(model, (torch.randn(1, 2),))
    assert isinstance(caught.value.__cause__, KeyError)
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_rnn_weights_in_lists_are_seen():
    """An LSTM passes its weights as a list; each is an argument with its state."""
    program = trace_eager(nn.LSTM(3, 5), (torch.randn(4, 1, 3),))
    lstm = next(op for op in program.ops if op.type == "lstm")
    assert {a.value.state.name for a in lstm.arguments if a.value.state} == {
        "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0",
    }  # fmt: skip


def test_every_call_of_a_module_can_be_recorded():
    """Its ops then read and write the values of each call; the boundaries are as without."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x):
            return self.shared(self.shared(self.first(x)))

    model = Twice()
    once = trace_eager(model, (torch.randn(2, 4),))
    every = trace_eager(model, (torch.randn(2, 4),), every_call=True)
    assert [op.type for op in once.ops] == ["linear", "linear", "relu"]
    assert [op.type for op in every.ops] == ["linear", "linear", "relu", "linear", "relu"]
    for before, after in itertools.pairwise(every.ops):
        assert after.arguments[0].value is before.outputs[0]
    assert every.outputs == every.ops[-1].outputs
    assert len(every.states["shared.0.weight"].uses) == 2
    for program in (once, every):
        assert list(program.calls) == ["", "first", "shared", "shared.0", "shared.1"]
        assert [call.times for call in program.calls.values()] == [1, 1, 2, 2, 2]
        assert program.calls["shared"].children == ["shared.0", "shared.1"]
        assert [len(call.repeats) for call in program.calls.values()][:3] == [0, 0, 1]


class Tables(nn.Module):
    """Computes tables when it is first called, and keeps them and its last result."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("sums", torch.rand(3, 4))
        self.register_buffer("counts", torch.ones(3))
        self.centres, self.steps, self.last = None, {}, None

    def forward(self, x):
        if self.centres is None:
            self.centres = self.sums / self.counts.clamp(min=0.1)[:, None]
        if x.shape[-1] not in self.steps:
            self.steps[x.shape[-1]] = torch.arange(x.shape[-1]) * 0.1
        self.last = self.fc(x + self.steps[x.shape[-1]])
        return self.last @ self.centres.T


@pytest.mark.parametrize("was_called", [False, True])
def test_what_is_computed_once_is_not_recorded(was_called):
    """As in Mimi, whose codebook is a quotient of buffers: such calls would be planned and never made again."""
    model, x = Tables().eval(), torch.randn(2, 4)
    if was_called:
        model(x)
    assert [op.type for op in trace_eager(model, (x,)).ops if op.type != "T"] == ["add", "linear", "matmul"]


class Anchors(nn.Module):
    """Keeps the places of a grid until the size of its inputs is another one, as detectors do."""

    def __init__(self):
        super().__init__()
        self.shape, self.stride = None, torch.tensor([8.0, 16.0])

    def forward(self, x):
        if self.shape != x.shape:
            self.shape, self.anchors = x.shape, torch.arange(x.shape[-1]).type_as(x) + 0.5
            self.strides = x.new_full((1,), self.stride[1]) + torch.zeros_like(self.anchors)
        return (x + self.anchors) * self.strides


@pytest.mark.parametrize("called_before", [None, (3, 4), (2, 4)])
def test_what_has_the_shape_of_an_input_alone_is_a_constant(called_before):
    model = Anchors().eval()
    if called_before is not None:
        model(torch.randn(called_before))
    program = trace_eager(model, (torch.randn(2, 4),))
    assert [op.type for op in program.ops] == ["add", "mul"]
    once = [] if called_before == (2, 4) else ["add", "add", "arange", "type_as"]
    assert sorted(op.type for op in program.computed_once if op.type in ("add", "arange", "type_as")) == once


class Recurrent(nn.Module):
    """Keeps what it makes of its input and of a parameter: it is traced as it is called first."""

    def __init__(self):
        super().__init__()
        self.weight, self.memory, self.twice = nn.Parameter(torch.randn(4, 4)), None, None

    def forward(self, x):
        self.twice = self.weight * 2
        self.memory = x if self.memory is None else self.memory + x
        self.kept = self.memory @ self.twice
        return self.kept


def test_what_depends_on_inputs_or_parameters_is_recorded():
    model, calls = Recurrent().eval(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert [op.type for op in trace_eager(model, (torch.randn(2, 4),)).ops] == ["mul", "matmul"]
    assert len(calls) == 1


def test_buffers_that_hold_nan_are_seen_to_be_as_before():
    """One whose elements share memory could not be written back."""

    class Unset(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("unset", torch.full((1,), float("nan")).expand(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.data.add_(1)
            return torch.relu(x)

    model = Unset()
    trace_eager(model, (torch.randn(2, 3),))
    assert model.unset.isnan().all()
    assert model.calls == 0


def test_a_buffer_that_grows_is_as_before() -> None:
    """``buffer.data = ...`` may give it another size."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(5, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache.data = torch.cat([self.cache, x])
            return self.cache.mean(0)

    model = Growing()
    with preserved_state(model):
        model(torch.ones(4, 8))
        assert model.cache.shape == (9, 8)
    assert torch.equal(model.cache, torch.zeros(5, 8))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_arguments_of_pools_have_their_names(kind, dims):
    """As torch's modules hand them over, by position; the names are those of the schema."""
    schema = getattr(torch.ops.aten, f"{kind}_pool{dims}d").default._schema
    divisor = {"divisor_override": 4} if kind == "avg" and dims > 1 else {}
    pool = getattr(nn, f"{kind.title()}Pool{dims}d")(3, 2, 1, ceil_mode=True, **divisor)
    program = trace_eager(pool, (torch.randn(1, 2, *[8] * dims),))
    named = {"input", *program.ops[0].literals} - {"return_indices"}
    assert named == {"input", *(argument.name for argument in schema.arguments)} - {"self"}
    assert program.ops[0].literals["ceil_mode"] is True


class KeepsThings(nn.Module):
    """Counts its calls and keeps data of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls, self.last, self.sizes, self.sums = 0, None, [], {"all": torch.zeros(())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen_any = True
        self.sizes.append(len(x))
        self.sums["all"] += x.sum()
        x = self.layer(x) if self.last is None else self.layer(x) + self.last
        self.last = x
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_what_forward_keeps_in_attributes_is_as_before(fails: bool) -> None:
    """A counter would begin one further on, and the next batch would meet the example's data."""
    model = KeepsThings()
    if fails:
        model.layer.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(TraceError):
            trace_eager(model, (torch.randn(2, 4),))
    else:
        assert [op.type for op in trace_eager(model, (torch.randn(2, 4),)).ops] == ["sum", "add_", "linear"]
    assert (model.calls, model.last, model.sizes, model.sums) == (0, None, [], {"all": torch.zeros(())})
    assert not hasattr(model, "seen_any")


def test_a_model_that_is_built_by_its_first_call_is_planned_as_it_is_then() -> None:
    """The flag that says so would otherwise be put back, and the next call would make another layer."""

    class Built(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_built = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_built:
                self.layer = nn.Linear(x.shape[-1], 3)
                self.register_buffer("table", torch.arange(3.0) * 2)
                self.is_built = True
            return self.layer(x) * self.table

    model = Built()
    program = trace_eager(model, (torch.randn(2, 4),))
    layer = model.layer
    assert [op.name for op in program.ops] == ["layer.linear", "mul"]
    assert {"layer.weight", "layer.bias", "table"} == program.states.keys()
    model(torch.randn(2, 4))
    assert model.layer is layer


@pytest.mark.parametrize("write", [lambda w: w.div_(2.0), lambda w: w.data.div_(2.0)], ids=["parameter", "data"])
def test_a_model_that_writes_to_its_parameters_once_does_not_do_so_again(write) -> None:
    """Parameters are not put back, so that the flag that says so is not either."""

    class Rescaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.is_rescaled = nn.Linear(4, 4), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_rescaled:
                write(self.layer.weight)
                self.is_rescaled = True
            return self.layer(x)

    model = nn.Sequential(Rescaled())
    half = model[0].layer.weight.detach() / 2
    trace_eager(model, (torch.randn(2, 4),))
    model(torch.randn(2, 4))
    assert torch.equal(model[0].layer.weight, half)


def test_lazy_modules_with_buffers_are_made_by_the_trace() -> None:
    """They have no numbers before, which could be put back."""
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    trace_eager(model, (torch.randn(2, 4),))
    assert model[0].in_features == 4
    assert model[1].running_mean.shape == (3,)
