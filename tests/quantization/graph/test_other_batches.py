"""Graphs captured for one batch size and called with another, without ``dynamic_shapes``."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.common import ExportBackend
from bitwright.export.conversion import ConversionError
from bitwright.export.targets import TARGETS
from bitwright.quantization import Quantizer, QuantizerConfig


class Called(nn.Module):
    """A function of a layer and the inputs."""

    def __init__(self, function: Callable[..., torch.Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(self.layer, x)
        return result


class Sum(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x + y)
        return result


def convolutional() -> nn.Module:
    """Layers with statistics and a mode."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(4 * 36, 10)
    )


HOLD: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "free size": lambda layer, x: layer(x).view(-1, 9 * 8),
    "flatten": lambda layer, x: layer(x).flatten(1),
    "table": lambda layer, x: layer(x + layer.weight[None, :1]),
    "transposed": lambda layer, x: layer(x).transpose(1, 2).mean(1),
    "one more dimension": lambda layer, x: layer(x.unsqueeze(0)).squeeze(0),
    "heads": lambda layer, x: layer(x).unflatten(-1, (2, 4)).transpose(1, 2).flatten(2),
    "another size": lambda layer, x: layer(x) / x.shape[-1] ** 0.5 * x.size(1),
    "properties": lambda layer, x: layer(x.to(x.device, x.dtype)) / (x.ndim + 6) if x.is_floating_point() else x,
    "filled": lambda layer, x: layer(x) + torch.full((1, 9, 1), 0.5) + x.new_full(size=(1, 1, 8), fill_value=2),
    "einsum": lambda layer, x: torch.einsum("bth,gh->btg", layer(x), layer.weight[:3]),
    "attention": lambda layer, x: nn.functional.scaled_dot_product_attention(*[layer(x).unsqueeze(1)] * 3),
    "new zeros": lambda layer, x: layer(x) + x.new_zeros(1, 9, 8),
    "merged": lambda layer, x: layer(x.transpose(0, 1).reshape(-1, 8)),
}
FOLLOW: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "view of the size": lambda layer, x: layer(x).view(x.size(0), -1),
    "heads of the size": lambda layer, x: layer(x).view(x.shape[0], 9, 2, 4).transpose(1, 2),
    "mean over the batch": lambda layer, x: layer(x).sum() / x.size(0),
    "divided by the size": lambda layer, x: layer(x) / x.size(0),
    "expanded token": lambda layer, x: torch.cat([layer.weight[None, :1].expand(x.size(0), -1, -1), layer(x)], 1),
    "number of the image": lambda layer, x: layer(x) + torch.arange(x.size(0)).view(-1, 1, 1),
    "first image": lambda layer, x: layer(x) + x[:1],
}

SIZES = [1, pytest.param(2, marks=pytest.mark.slow), 4]


def batch(size: int) -> torch.Tensor:
    """Inputs of the functions."""
    return torch.randn(size, 9, 8, generator=torch.Generator().manual_seed(size))


def prepared_for(model: nn.Module, *inputs: torch.Tensor) -> Any:
    """Weights of 8 bits, so that outputs are near the model's."""
    return Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8()).prepare(inputs).eval()


@pytest.mark.parametrize("captured", SIZES)
@pytest.mark.parametrize("name", HOLD)
def test_graphs_that_hold_for_any_batch(name: str, captured: int) -> None:
    """They compute what the model does."""
    torch.manual_seed(0)
    model = Called(HOLD[name], nn.Linear(8, 8)).eval()
    prepared = prepared_for(model, batch(captured))
    for size in (8, 3):
        torch.testing.assert_close(prepared(batch(size)), model(batch(size)), atol=0.05, rtol=0)
    again = pickle.loads(pickle.dumps(prepared_for(model, batch(captured))))
    assert torch.equal(again(batch(5)), prepared(batch(5)))


@pytest.mark.parametrize("captured", SIZES)
@pytest.mark.parametrize("name", FOLLOW)
def test_sizes_in_a_graph_follow_the_batch(name: str, captured: int) -> None:
    """As another capture of the model shows: results are the model's, in copies, pickles and what is finalized too."""
    torch.manual_seed(0)
    model = Called(FOLLOW[name], nn.Linear(8, 8)).eval()
    quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8())
    prepared = quantizer.prepare((batch(captured),)).eval()
    graph = str(prepared.graph)
    finalized = quantizer.finalize(backend=ExportBackend._TORCH)
    for size in (8, 3, captured):
        torch.testing.assert_close(prepared(batch(size)), model(batch(size)), atol=0.05, rtol=0.02)
        assert torch.equal(finalized(batch(size)), prepared(batch(size)))
    assert str(prepared.graph) == graph  # exporters see the one that was captured
    again = pickle.loads(pickle.dumps(prepared))
    for module in (again, copy.deepcopy(prepared)):
        assert torch.equal(module(batch(3)), prepared(batch(3)))
    with pytest.raises(ValueError, match="before it is saved"):
        again(batch(5))


@pytest.mark.parametrize("captured", SIZES)
@pytest.mark.parametrize("name", FOLLOW)
def test_graphs_with_the_size_in_them_are_refused(name: str, captured: int, caplog: pytest.LogCaptureFixture) -> None:
    """Where the model is gone: the error says what to do, and nothing else is told; the captured size is taken."""
    torch.manual_seed(0)
    prepared = pickle.loads(pickle.dumps(prepared_for(Called(FOLLOW[name], nn.Linear(8, 8)).eval(), batch(captured))))
    caplog.clear()
    for _ in range(2):
        with pytest.raises(ValueError, match="pass dynamic_shapes to prepare"):
            prepared(batch(8))
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]
    prepared(batch(captured))


def test_results_of_the_size_that_no_input_enters_are_refused() -> None:
    """Such as the zeros of a state, where the model is gone; parameters may be results."""

    class States(nn.Module):
        def __init__(self, counts: bool) -> None:
            super().__init__()
            self.layer, self.counts = nn.Linear(8, 8), counts

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), torch.zeros(x.size(0), 3) + 1 if self.counts else self.layer.bias

    for size in (1, 2):
        assert prepared_for(States(False).eval(), batch(size))(batch(4))[0].shape == (4, 9, 8)
        prepared = prepared_for(States(True).eval(), batch(size))
        with pytest.raises(ValueError, match="pass dynamic_shapes"):
            pickle.loads(pickle.dumps(prepared))(batch(4))
        assert torch.equal(prepared(batch(4))[1], torch.ones(4, 3))


def test_calibration_and_training_with_other_batches() -> None:
    """Nothing of the model changes by the look at the graph; then it calibrates and trains as in float."""
    torch.manual_seed(0)
    quantizer = Quantizer(convolutional(), QuantizerConfig())
    prepared: Any = quantizer.prepare((torch.randn(1, 1, 8, 8),))
    prepared.train()
    kept = {name: tensor.clone() for name, tensor in prepared.state_dict().items() if isinstance(tensor, torch.Tensor)}
    assert prepared._input_check._holds_all_the_same(prepared, [torch.randn(16, 1, 8, 8)])
    state = prepared.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(torch.randn(16, 1, 8, 8))
    with quantizer.training_mode():
        prepared(torch.randn(12, 1, 8, 8)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())


def test_inputs_of_two_batch_sizes_are_refused() -> None:
    """All that change must change alike; other dimensions are fixed."""
    prepared = prepared_for(Sum().eval(), batch(2), batch(2))
    assert prepared(batch(5), batch(5)).shape == (5, 9, 8)
    with pytest.raises(ValueError, match="Input 'x' has shape"):
        prepared(batch(3), batch(5))
    with pytest.raises(ValueError, match="Input 'x' has shape"):
        prepared(batch(2)[:, :4], batch(2))


@pytest.mark.parametrize("granularity", ["per_block", "per_channel"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_scales_for_other_sizes_are_refused_by_name(mode, granularity):
    """Static scales of activations, one for each row and token, fit no other sizes, and the error says which."""
    how = {"type": "per_block", "axis": -1, "block_size": 4} if granularity == "per_block" else {
        "type": "per_channel", "axis": 1,
    }  # fmt: skip
    activation = {"dtype": "int8", "granularity": how}

    def prepared(**more):
        entry = {"op_input_spec": {"*": {**activation, **more}}, "op_output_spec": None}
        config = {"quantization_config": {"global_config": entry, "execution_mode": mode}}
        quantizer = Quantizer(nn.Sequential(nn.Linear(8, 8)).eval(), QuantizerConfig.from_dict(config))
        sizes = {"dynamic_shapes": ({0: torch.export.Dim("b", max=8), 1: torch.export.Dim("t", max=8)},)}
        model = quantizer.prepare((torch.randn(2, 6, 8),), **(sizes if mode == "graph" else {}))
        with quantizer.calibration_mode():
            model(torch.randn(2, 6, 8))
        return model

    model = prepared()
    with torch.no_grad():
        assert model(torch.randn(2, 6, 8)).shape == (2, 6, 8)
        for x in (torch.randn(1, 4, 8), torch.randn(4, 1, 8).transpose(0, 1), torch.randn(1, 4, 8, requires_grad=True)):
            with pytest.raises(
                ValueError, match=r"'.*linear.*input.*' has a scale of shape .*'dynamic', or per_tensor"
            ):
                model(x)
        assert prepared(qparam_calculator_cls="dynamic")(torch.randn(1, 4, 8)).shape == (1, 4, 8)


COMPUTES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "times the reciprocal": lambda layer, x: layer(x) * (1.0 / x.shape[0]),
    "divided by the root": lambda layer, x: layer(x) / math.sqrt(x.shape[0]),
    "plus the size": lambda layer, x: layer(x) + x.shape[0],
    "times twice the size": lambda layer, x: layer(x) * (2 * x.shape[0]),
    "as alpha": lambda layer, x: torch.add(layer(x), layer.bias, alpha=x.shape[0]),
    "as a bound": lambda layer, x: layer(x).clamp(max=1 / x.shape[0]),
    "in a new tensor": lambda layer, x: layer(x) * torch.full((8,), float(x.shape[0])),
    "as a tensor": lambda layer, x: layer(x) / torch.tensor(float(x.shape[0])),
    "rows of a table": lambda layer, x: layer(x) + layer.weight[: x.shape[0], None],
    "part of the features": lambda layer, x: layer(x)[:, :, : x.shape[0]],
    "filled with it": lambda layer, x: layer(x) + torch.full((1, 8), x.shape[0]),
    "a branch": lambda layer, x: layer(x) if x.shape[0] < 5 else -layer(x),
}


# With one image, ``alpha=1`` is left out of the graph.
INTEGERS = {(name, size) for name in ("plus the size", "times twice the size", "filled with it") for size in (1, 4)}
INTEGERS.add(("as alpha", 4))


@pytest.mark.parametrize("captured", [1, 4])
@pytest.mark.parametrize("name", COMPUTES)
def test_models_that_compute_with_the_size_are_refused(name: str, captured: int) -> None:
    """The model is run twice without numbers; copies ask it too. Where only integers follow the batch, they do."""
    torch.manual_seed(0)
    model = Called(COMPUTES[name], nn.Linear(8, 8))
    quantizer = Quantizer(model, QuantizerConfig.presets.w8())
    prepared = quantizer.prepare((batch(captured),)).eval()
    for module in (prepared, copy.deepcopy(prepared)):
        if (name, captured) in INTEGERS:
            torch.testing.assert_close(module(batch(8)), model(batch(8)), atol=0.2, rtol=0.05)
            continue
        with pytest.raises(ValueError, match="pass dynamic_shapes to prepare"):
            module(batch(8))
    assert model.training
    torch.testing.assert_close(prepared(batch(captured)), model(batch(captured)), atol=0.05, rtol=0.05)


def test_the_model_is_as_it_was_after_it_was_asked() -> None:
    """Group norm has the batch among its numbers; what the model keeps of a call is not without numbers."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(9, 4, 3), nn.GroupNorm(2, 4)
            self.batch = nn.BatchNorm1d(4)
            self.last: torch.Tensor | None = None
            self.kept: dict[str, dict[str, object]] = {"all": {"calls": 0}}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.batch(self.norm(self.conv(x)))
            self.kept["all"]["last"] = self.last
            return self.last

    model = Keeps()
    model(batch(2))
    last, state = model.last, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared = Quantizer(model, QuantizerConfig.presets.w8()).prepare((batch(2),)).eval()
    random = torch.random.get_rng_state()
    assert prepared(batch(5)).shape == (5, 4, 6)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert model.last is last
    assert model.kept["all"]["last"] is last
    assert model.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


class Recurrent(nn.Module):
    """A layer whose first state has the size of the batch, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layer(x)[0][:, -1])
        return result


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("kind", [Recurrent, attention])
def test_one_image_is_prepared_and_batches_are_trained(kind: Callable[[], nn.Module]) -> None:
    """A calibration, which is the first other batch, training, and a last batch, as in float."""
    torch.manual_seed(0)
    model = kind().eval()
    quantizer = Quantizer(model, QuantizerConfig())
    prepared: Any = quantizer.prepare((batch(1),))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(batch(16))
    with quantizer.training_mode():
        for size in (16, 7):
            prepared(batch(size)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())
    prepared.eval()
    finalized = quantizer.finalize()
    for size in (16, 7, 5):
        expected = model(batch(size))
        assert (prepared(batch(size)) - expected).norm().item() < 0.1 * expected.norm().item()
        torch.testing.assert_close(finalized(batch(size)), prepared(batch(size)))


def test_batches_for_which_the_model_takes_more_steps_are_refused() -> None:
    """Nothing in the graph would follow."""
    model = Called(lambda layer, x: torch.cat([layer(part) for part in x.split(4)]), nn.Linear(8, 8)).eval()
    prepared = Quantizer(model, QuantizerConfig.presets.w8()).prepare((batch(4),))
    with pytest.raises(ValueError, match="pass dynamic_shapes to prepare"):
        prepared(batch(16))


def test_a_third_batch_is_asked_about() -> None:
    """Two sizes may agree with a line that others do not lie on."""
    model = Called(lambda layer, x: layer(x) + max(x.shape[0], 6), nn.Linear(8, 8)).eval()
    prepared = Quantizer(model, QuantizerConfig.presets.w8()).prepare((batch(4),))
    torch.testing.assert_close(prepared(batch(8)), model(batch(8)), atol=0.05, rtol=0)
    with pytest.raises(ValueError, match="pass dynamic_shapes to prepare"):
        prepared(batch(16))
    torch.testing.assert_close(prepared(batch(4)), model(batch(4)), atol=0.05, rtol=0)


KEPT: list[torch.Tensor] = []


@pytest.mark.parametrize("module", ["package.hooks", "__main__"])
def test_hooks_of_a_models_own_package_are_part_of_it(module: str) -> None:
    """As those by which transformers collects hidden states. Others are not called with copies of the model."""

    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            KEPT.clear()
            y = self.layer(x)
            return torch.cat([*KEPT, y.view(x.shape[0], -1, 8)], 1)

    class Layer(nn.Linear):
        pass

    def keep(layer: nn.Module, args: Any, result: torch.Tensor) -> None:
        KEPT.append(result)

    Layer.__module__, keep.__module__ = "package.layers", module
    torch.manual_seed(0)
    model = Collects().eval()
    model.layer.__class__ = Layer
    model.layer.register_forward_hook(keep)
    prepared = prepared_for(model, batch(2))
    if module == "__main__":
        with pytest.raises(ValueError, match="pass dynamic_shapes to prepare"):
            prepared(batch(3))
    else:
        torch.testing.assert_close(prepared(batch(3)), model(batch(3)), atol=0.05, rtol=0)


def test_one_row_lacks_what_would_do_nothing_there() -> None:
    """PyTorch leaves expansions to a size that is there, and copies of what is contiguous, out of a graph."""

    def rows(layer: Any, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(9)[None].expand(x.shape[0], -1)
        y = layer(x.transpose(0, 1).contiguous().reshape(-1, 8)).view(9, x.shape[0], 8).transpose(0, 1).contiguous()
        return y + places[..., None]

    torch.manual_seed(0)
    model = Called(rows, nn.Linear(8, 8)).eval()
    prepared = prepared_for(model, batch(1))
    for size in (9, 3, 1):
        torch.testing.assert_close(prepared(batch(size)), rows(model.layer, batch(size)), atol=0.05, rtol=0)


@pytest.mark.parametrize("target", ["torch", "onnx", "coreai"])
def test_files_are_written_for_other_batches(target: str, tmp_path: Path) -> None:
    """Of sizes that the graph was called with; whether it holds for others nobody has asked."""
    writer = TARGETS[target]
    if writer.missing() is not None or writer.run is None:
        pytest.skip("not installed")
    torch.manual_seed(0)
    prepared = prepared_for(Recurrent().eval(), batch(1))
    prepared(batch(8))
    for size in (8, 1):
        x = batch(size)
        path = writer.write(prepared, (x,), tmp_path / f"{size}{writer.suffix}", {}, None)
        torch.testing.assert_close(writer.run(path, (x,))[0], prepared(x), atol=1e-5, rtol=1e-4)
    for size, shapes in ((5, None), (8, ({0: torch.export.Dim("batch", min=2, max=16)},))):
        with pytest.raises(ConversionError, match="compared with the model for batches of 1, 8"):
            writer.write(prepared, (batch(size),), tmp_path / f"other{writer.suffix}", {}, shapes)


def test_graphs_that_follow_the_batch_are_compiled() -> None:
    """torch.compile reads the graph's metadata by the lines of its code, which are more than it has nodes."""
    torch.manual_seed(0)
    prepared = prepared_for(attention().eval(), batch(1))
    expected = prepared(batch(8))
    compiled = torch.compile(prepared, backend="aot_eager")
    torch.testing.assert_close(compiled(batch(8)), expected)
