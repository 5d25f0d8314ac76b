"""Where eager mode puts simulators, and what it does when something fails."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from bitwright.errors import BitwrightWarning, ConfigMatchWarning, PlanError, TraceError, UnplannedCallWarning
from bitwright.export.onnx import export_onnx, run_onnx
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerChannelGranularity, default_activation_quantization_spec
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.measures import sqnr

from .networks import GroupedCNN, TinyTransformer


def simulator_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FakeQuantizeImplBase)]


class Calls(nn.Module):
    """One function twice, an operator, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        y = self.fc(x) + x
        y = y + 1
        return torch.matmul(y, y.T) if twice else y * 2


def test_names_follow_module_function_and_argument():
    """Simulators are children of the calling module, named by call and argument."""
    prepared = Quantizer(Calls(), QuantizerConfig(execution_mode="eager")).prepare((torch.randn(2, 4),))
    assert set(simulator_names(prepared)) == {
        *("fc.linear_quantize_input", "fc.linear_quantize_output_0", "fc.parametrizations.weight.0"),
        *("add_quantize_input", "add_quantize_other", "add_quantize_output_0"),
        *("add_1_quantize_input", "add_1_quantize_output_0", "mul_quantize_input", "mul_quantize_output_0"),
    }


def test_unseen_call_passes_through_with_one_warning():
    """Control flow may change: the call runs in float, and is named once."""
    torch.manual_seed(0)
    quantizer = Quantizer(Calls(), QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((torch.randn(2, 4),)).eval()
    with pytest.warns(UnplannedCallWarning, match="'matmul'"):
        prepared(torch.randn(2, 4), twice=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepared(torch.randn(2, 4), twice=True).shape == (2, 2)


class WithUnreached(nn.Module):
    """A head, two more that run in training only, and a target network that needs no gradients."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.auxiliary = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        self.more = nn.ModuleList([nn.Linear(8, 2)])
        self.target = nn.Linear(8, 2)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        if not self.training:
            return self.head(hidden)
        with torch.no_grad():
            self.target(hidden)
        return self.head(hidden) + self.auxiliary(hidden) + self.more[0](hidden)


@pytest.mark.parametrize("preset", ["w8a8", "w8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_unreached_module_passes_through_with_one_warning(preset, compiled):
    """It runs in float, and is named once, whatever it calls, unless the config leaves it out."""
    torch.manual_seed(0)
    model, x = WithUnreached(), torch.randn(3, 4)
    config = getattr(QuantizerConfig.presets, preset)(execution_mode="eager")
    quantizer = Quantizer(model, config.set_module_name("more", None))
    prepared = quantizer.prepare((x,))
    run = torch.compile(prepared, backend="eager") if compiled else prepared
    with quantizer.training_mode():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UnplannedCallWarning)
            run(x)
            run(x)
        hidden = torch.relu(prepared.body(x))
        auxiliary, more = prepared.auxiliary, prepared.more[0]
        assert torch.equal(more(hidden), nn.functional.linear(hidden, more.weight, more.bias))
        assert torch.equal(auxiliary[0](hidden), nn.functional.linear(hidden, auxiliary[0].weight, auxiliary[0].bias))
    told = [str(warning.message) for warning in caught if warning.category is UnplannedCallWarning]
    assert [message.split(" was ")[0] for message in told] == ["The module 'auxiliary'"]
    assert "exclude the module in the config" in told[0]


class WithHead(nn.Module):
    """Has an auxiliary head in training only, and adds something where it is told to."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, more=False):
        result = self.fc(x) + x
        if more:
            result = result.matmul(x.T)
        return (result, result * 2.0) if self.training else result


def test_the_remedy_for_a_call_of_training_is_one_that_helps():
    """No example inputs make eval mode take that path; there is nothing to do, and a filter for the warning."""
    quantizer = Quantizer(WithHead(), QuantizerConfig(execution_mode="eager"))
    x = torch.randn(2, 4)
    prepared = quantizer.prepare((x,))
    with quantizer.training_mode(), pytest.warns(UnplannedCallWarning, match="'mul' .*training only.*no part") as told:
        result, twice = prepared(x)
    assert len(told) == 1
    assert torch.equal(twice, 2 * result)
    with pytest.warns(UnplannedCallWarning, match="'matmul' .*Prepare with example inputs that take this path") as told:
        prepared.eval()(x, more=True)
    assert "training" not in str(told[0].message)


def test_example_inputs_without_elements_are_told():
    """Nothing is known of activations then; one problem names them, and another batch size or no spec is the remedy."""
    model, config = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), QuantizerConfig.presets
    (problem,) = Quantizer(model, config.w8a8(execution_mode="eager")).plan((torch.randn(0, 4),)).problems
    assert (problem.code, problem.where) == ("empty-activation", "0.linear")
    assert "'2.linear'" in problem.message
    with pytest.warns(ConfigMatchWarning, match="empty-activation.*batch of size 1"):
        Quantizer(copy.deepcopy(model), config.w8a8(execution_mode="eager")).prepare((torch.randn(0, 4),))
    assert not Quantizer(model, config.w8a8(execution_mode="eager")).plan((torch.randn(1, 4),)).problems
    assert not Quantizer(model, config.w8(execution_mode="eager")).plan((torch.randn(0, 4),)).problems


def test_dynamic_shapes_have_no_effect_unless_a_target_is_asked():
    """Eager mode captures nothing itself; the check of a target's operators captures the model with them."""
    config, x = QuantizerConfig.presets.w8(execution_mode="eager"), torch.randn(2, 4)
    quantizer, shapes = Quantizer(nn.Linear(4, 2), config), {"input": {0: torch.export.Dim("batch")}}
    with pytest.warns(UserWarning, match="^dynamic_shapes has no effect in eager mode; pass them to the exporter"):
        quantizer.plan((x,), shapes)
    with pytest.warns(UserWarning, match="^dynamic_shapes and export_with_no_grad have no effect in eager mode"):
        quantizer.plan((x,), shapes, export_with_no_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        quantizer.plan((x,), shapes, target="torch")
        quantizer.prepare((x,), shapes, target="torch")


class ByKind(nn.Module):
    """What it does depends on what the classes of its layers are, or on their names."""

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)])
        self.kind = kind

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if (self.kind == "type" and type(layer) is nn.Linear) or type(layer).__name__ == self.kind:
                x = torch.relu(x) + x
        return x


@pytest.mark.parametrize("again", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_layers_keep_the_names_of_their_classes(again):
    """A forward that asks for them goes the way of the float model; in copies too."""
    torch.manual_seed(0)
    model, x = ByKind("Linear").eval(), torch.randn(4, 8)
    expected = model(x)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    assert sqnr(expected, again(prepared).eval()(x)) > 30


def test_another_path_with_simulators_is_told():
    """A forward that compares classes leaves simulators without data; all are named, with what to do."""
    with pytest.warns(UnplannedCallWarning, match=r"'add_quantize_output_0'.*saw nothing.*isinstance"):
        Quantizer(ByKind("type"), QuantizerConfig.presets.w8a8(execution_mode="eager")).prepare((torch.randn(4, 8),))


class ByName(nn.Module):
    """Looks in a table of its own for the names of its parameters."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.scales = {("weight", "bias"): 1.0}

    def forward(self, x):
        return self.fc(x) * self.scales[tuple(self.fc._parameters)]


def test_a_forward_that_fails_with_simulators_is_told_why():
    """The error says what simulators change, keeps its cause, and the model is as it was."""
    torch.manual_seed(0)
    model, x = ByName(), torch.randn(4, 8)
    before, expected = copy.deepcopy(model.state_dict()), model(x)
    told = r"KeyError.*'bias'.*parametrizations.*execution_mode='graph'"
    with pytest.raises(RuntimeError, match=told) as caught:
        Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager")).prepare((x,))
    assert isinstance(caught.value.__cause__, KeyError)
    assert_untouched(model, before, list(before))
    assert torch.equal(model(x), expected)


def noisy(x):
    """Sums and products that training alone makes."""
    return x + (x * 100.0 + 1.0) * 1e-9


class Paths(nn.Module):
    """Other calls run in training than in evaluation: more of them, fewer, or the same spelt in another way."""

    def __init__(self, path):
        super().__init__()
        self.path, self.last = path, nn.Linear(4, 4)

    def forward(self, x):
        other = self.training
        if self.path == "inserted" and other:
            x = noisy(x)
        elif self.path == "left out" and not other:
            x = x * 50.0 + 0.0
        elif self.path == "loop":
            for _ in range(2 + other):
                x = x * 1.0 + 0.0
        elif self.path == "spelt" and other:
            x = (x + 0.5) * 0.25
        elif self.path == "spelt":
            x = (x + 0.5) * 0.5
        return self.last((x + 3.0) * 2.0)


@pytest.mark.parametrize("path", ["inserted", "left out", "loop", "spelt"])
def test_calls_are_known_by_their_place_in_the_code(path):
    """Whatever else runs before it, the last sum is observed by its own simulator, and nothing else is."""
    torch.manual_seed(0)
    x = torch.rand(8, 4)
    quantizer = Quantizer(Paths(path).eval(), QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with warnings.catch_warnings(), quantizer.training_mode(prepared):
        warnings.simplefilter("error" if path in ("spelt", "left out") else "ignore", UnplannedCallWarning)
        prepared.train()(x)
    numbers = {name.split("_quantize")[0] for name, _ in prepared.named_children()} - {"last"}
    last = max((name for name in numbers if name.startswith("add")), key=lambda name: int(name[4:] or 0))
    observed = prepared.get_submodule(f"{last}_quantize_output_0").qparams_calculator
    expected = 3.0 + ((x + 0.5) * 0.25 if path == "spelt" else x)
    assert float(observed.running_max) == pytest.approx(float(expected.max()), rel=2e-2)


class WithAuxiliary(nn.Module):
    """Multiplies something else where it has a factor, before the product that is there always."""

    factor = None

    def forward(self, x):
        auxiliary = None if self.factor is None else x * self.factor
        result = (x + 1) * 2
        return result if auxiliary is None else (result, auxiliary)


@pytest.mark.parametrize("ranges", ["minmax", "mse", "histogram"])
@pytest.mark.parametrize("calculator", ["default", "accumulated", "moving_average", "lsq"])
@pytest.mark.parametrize("factor", [1000.0, float("nan")])
def test_what_a_call_taken_for_another_showed_is_forgotten(calculator, ranges, factor):
    """The planned product's simulators hold what they would hold without the other call before it."""
    torch.manual_seed(0)
    spec = {"dtype": torch.int8, "qparam_calculator_cls": calculator, "range_calculator_cls": ranges}
    config = QuantizerConfig(
        execution_mode="eager",
        global_config={"op_input_spec": {"*": spec}, "op_output_spec": {"*": spec}, "op_state_spec": None},
    )
    batches, held = [torch.rand(8, 4) for _ in range(3)], []
    for auxiliary in (factor, None):
        quantizer = Quantizer(WithAuxiliary(), config)
        prepared = quantizer.prepare((batches[0],))
        prepared.factor = auxiliary
        with quantizer.training_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UnplannedCallWarning)
            for batch in batches:
                prepared(batch)
        held.append({name: value for name, value in prepared.state_dict().items() if "mul" in name})
    assert held[0].keys() == held[1].keys()
    for name, value in held[0].items():
        assert torch.equal(value, held[1][name]), name


class Grid(nn.Module):
    """Keeps a table until the size of its inputs is another one; one layer, and calls like those of the table."""

    def __init__(self):
        super().__init__()
        self.layer, self.shape = nn.Conv2d(3, 4, 1), None

    def forward(self, x):
        y = self.layer(x)
        if self.shape != x.shape:
            self.shape, places = x.shape, torch.arange(x.shape[-1]).type_as(x) + 0.5
            self.table = torch.cat([places, places + 100])[: x.shape[-1]]
        return torch.cat([y + self.table, y], 1) + 1


def test_tables_that_are_kept_for_one_size_take_no_simulators_at_another():
    quantizer, x = Quantizer(Grid(), QuantizerConfig.presets.w8a8(execution_mode="eager")), torch.randn(2, 3, 5, 6)
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        prepared(x)
    prepared.eval()
    expected = prepared(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(prepared(x[:1]), expected[:1])


class MasksForExport(nn.Module):
    """Adds a mask that it makes while it is captured only, from positions."""

    def forward(self, x):
        y = x * 2
        if torch.compiler.is_exporting():
            rows, columns = torch.arange(2) + 0, torch.arange(4) + 0
            y = y + (rows[:, None] < columns).to(y.dtype)
        return y


def test_a_call_that_export_alone_makes_is_told_as_such():
    """Sums of positions are no news; the sum with the mask is, and the message says where it came from."""
    x = torch.randn(2, 4)
    prepared = Quantizer(MasksForExport().eval(), QuantizerConfig(execution_mode="eager")).prepare((x,))
    with pytest.warns(UnplannedCallWarning) as caught:
        torch.export.export(prepared, (x,))
    (message,) = [str(entry.message) for entry in caught if entry.category is UnplannedCallWarning]
    assert "'add'" in message
    assert "while torch.export captured the model" in message


def masked(y):
    """A mask from positions, as transformers make one while they are captured, that changes nothing."""
    return y.masked_fill(torch.arange(4) + 0 < 0, 0.0)


class MasksInAnotherFunction(nn.Module):
    """As ``MasksForExport``, in a function of its own and before the sum that is there always."""

    def forward(self, x):
        y = x * 2
        if torch.compiler.is_exporting():
            y = masked(y)
        return y + 1.0


class MasksInTheSameFunction(nn.Module):
    """Adds a mask before the sums that are there always, while it is captured, or when it is given one."""

    def __init__(self, repeated):
        super().__init__()
        self.repeated = repeated

    def forward(self, x, mask=None):
        y = x * 2
        if torch.compiler.is_exporting():
            mask = torch.ones(4, dtype=torch.bool)
        if mask is not None:
            y = y + mask
        for _ in range(2 if self.repeated else 1):
            y = y + x
        return y * 0.5


@pytest.mark.parametrize("repeated", [False, True])
def test_a_call_before_the_planned_ones_does_not_take_their_simulators(repeated):
    """It is found out when those come, warned of, and told apart from then on."""
    torch.manual_seed(0)
    x, mask = torch.randn(2, 4), torch.full((4,), 30.0)
    quantizer = Quantizer(MasksInTheSameFunction(repeated).eval(), QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    with pytest.warns(UnplannedCallWarning, match=r"'add' in MasksInTheSameFunction.forward .* taken for one further"):
        prepared(x, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnplannedCallWarning)
        again = prepared(x, mask)
    names = ("mul", "add", "add_1", "mul_1") if repeated else ("mul", "add", "mul_1")
    y = prepared.mul_quantize_output_0(prepared.mul_quantize_input(x) * 2) + mask
    for name in names[1:-1]:
        y = getattr(prepared, f"{name}_quantize_input")(y) + getattr(prepared, f"{name}_quantize_other")(x)
        y = getattr(prepared, f"{name}_quantize_output_0")(y)
    y = prepared.mul_1_quantize_output_0(prepared.mul_1_quantize_input(y) * 0.5)
    assert torch.equal(again, y)


class Rescaled(nn.Module):
    """Divides its weight when it is evaluated for the first time, as RWKV does."""

    def __init__(self):
        super().__init__()
        self.fc, self.is_rescaled = nn.Linear(4, 4), False

    def forward(self, x):
        if not self.is_rescaled:
            with torch.no_grad():
                self.fc.weight.div_(4)
                self.fc.bias[:2] = 0.125
            self.is_rescaled = True
        return self.fc(x) * 2


def test_what_is_written_to_parameters_is_no_activation(tmp_path):
    """A simulator would round the parameters; it sees one call at most, and the file could not be written without."""
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    x, model = torch.randn(8, 4), Rescaled().eval()
    weight = model.fc.weight.detach().clone()
    quantizer = Quantizer(model, QuantizerConfig(execution_mode="eager"))
    with pytest.warns(BitwrightWarning, match=r"written-weight\] fc.weight: the model's .*by div_"):
        prepared = quantizer.prepare((x,))
    assert not any("div" in name or "setitem" in name for name in simulator_names(prepared))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
        prepared(x)
    original = prepared.fc.parametrizations.weight.original
    assert any(torch.equal(original, weight / divisor) for divisor in (1, 4))
    (found,) = run_onnx(export_onnx(prepared, (x,), tmp_path / "m.onnx"), (x,))
    assert torch.equal(found, prepared(x))


def test_weights_that_a_hook_computes_are_seen_by_their_simulators():
    """Such a weight crosses no boundary of its layer, whose only call is then looked at as in any other module."""
    torch.manual_seed(0)
    x, model = torch.randn(64, 16), nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(16, 16))).eval()
    with torch.no_grad():
        expected = model(x)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager"))
    with pytest.warns(ConfigMatchWarning, match="computed-weight"):
        prepared = quantizer.prepare((x,))
    assert {"0.linear_quantize_input", "0.linear_quantize_weight"} <= set(simulator_names(prepared))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    weight = prepared[0].linear_quantize_weight
    with torch.no_grad():
        found = prepared(x)
        assert 25 < sqnr(expected, found) < 60
        assert weight(prepared[0].weight).unique().numel() > 16
    assert sqnr(found, quantizer.finalize(prepared)(x).detach()) > 60


class Residual(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + x


class Dense(nn.ModuleDict):
    """Concatenates what its layers have made so far, as DenseNet does."""

    def forward(self, x):
        for layer in self.values():
            x = torch.cat([x[:, :8], layer(x)], 1)
        return x


class Listed(nn.ModuleList):
    def forward(self, x):
        for position in range(len(self)):
            x = x + self[position - len(self)](x)
        return x


class Walking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        for layer in self.children():
            x = x * 0.5 + layer(x)
        return x


class WalkingUnderADecorator(Walking):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class WalkingByAProperty(Walking):
    @property
    def layers(self):
        return list(self.children())

    def forward(self, x):
        for layer in self.layers:
            x = x * 0.5 + layer(x)
        return x


def children_of(module):
    return module.children()


class WalkingByAFunction(Walking):
    def forward(self, x):
        for layer in children_of(self):
            x = x * 0.5 + layer(x)
        return x


ITERATING = {
    "sequential": lambda: Residual(nn.Linear(16, 16), nn.ReLU()),
    "dict": lambda: Dense({"a": nn.Linear(16, 8), "b": nn.Linear(16, 8)}),
    "list": lambda: Listed([nn.Linear(16, 16), nn.Linear(16, 16)]),
    "children": Walking,
    "decorated": WalkingUnderADecorator,
    "property": WalkingByAProperty,
    "function": WalkingByAFunction,
}


@pytest.mark.parametrize("kind", ITERATING)
def test_modules_that_go_over_their_children_do_not_meet_simulators(kind, tmp_path):
    """Simulators are children too, and were called as if they were layers of the model."""
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    x, model = torch.randn(64, 16), ITERATING[kind]().eval()
    with torch.no_grad():
        expected = model(x)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    children = len(list(prepared.children()))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    with torch.no_grad():
        found = prepared(x)
        assert 30 < sqnr(expected, found) < 60
        assert torch.equal(found, copy.deepcopy(prepared)(x))
    assert children == len(list(prepared.children())) > 2  # others do meet them
    (exported,) = run_onnx(export_onnx(prepared, (x,), tmp_path / "m.onnx"), (x,))
    assert sqnr(found, exported) > 60
    assert sqnr(found, quantizer.finalize(prepared)(x).detach()) > 60


class WalkingWithAWeight(Walking):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        for layer in self.children():
            if not isinstance(layer, nn.ModuleDict):  # parametrizations
                x = x * 0.5 + layer(x)
        return x @ self.weight


def test_a_plan_for_a_graph_leaves_the_children_hidden():
    """It looks at a prepared model without the simulators of its weights, which it puts back as they were."""
    torch.manual_seed(0)
    x, model = torch.randn(64, 16), WalkingWithAWeight().eval()
    prepared = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager")).prepare((x,))
    expected, modules, parameters = prepared(x), prepared._modules, prepared._parameters
    Quantizer(prepared, QuantizerConfig()).plan((x,))
    assert prepared._modules is modules
    assert prepared._parameters is parameters
    assert torch.equal(prepared(x), expected)


class SumsOfAnyNumber(nn.Module):
    """Adds masks, each in a place of its own, and then something as often as it is told."""

    def forward(self, x, first=None, second=None, times=1):
        y = x * 2
        if first is not None:
            y = y + first
        if second is not None:
            y = y + second
        for _ in range(times):
            y = y + x
        return y


@pytest.mark.filterwarnings("ignore::bitwright.errors.UnplannedCallWarning")
def test_more_calls_than_planned_in_old_places_and_new_ones():
    """The first in the planned place is quantized, in whichever company."""
    x = torch.randn(2, 4)
    quantizer = Quantizer(SumsOfAnyNumber().eval(), QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    prepared(x, x, x, times=3)
    y = prepared.mul_quantize_output_0(prepared.mul_quantize_input(x) * 2) + x + x
    y = prepared.add_quantize_output_0(prepared.add_quantize_input(y) + prepared.add_quantize_other(x)) + x + x
    assert torch.equal(prepared(x, x, x, times=3), y)


def test_exporters_capture_again_what_they_learned_while_capturing(tmp_path):
    """A mask of flags cannot be quantized: ONNX Runtime would refuse the file."""
    pytest.importorskip("onnxruntime")
    x = torch.randn(2, 4)
    quantizer = Quantizer(MasksInTheSameFunction(False).eval(), QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnplannedCallWarning)
        with pytest.raises(UnplannedCallWarning, match="taken for one further on"):
            export_onnx(prepared, (x,), tmp_path / "never.onnx")
    assert not (tmp_path / "never.onnx").exists()
    with pytest.warns(UnplannedCallWarning, match="taken for one further on"):
        path = export_onnx(prepared, (x,), tmp_path / "m.onnx")
    (found,) = run_onnx(path, (x,))
    flags = torch.ones(4, dtype=torch.bool)
    with pytest.warns(UnplannedCallWarning, match="taken for one further on"):
        prepared(x, flags)  # what was written is a copy, which alone has learned
    assert torch.equal(found, prepared(x, flags))


@pytest.mark.filterwarnings("ignore::bitwright.errors.UnplannedCallWarning")
def test_calls_are_known_by_their_place_while_export_captures_too():
    x = torch.randn(2, 4)
    quantizer = Quantizer(MasksInAnotherFunction().eval(), QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    program = torch.export.export(prepared, (x,))
    assert torch.equal(program.module()(x), prepared(x))


def test_simulators_act_only_where_planned():
    """With only matmul configured, the output is the matmul of the quantized operands."""
    spec = QuantizationSpec(dtype="int4")
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_input_spec=None, op_output_spec=None, op_state_spec=None,
            op_type_config={"add": {"op_input_spec": {0: spec}, "op_output_spec": None, "op_state_spec": None}},
        ),
        execution_mode="eager",
    )  # fmt: skip
    model, x = Calls(), torch.randn(2, 4)
    float_model = copy.deepcopy(model)
    prepared = Quantizer(model, config).prepare((x,)).eval()
    assert simulator_names(prepared) == ["add_quantize_input", "add_1_quantize_input"]
    first = prepared.add_quantize_input(float_model.fc(x)) + x
    assert torch.equal(prepared(x), (prepared.add_1_quantize_input(first) + 1) * 2)


def test_in_place_call_changes_the_tensor_it_was_called_on():
    """`x.add_(y)` without using its result still has its effect."""

    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            y.add_(x)
            return y

    quantizer = Quantizer(InPlace(), QuantizerConfig(execution_mode="eager"))
    x = torch.randn(3, 4)
    prepared = quantizer.prepare((x,)).eval()
    assert torch.allclose(prepared(x), 2 * x, atol=0.1)
    assert not torch.equal(prepared(x), 2 * x)


@pytest.mark.parametrize("kind", ["default", "lsq", "lsq_plus", "pact"])
def test_in_place_calls_train_as_others_do(kind: str):
    """Learned ranges keep what they quantized; it must not be overwritten by the call, nor by its result."""

    class Sum(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.in_place, self.fc = in_place, nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            return torch.add(y, x) if not self.in_place else y.add_(x)

    spec = QuantizationSpec(dtype="uint8" if kind == "pact" else "int8", fake_quantize_cls=kind)
    module = ModuleQuantizerConfig(op_input_spec={"*": spec}, op_output_spec={"*": spec}, op_state_spec=None)
    x = torch.rand(8, 4)
    gradients = []
    for in_place in (False, True):
        quantizer = Quantizer(Sum(in_place), QuantizerConfig(global_config=module, execution_mode="eager"))
        prepared = quantizer.prepare((x,))
        with quantizer.training_mode():
            prepared.train()(x).square().sum().backward()
        gradients.append([p.grad for p in prepared.parameters()])
    assert len(gradients[0]) == len(gradients[1]) >= (2 if kind == "default" else 5)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_functional_weight_gets_its_axis_from_the_op():
    """F.linear and conv in a custom module, and subclasses of nn.Linear, have default axes."""

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight)

    class Sub(nn.Linear):
        pass

    for model in (Custom(), Sub(4, 6)):
        prepared = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((torch.randn(2, 4),))
        simulator = prepared.parametrizations.weight[0]
        assert simulator.granularity == PerChannelGranularity(axis=0)
        assert simulator.qparams_calculator.scale.shape == (6, 1)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_biases_and_free_parameters_get_an_axis_too(mode):
    """A bias has its channels along 0; the columns of a matrix product's second factor are its outputs."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(4, 8), nn.Parameter(torch.randn(8, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(self.layer(x), self.factor)

    channels, blocks = {"type": "per_channel"}, {"type": "per_block", "block_size": 2}
    for name, granularity, of in (
        ("bias", channels, lambda model: model.layer.bias.abs()),
        ("factor", channels, lambda model: model.factor.abs().amax(0, keepdim=True)),
        ("factor", blocks, lambda model: model.factor.abs().unflatten(0, (-1, 2)).amax(1)),
    ):
        model = Product()
        spec = {name: QuantizationSpec(dtype="int8", granularity=granularity)}
        states = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec=spec)
        largest = of(model).detach()
        prepared = Quantizer(model, QuantizerConfig(global_config=states, execution_mode=mode)).prepare(
            (torch.randn(2, 4),)
        )
        (simulator,) = (one for one in prepared.modules() if isinstance(one, FakeQuantizeImplBase))
        scale = simulator.qparams_calculator.scale
        assert scale.shape == largest.shape
        torch.testing.assert_close(scale / scale.max(), largest / largest.max())


class Unresolved(nn.Module):
    """Its einsum weight has no default axis."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,jk->ik", self.fc(x), self.weight)


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor], keys: list[str]) -> None:
    assert list(model.state_dict()) == keys
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not simulator_names(model)
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert all(not hasattr(m, "parametrizations") for m in model.modules())


def test_unresolved_axis_is_an_error_and_the_model_is_untouched():
    """The error names the tensor and the rule."""
    model = Unresolved()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PlanError, match=r"weight: Weight fake-quantize modules with unresolved axis=None"):
        Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((torch.randn(2, 4),))
    assert_untouched(model, before, list(before))


@pytest.mark.parametrize("make", [GroupedCNN, TinyTransformer])
def test_failure_while_inserting_puts_the_model_back(make, monkeypatch):
    """Whatever fails half way, the model is as it was, in the same order."""
    torch.manual_seed(0)
    model = make()
    inputs = (torch.randn(2, 3, 8, 8),) if make is GroupedCNN else (torch.randint(0, 64, (1, 4)),)
    before = copy.deepcopy(model.state_dict())
    expected = model.eval()(*inputs)
    calls = {"n": 0}
    original = FakeQuantizeImplBase.disable_observer

    def fail_late(self):
        calls["n"] += 1
        if calls["n"] == 5:
            raise ValueError("boom")
        return original(self)

    monkeypatch.setattr(FakeQuantizeImplBase, "disable_observer", fail_late)
    with pytest.raises(ValueError, match="boom"):
        Quantizer(model, QuantizerConfig(execution_mode="eager")).prepare(inputs)
    assert_untouched(model, before, list(before))
    assert torch.equal(model(*inputs), expected)


def test_module_boundary_specs_apply_to_the_tensor_that_crosses():
    """module_input_spec beats op specs, keyword inputs included."""

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x) + shift

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * 2, shift=x)

    four, eight = QuantizationSpec(dtype="int4"), default_activation_quantization_spec()
    config = QuantizerConfig(
        global_config=None,
        module_name_configs={
            "inner": ModuleQuantizerConfig(
                module_input_spec={0: four, 1: eight}, op_input_spec=None, op_output_spec=None, op_state_spec=None
            )
        },
        execution_mode="eager",
    )
    prepared = Quantizer(Outer(), config).prepare((torch.randn(2, 4),))
    found = {n: m.dtype for n, m in prepared.named_modules() if isinstance(m, FakeQuantizeImplBase)}
    assert found == {"inner.sigmoid_quantize_input": torch.int4, "inner.add_quantize_other": torch.int8}


class Largest(nn.Module):
    def forward(self, x):
        return torch.topk(x, 2)


class ReadsByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.largest = nn.Linear(8, 8), Largest()

    def forward(self, x):
        return self.largest(self.layer(x)).values


def test_named_outputs_keep_their_names():
    """What ``torch.topk`` returns is no named tuple of Python's, and stays what it is with a simulator on it."""
    spec = QuantizationSpec(dtype="int8")
    module = ModuleQuantizerConfig(module_output_spec={"*": spec})
    config = QuantizerConfig(global_config=None, module_name_configs={"largest": module}, execution_mode="eager")
    model, x = ReadsByName().eval(), torch.randn(4, 8)
    expected = model(x)
    found = Quantizer(model, config).prepare((x,))(x)
    assert not torch.equal(expected, found)
    torch.testing.assert_close(found, expected, rtol=0, atol=expected.abs().max().item() / 100)


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) + x


class HandsOn(nn.Module):
    """A wrapper that has the attributes of the module inside it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) + 1


def test_wrappers_that_hand_attributes_on_have_simulators_of_their_own():
    """The same call in wrapper and inner module gives simulators of the same name, each in its module."""
    x = torch.randn(4, 8)
    prepared = Quantizer(HandsOn(Sums()).eval(), QuantizerConfig(execution_mode="eager")).prepare((x,))
    for module in (prepared, prepared.inner):
        assert any(name.startswith("add_quantize_") for name in module._modules)


def test_a_name_that_is_taken_is_told():
    model = Sums().eval()
    model.add_quantize_input = 3
    model.add_quantize_input_0 = 3
    model.add_quantize_output_0 = 3
    before = dict(model._modules)
    with pytest.raises(ValueError, match=r"has an attribute 'add_quantize_.*Rename it"):
        Quantizer(model, QuantizerConfig(execution_mode="eager")).prepare((torch.randn(4, 8),))
    assert model._modules == before


class Interrupted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        if parametrize.is_parametrized(self.layer):
            raise KeyboardInterrupt
        return self.layer(x)


def test_an_interruption_while_preparing_puts_the_model_back():
    model = Interrupted().eval()
    with pytest.raises(KeyboardInterrupt):
        Quantizer(model, QuantizerConfig(execution_mode="eager")).prepare((torch.randn(4, 8),))
    assert type(model.layer) is nn.Linear
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]
    assert list(model.layer.children()) == []


class Padded(nn.Module):
    """Torch's encoder, which makes nested tensors of padded inputs, or the whole transformer around one."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        whole = nn.Transformer(8, 2, 2, 1, 16, dropout=0.0, batch_first=True)
        self.inner = whole if kind is nn.Transformer else whole.encoder
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        if isinstance(self.inner, nn.Transformer):
            y = self.inner(x, x.flip(1), src_key_padding_mask=padding, memory_key_padding_mask=padding)
        else:
            y = self.inner(x, src_key_padding_mask=padding)
        return self.head(y * 2)


PADDING = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])


@pytest.mark.parametrize("kind", [nn.TransformerEncoder, nn.Transformer])
def test_encoders_take_padding(kind):
    """Simulators of activations take no nested tensors: the encoder makes none, and is right where nothing is padded.

    The decoder does not look at what is padded.
    """
    torch.manual_seed(0)
    model = Padded(kind).eval()
    inputs = torch.randn(2, 5, 8), PADDING
    seen = ~PADDING if kind is nn.TransformerEncoder else ...
    with torch.no_grad():
        expected = model(*inputs)
        prepared = Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager")).prepare(inputs)
        assert simulator_names(prepared.inner)
        assert sqnr(expected[seen], prepared(*inputs)[seen]) > 20


def test_encoders_without_simulators_of_activations_keep_their_way():
    """Zeros at padded places stay where weights alone are quantized, and the encoder is what it was when that fails."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    inputs = torch.randn(2, 5, 8)
    prepared = Quantizer(copy.deepcopy(encoder), QuantizerConfig.presets.w8(execution_mode="eager")).prepare((inputs,))
    with torch.no_grad():
        assert not prepared(inputs, src_key_padding_mask=PADDING)[PADDING].any()

    def fail(*_: object) -> None:
        if any(isinstance(module, FakeQuantizeImplBase) for module in encoder.modules()):
            raise RuntimeError("once there are simulators")

    handle = encoder.register_forward_pre_hook(fail)
    with pytest.raises(TraceError, match="once there are simulators"):
        Quantizer(encoder, QuantizerConfig.presets.w8a8(execution_mode="eager")).prepare((inputs,))
    handle.remove()
    assert encoder.use_nested_tensor
