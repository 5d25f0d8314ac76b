"""Graph mode: numbers are those of the models themselves, whatever sizes batches have, or an error says why not."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.inspection import apply_configs, compare, guard, sweep
from bitwright.inspection._batches import dynamic_shapes, example_of, inputs_of
from bitwright.quantization import Quantizer, QuantizerConfig

AUTO = torch.export.Dim.AUTO
W4 = QuantizerConfig.presets.w4(execution_mode="graph")
W4_EAGER = QuantizerConfig.presets.w4(execution_mode="eager")


class Words(nn.Module):
    """A mean over words, whose number is a constant in a graph of fixed size."""

    def __init__(self, positions: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 4)
        self.positions = nn.Embedding(32, 16) if positions else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        return self.head(x.sum(1) / ids.shape[1])


class Frames(nn.Module):
    """A mean over frames, from a view of all of them as one batch where asked for."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.flat = nn.Linear(8, 16), nn.Linear(16, 4), flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, frames, _ = x.shape
        rows = x.reshape(batch * frames, -1) if self.flat else x
        y: torch.Tensor = self.last(torch.relu(self.first(rows)))
        return y.reshape(batch, frames, -1).sum(1) / frames


class Recurrence(nn.Module):
    """As many layers in a graph as there are frames."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(24, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 16)
        for frame in range(x.shape[1]):
            state = torch.tanh(self.step(torch.cat([x[:, frame], state], 1)))
        return self.head(state)


class OddOrEven(nn.Module):
    """Pads to an even number of frames: a graph of any size does not know whether it must."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y.sum(1) if x.shape[1] % 2 == 0 else y.mean(1)


def frames(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, 8, generator=generator) for shape in shapes]


def seeded(kind: Any, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = kind(*args)
    return model.eval()


def sqnr_of(model: nn.Module, compressed: nn.Module, batches: list[Any]) -> float:
    """SQNR over all batches, from calls of the models."""
    with torch.no_grad():
        pairs = [
            (model(*inputs.args, **inputs.kwargs), compressed(*inputs.args, **inputs.kwargs))
            for inputs in (inputs_of(batch, model) for batch in batches)
        ]
    signal = sum(float(first.double().square().sum()) for first, _ in pairs)
    return 10 * math.log10(signal / sum(float((first - second).double().square().sum()) for first, second in pairs))


def alone(model: nn.Module, batches: list[Any]) -> list[float]:
    """SQNR with one layer in the form that it has in eager mode, layer by layer."""
    compressed = Quantizer(copy.deepcopy(model), W4_EAGER).prepare(
        inputs_of(batches[0], model).args, example_kwargs=inputs_of(batches[0], model).kwargs
    )
    found = []
    for name, layer in compressed.named_children():
        if isinstance(layer, nn.Linear | nn.Embedding):
            mixed = copy.deepcopy(model)
            setattr(mixed, name, layer)
            found.append(sqnr_of(model, mixed, batches))
    return sorted(found)


def swept(model: nn.Module, batches: list[Any]) -> list[float]:
    return sorted(e.output.error.sqnr_db for e in sweep(model, {"w4": W4}, batches).entries if e.output.error)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_lengths_that_differ(positions: bool, by_name: bool) -> None:
    """Batches are tensors, or mappings as tokenizers give them."""
    model = seeded(Words, positions)
    ids = [torch.randint(0, 50, (4, length)) for length in (12, 20, 7)]
    batches: list[Any] = [{"ids": entry} for entry in ids] if by_name else ids
    compressed = Quantizer(model, W4).prepare((ids[0],), dynamic_shapes={"ids": {0: AUTO, 1: AUTO}})
    expected = sqnr_of(model, compressed, batches)
    assert compare(model, compressed, batches).end_to_end.error.sqnr_db == pytest.approx(expected, abs=0.01)
    assert guard(model, compressed, batches).report.end_to_end.error.sqnr_db == pytest.approx(expected, abs=0.01)
    assert swept(model, batches) == pytest.approx(alone(model, batches), abs=0.01)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("shapes", [[(4, 1), (4, 5)], [(1, 5), (4, 5)], [(4, 5), (1, 1), (4, 5)]])
def test_batches_with_dimensions_of_size_1(flat: bool, shapes: list[tuple[int, int]]) -> None:
    """Those are constants of any graph that is captured with them."""
    model, batches = seeded(Frames, flat), frames(*shapes)
    compressed = Quantizer(model, W4).prepare((frames((4, 5))[0],), dynamic_shapes=({0: AUTO, 1: AUTO},))
    report = compare(model, compressed, batches)
    assert report.end_to_end.error.sqnr_db == pytest.approx(sqnr_of(model, compressed, batches), abs=0.01)
    assert not report.notes
    assert swept(model, batches) == pytest.approx(alone(model, batches), abs=0.01)


@pytest.mark.parametrize("kind", [Frames, Recurrence])
def test_batches_that_a_graph_does_not_hold_for(kind: Any) -> None:
    """They are refused as a call of the compressed model refuses them, with the dimension that must vary."""
    model, batches = seeded(kind), frames((4, 5), (4, 9))
    compressed = Quantizer(model, W4).prepare((batches[0],))
    for refused in (lambda: compressed(batches[1]), lambda: compare(model, compressed, batches)):
        with pytest.raises(ValueError, match=r"captured for \(4, 5, 8\).*dynamic_shapes=\{'x': \{1: "):
            refused()


def test_sweep_of_a_model_that_fixes_sizes() -> None:
    """No graph holds for both lengths; eager mode measures them."""
    model, batches = seeded(Recurrence), frames((4, 5), (4, 9))
    with pytest.raises(ValueError, match='give inputs of one size, or set execution_mode="eager"'):
        sweep(model, {"w4": W4}, batches)
    assert len(sweep(model, {"w4": W4_EAGER}, batches).entries) == 2


def test_lengths_for_which_a_model_takes_another_branch() -> None:
    """They are refused as a call of the compressed model refuses them; the others are compared."""
    model, batches = seeded(OddOrEven), frames((4, 6), (4, 8), (4, 5))
    compressed = Quantizer(model, W4).prepare((batches[0],), dynamic_shapes=({0: AUTO, 1: AUTO},))
    report = compare(model, compressed, batches[:2])
    assert report.end_to_end.error.sqnr_db == pytest.approx(sqnr_of(model, compressed, batches[:2]), abs=0.01)
    for refused in (lambda: compressed(batches[2]), lambda: compare(model, compressed, batches)):
        with pytest.raises(ValueError, match=r"(?s)came x\.shape\[1\] = 5.*x\.shape\[1\] % 2 == 0"):
            refused()


def test_models_with_a_memory_are_told_of() -> None:
    """A graph cannot be checked against a model that computes something else at each call.

    What it keeps in lists and buffers is put back in between; what is in an object of another class is not known.
    """

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.memory = nn.Linear(8, 4), SimpleNamespace(calls=0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.memory.calls += 1
            return self.layer(x) * self.memory.calls

    model = seeded(Counting)
    batch = torch.randn(4, 8)
    compressed = Quantizer(model, W4).prepare((batch,))
    with pytest.warns(UserWarning, match="state that it keeps from call to call"):
        report = compare(model, compressed, [batch, batch[:3]])
    assert len(report.notes) == 1


def test_nothing_is_left_of_checking_a_graph() -> None:
    """Buffers that the model writes to, and the random state, are as they were; random numbers are no difference."""

    class Sampling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x) * torch.randn(4) * self.calls

    model = seeded(Sampling)
    batch = torch.randn(4, 8)
    compressed = Quantizer(copy.deepcopy(model), W4).prepare((batch,))
    assert compare(model, compressed, [batch], output_batches=0).notes == ()
    assert model.calls == 1  # the graph that is compared with is run once


class Flattening(nn.Module):
    """Multiplies sizes between products of tensors: where sizes are free, theirs are operations too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = torch.sigmoid(y) * y
        y = y.reshape(x.shape[0] * x.shape[1], x.shape[2])
        y = self.second(y)
        return torch.tanh(y) * y


@pytest.mark.parametrize("free", [{}, {1: AUTO}], ids=str)
def test_layers_are_those_of_the_same_name_whichever_sizes_are_free(free: dict[int, Any]) -> None:
    """The float model is captured with the same sizes free, for else a later product would have another name."""
    model, batch = seeded(Flattening), frames((4, 5))[0]
    quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig())
    compressed = quantizer.prepare((batch,), dynamic_shapes=(free,) if free else None)
    with quantizer.calibration_mode():
        compressed(batch)
    report = compare(model, compressed, [batch])
    assert len([layer for layer in report.layers if layer.kind == "mul"]) == 2
    assert all(layer.accumulated.sqnr_db > 20 for layer in report.layers if layer.accumulated)
    assert not report.notes


def test_batches_that_sizes_in_a_graph_follow() -> None:
    """Node by node, graphs compute what their generated code does."""
    model, batches = seeded(Flattening), frames((4, 5), (7, 5), (1, 5))
    compressed = Quantizer(copy.deepcopy(model), W4).prepare((batches[0],))
    report = compare(model, compressed, batches)
    assert report.end_to_end.error.sqnr_db == pytest.approx(sqnr_of(model, compressed, batches), abs=0.01)
    assert not report.notes
    assert all(layer.accumulated.sqnr_db > 10 for layer in report.layers if layer.accumulated)


def test_sizes_that_differ_may_vary() -> None:
    """Besides the batch only those, so that a graph is fixed where it can be."""
    model = seeded(Words)
    batches = [{"ids": torch.zeros(4, 12, dtype=torch.long)}, {"ids": torch.zeros(1, 7, dtype=torch.long)}]
    first, second = (inputs_of(batch, model) for batch in batches)
    assert dynamic_shapes(first, model, [first]) == {"ids": {0: AUTO}}
    assert dynamic_shapes(first, model, [first, second]) == {"ids": {0: AUTO, 1: AUTO}}
    assert dynamic_shapes(second, model, [first, second]) == {"ids": {1: AUTO}}
    assert dynamic_shapes(first, model) == {"ids": {0: AUTO, 1: AUTO}}
    assert example_of(batches[::-1], model).kwargs["ids"].shape == (4, 12)
    applied = apply_configs(model, [W4], [batches[0]], shapes_of=[batches[1]])
    assert applied.model(**batches[1]).shape == (1, 4)
    assert sweep(model, {"w4": W4}, batches[1:], calibration=batches[:1]).entries


def test_containers_keep_their_shape() -> None:
    """Dynamic shapes have the structure of the inputs."""

    class Nested(nn.Module):
        def forward(self, pair: Any, *rest: torch.Tensor, table: Any, flag: bool = True) -> torch.Tensor:
            return pair[0] + table["x"]

    x, y = torch.ones(2, 3), torch.ones(2, 5)
    inputs = inputs_of({"pair": [x, x], "table": {"x": x}, "flag": False}, Nested())
    others = [inputs, inputs_of({"pair": [x, y], "table": {"x": y}}, Nested())]
    assert dynamic_shapes(inputs, Nested(), others) == {
        "pair": [{0: AUTO}, {0: AUTO, 1: AUTO}],
        "table": {"x": {0: AUTO, 1: AUTO}},
        "flag": None,
    }
