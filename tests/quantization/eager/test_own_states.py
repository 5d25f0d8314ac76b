"""Models whose forwards go over their own parameters, buffers and state dict."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.artifact import Artifact
from bitwright.common import ExportBackend
from bitwright.export.targets import TARGETS
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.lambda_module import Lambda

WEIGHTS = ("a.weight", "a.bias", "norm.weight", "norm.bias", "b.weight", "b.bias")
BUFFERS = ("buffer",)


def network(read: Callable[[Any], Iterable[torch.Tensor]]) -> nn.Module:
    """A network that returns the sums of some of its own states beside its result."""

    def forward(s: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return s.b(s.norm(s.a(x)).relu()), torch.stack([state.float().sum() for state in read(s)])

    torch.manual_seed(0)
    model = Lambda(forward, a=nn.Linear(8, 16), norm=nn.LayerNorm(16), b=nn.Linear(16, 4)).eval()
    model.register_buffer("buffer", torch.tensor([1.0, 2.0]))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


READERS: dict[str, tuple[Callable[[Any], Iterable[torch.Tensor]], tuple[str, ...]]] = {
    "parameters": (lambda s: s.parameters(), WEIGHTS),
    "named parameters": (lambda s: [p for name, p in s.named_parameters() if name.endswith("weight")], WEIGHTS[::2]),
    "of children": (lambda s: [p for child in s.children() for p in child.parameters()], WEIGHTS),
    "one by name": (lambda s: [s.get_parameter("b.weight")], ("b.weight",)),
    "buffers": (lambda s: s.buffers(), BUFFERS),
    "state dict": (lambda s: s.state_dict().values(), BUFFERS + WEIGHTS),
}


def calibrated(quantizer: Quantizer, inputs: tuple[Any, ...]) -> nn.Module:
    """The prepared model, calibrated with its example inputs."""
    prepared = quantizer.prepare(inputs)
    with quantizer.calibration_mode():
        prepared(*inputs)
    return prepared


def expected(prepared: nn.Module, names: tuple[str, ...]) -> torch.Tensor:
    """Sums of the states as the layers compute with them."""

    def state(name: str) -> torch.Tensor:
        path, _, attribute = name.rpartition(".")
        found: torch.Tensor = getattr(prepared.get_submodule(path), attribute)
        return found.double().sum()

    return torch.stack([state(name) for name in names]).float()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("preset", ["w4", "w8a8"])
def test_a_forward_finds_the_states_of_the_float_model(reader: str, preset: str) -> None:
    """In their order, without those of simulators; a weight is the quantized one, as its attribute."""
    read, names = READERS[reader]
    model, x = network(read), torch.randn(6, 8)
    config = getattr(QuantizerConfig.presets, preset)(execution_mode="eager")
    prepared = calibrated(Quantizer(model, config), (x,))
    assert torch.equal(prepared.a.weight, prepared.a.parametrizations.weight.original) is False
    for form in (prepared, copy.deepcopy(prepared)):
        torch.testing.assert_close(form(x)[1], expected(form, names))


@pytest.mark.parametrize("reader", ["named parameters", "one by name", "buffers", "state dict"])
@pytest.mark.parametrize("backend", [ExportBackend.CoreAI, ExportBackend.CoreML])
def test_a_finalized_model_finds_them_too(reader: str, backend: ExportBackend) -> None:
    """Where an empty tensor stands for the dense weight, and in front of what stands for activations."""
    if backend == ExportBackend.CoreAI:
        pytest.importorskip("coreai_torch")
    else:
        pytest.importorskip("coremltools")
    read, names = READERS[reader]
    x = torch.randn(6, 8)
    quantizer = Quantizer(network(read), QuantizerConfig.presets.w8a8(execution_mode="eager"))
    prepared = calibrated(quantizer, (x,))
    wanted = expected(prepared, names)
    torch.testing.assert_close(quantizer.finalize(copy.deepcopy(prepared), backend)(x)[1], wanted)


@pytest.mark.parametrize("target", ["onnx", "coreai", "executorch", "torch"])
@pytest.mark.parametrize("reader", ["parameters", "state dict"])
def test_a_file_finds_them_too(target: str, reader: str, tmp_path: Path) -> None:
    """The file computes what the prepared model does."""
    form = TARGETS[target]
    if form.missing():
        pytest.skip(str(form.missing()))
    read, names = READERS[reader]
    x = torch.randn(6, 8)
    prepared = calibrated(Quantizer(network(read), QuantizerConfig.presets.w4(execution_mode="eager")), (x,))
    assert form.run is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = form.run(form.write(prepared, (x,), tmp_path / f"model{form.suffix}", {}, None), (x,))
    torch.testing.assert_close(results[0], prepared(x)[0])
    torch.testing.assert_close(results[1], expected(prepared, names))


@pytest.mark.parametrize("form", ["torch", "packed", "finalized"])
def test_tied_weights_are_listed_once(form: str, tmp_path: Path) -> None:
    """Whatever stands for them, which may be a tensor for each place."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.head(self.embed(x)), torch.stack([p.sum() for p in self.parameters()])

    x = torch.arange(12)
    quantizer = Quantizer(Tied(), QuantizerConfig.presets.w4(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    wanted = expected(prepared, ("embed.weight",))
    torch.testing.assert_close(prepared(x)[1], wanted)
    if form == "torch":
        found = TARGETS["torch"].run(TARGETS["torch"].write(prepared, (x,), tmp_path / "m.pt2", {}, None), (x,))
    elif form == "packed":
        found = Artifact.from_model(prepared).packed_model(Tied())(x)
    else:
        pytest.importorskip("coreai_torch")
        found = quantizer.finalize()(x)
    torch.testing.assert_close(found[1], wanted)


@pytest.mark.parametrize("preset", ["w4", "w8a8"])
def test_states_that_are_given_back_by_name_keep_the_names_of_the_model(preset: str) -> None:
    """functional_call puts them in the places that a prepared model has for them, in front of the simulators."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(s.layer, dict(s.layer.named_parameters()), (x,))

    model, x = Lambda(forward, layer=nn.Linear(8, 4)).eval(), torch.randn(6, 8)
    config = getattr(QuantizerConfig.presets, preset)(execution_mode="eager")
    prepared = calibrated(Quantizer(copy.deepcopy(model), config), (x,))
    torch.testing.assert_close(prepared(x), prepared.layer(x))
    assert not torch.equal(prepared(x), model(x))


@pytest.mark.parametrize("reader", READERS)
def test_packed_models_find_them_too(reader: str) -> None:
    """No forward of them has been traced; their code says what it asks for."""
    read, names = READERS[reader]
    x = torch.randn(6, 8)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__.update(network(read).__dict__)

        def sums(self) -> torch.Tensor:
            states = {
                "parameters": lambda: self.parameters(),
                "named parameters": lambda: [p for n, p in self.named_parameters() if n.endswith("weight")],
                "of children": lambda: [p for child in self.children() for p in child.parameters()],
                "one by name": lambda: [self.get_parameter("b.weight")],
                "buffers": lambda: self.buffers(),
                "state dict": lambda: self.state_dict().values(),
            }[reader]()
            return torch.stack([state.float().sum() for state in states])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.b(self.norm(self.a(x)).relu()), self.sums()

    prepared = calibrated(Quantizer(Net(), QuantizerConfig.presets.w4(execution_mode="eager")), (x,))
    packed = Artifact.from_model(prepared).packed_model(Net())
    torch.testing.assert_close(packed(x)[1], expected(prepared, names))


def number_of_weights(model: nn.Module) -> int:
    """What a forward may have a function of its file find out."""
    return sum(parameter.numel() for parameter in model.parameters())


class Asked(nn.Module):
    """Asks for its parameters in a way that the code of its forward alone does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)


class InADecorated(Asked):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * sum(parameter.numel() for parameter in self.parameters())


class ByAProperty(Asked):
    @property
    def count(self) -> int:
        return number_of_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.count


class ByAFunction(Asked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * number_of_weights(self)


class ByAStaticMethod(Asked):
    @staticmethod
    def count(model: nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.count(self)


@pytest.mark.parametrize("kind", [InADecorated, ByAProperty, ByAFunction, ByAStaticMethod])
def test_packed_models_find_them_however_they_ask(kind: type[nn.Module]) -> None:
    """Decorators, properties, static methods and functions are looked into too."""
    model, x = kind().eval(), torch.randn(4, 8)
    prepared = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,))
    packed = Artifact.from_model(prepared).packed_model(kind())
    torch.testing.assert_close(packed(x), prepared.layer(x) * (8 * 8 + 8))


def test_outside_the_forward_a_prepared_model_lists_everything() -> None:
    """Optimizers get the dense weights and state dicts keep the simulators, whatever the forward asks for."""
    x = torch.randn(6, 8)
    plain, asking = (
        calibrated(Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager")), (x,))
        for model in (network(lambda s: [s.buffer]), network(lambda s: s.parameters()))
    )
    assert "a.parametrizations.weight.original" in dict(asking.named_parameters())
    assert [name for name, _ in asking.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(asking.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in asking.named_buffers()] == [name for name, _ in plain.named_buffers()]


def test_a_penalty_trains_the_dense_weights() -> None:
    """Its gradient passes through the simulators: twice the quantized weight where nothing is clipped."""
    x = torch.randn(6, 8)

    def forward(s: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return s.layer(x), sum((p.pow(2).sum() for p in s.parameters()), torch.zeros(()))

    model = Lambda(forward, layer=nn.Linear(8, 4))
    with torch.no_grad():
        model.layer.weight[:, 0] = -1.0  # the largest of its channel, which only on the other side is clipped
    quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    with quantizer.training_mode():
        prepared(x)[1].backward()
    original = prepared.layer.parametrizations.weight.original
    torch.testing.assert_close(original.grad, 2 * prepared.layer.weight.detach())


def test_asking_for_the_dtype_costs_nothing() -> None:
    """Nothing stands before the methods of a model that reads no numbers of what they give."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        first = next(s.parameters())
        state = first.new_zeros(len(x), 4)
        return s.layer(x.to(first.dtype).to(first.device).to(first)) + state

    model, x = Lambda(forward, layer=nn.Linear(8, 4)).eval(), torch.randn(6, 8)
    prepared = Quantizer(model, QuantizerConfig.presets.w4(execution_mode="eager")).prepare((x,))
    assert not {"named_parameters", "forward"} & set(vars(prepared))
    torch.testing.assert_close(prepared(x), nn.functional.linear(x, prepared.layer.weight, prepared.layer.bias))


def test_a_listing_model_compiles_as_one_graph() -> None:
    """torch.compile looks into the methods that list states."""
    x = torch.randn(6, 8)
    model = network(lambda s: s.parameters())
    prepared = calibrated(Quantizer(model, QuantizerConfig.presets.w8a8(execution_mode="eager")), (x,))
    with torch.no_grad():
        found = torch.compile(prepared, fullgraph=True, backend="aot_eager")(x)[1]
    torch.testing.assert_close(found, expected(prepared, WEIGHTS))


def test_counting_parameters_survives_finalizing() -> None:
    """An empty tensor stands for a finalized weight, whose elements count all the same."""
    pytest.importorskip("coreai_torch")
    model = Lambda(lambda s, x: s.layer(x) / sum(p.numel() for p in s.parameters()), layer=nn.Linear(8, 4))
    x = torch.randn(6, 8)
    quantizer = Quantizer(model.eval(), QuantizerConfig.presets.w8(execution_mode="eager"))
    prepared = quantizer.prepare((x,))
    wanted = nn.functional.linear(x, prepared.layer.weight, prepared.layer.bias) / 36
    torch.testing.assert_close(prepared(x), wanted)
    torch.testing.assert_close(quantizer.finalize()(x), wanted)


def test_palettized_weights_are_found() -> None:
    """Palettization and pruning put their simulators on weights the same way."""
    x = torch.randn(6, 8)
    palettizer = KMeansPalettizer(network(lambda s: s.parameters()), KMeansPalettizerConfig())
    prepared = palettizer.prepare((x,))
    torch.testing.assert_close(prepared(x)[1], expected(prepared, WEIGHTS))


def test_a_listing_model_is_pickled_and_left_as_it_was_after_a_failure() -> None:
    """What stands before a method travels with the model, and goes where preparing fails."""
    x = torch.randn(6, 8)
    model = Asking()
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    names = list(model.state_dict())
    config = QuantizerConfig.presets.w8a8(execution_mode="eager")
    quantizer = Quantizer(model, config)
    model.fails = SimpleNamespace(left=2)  # in the forward that initialises simulators; not put back, as a number is
    with pytest.raises(RuntimeError, match="once its weights had simulators"):
        quantizer.prepare((x,))
    del model.fails
    assert {name: list(vars(module)) for name, module in model.named_modules()} == before
    assert list(model.state_dict()) == names
    prepared = calibrated(quantizer, (x,))
    stored = io.BytesIO(pickle.dumps(prepared))
    torch.testing.assert_close(pickle.load(stored)(x)[1], expected(prepared, ("layer.weight", "layer.bias")).sum())


class Asking(nn.Module):
    """Adds up its parameters; with ``fails`` set, raises at that call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if "fails" in vars(self):
            self.fails.left -= 1
            if not self.fails.left:
                raise ValueError("asked to")
        return self.layer(x), sum((p.sum() for p in self.parameters()), torch.zeros(()))


@pytest.mark.parametrize("how", ["[]", "get"])
def test_a_weight_that_is_looked_up_by_its_key_is_a_problem(how: str) -> None:
    """Once it is quantized, _parameters has it no more: the plan says so, and leaving it out helps."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        slots = s.layer._parameters
        return nn.functional.linear(x, slots["weight"] if how == "[]" else slots.get("weight"), s.layer.bias)

    model, x = Lambda(forward, layer=nn.Linear(8, 4)).eval(), torch.randn(6, 8)
    config = QuantizerConfig.presets.w4(execution_mode="eager")
    (problem,) = Quantizer(model, config).plan((x,)).problems
    assert (problem.code, problem.where) == ("looked-up-weight", "layer.weight")
    with pytest.raises(ValueError, match="looked-up-weight"):
        Quantizer(model, config).prepare((x,))
    assert model.layer._parameters["weight"] is model.layer.weight
    assert type(model.layer._parameters) is dict
    attribute = Lambda(lambda s, x: nn.functional.linear(x, s.layer.weight, s.layer.bias), layer=model.layer).eval()
    assert not Quantizer(attribute, config).plan((x,)).problems
