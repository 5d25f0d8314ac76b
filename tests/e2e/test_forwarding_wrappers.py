"""Wrappers that hand attributes on to the layer inside them are not taken for it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitwright._utils.parametrization import own_parametrizations
from bitwright.artifact import Artifact
from bitwright.export.torch_program import export_torch
from bitwright.inspection import compare
from bitwright.palettization import KMeansPalettizer
from bitwright.pruning import MagnitudePruner, shrink
from bitwright.quantization import Quantizer, QuantizerConfig


class Scaled(nn.Module):
    """Has whatever the layer has, as PEFT's wrappers do, and computes something else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x)) * 2


class Mixed(Scaled):
    """Has a tensor of its own besides."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.mixing = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.mixing


def compiled(inner: nn.Module) -> nn.Module:
    """torch's ``OptimizedModule``, which hands on what is set and deleted too."""
    return torch.compile(inner, backend="eager")  # type: ignore[return-value]


def w8(model: nn.Module) -> Quantizer:
    """8-bit weights, in eager mode."""
    return Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager"))


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
Wrap = Callable[[nn.Module], nn.Module]
in_all_kinds = pytest.mark.parametrize(
    ("wrap", "compress"),
    [(Scaled, w8), (Scaled, KMeansPalettizer), (Scaled, MagnitudePruner), (Mixed, w8), (compiled, w8)],
    ids=["w8", "palettized", "pruned", "own tensor", "torch.compile"],
)


@pytest.fixture(autouse=True)
def compile_anew():
    """Keep compiled code from one test to itself."""
    yield
    torch._dynamo.reset()


def make(wrap: Wrap) -> nn.Sequential:
    """A wrapped layer and a plain one."""
    torch.manual_seed(0)
    return nn.Sequential(wrap(nn.Linear(16, 16)), nn.Linear(16, 4)).eval()


def classes(model: nn.Module) -> list[str]:
    """Names of the classes of all modules, wrappers among them."""
    return [type(module).__name__ for module in model.modules()]


def saved_and_loaded(model: nn.Module) -> nn.Module:
    """Through ``torch.save``."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def agrees(output: Any, expected: torch.Tensor) -> None:
    """What a copy computes is what the model does."""
    torch.testing.assert_close(torch.as_tensor(output), expected, atol=1e-5, rtol=1e-5)


@in_all_kinds
@pytest.mark.parametrize(
    "replicate",
    [copy.deepcopy, saved_and_loaded, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "torch.save", "pickle"],
)
def test_copies_keep_the_wrapper(wrap, compress, replicate):
    """Of a prepared, a packed and a finalized model alike; they share no tensor with it."""
    compressor = compress(make(wrap))
    prepared = compressor.prepare((X,))
    packed = Artifact.from_model(prepared).packed_model(make(wrap))
    for model in (prepared, packed, compressor.finalize(copy.deepcopy(prepared), backend="coreml")):
        with torch.no_grad():
            expected = model(X)
            twin = replicate(model)
            agrees(twin(X), expected)
            assert classes(twin) == classes(model)
            assert type(twin[0]) is type(model[0]) or own_parametrizations(model[0])
            assert {id(one) for one in twin.parameters()}.isdisjoint(map(id, model.parameters()))
            for parameter in twin.parameters():
                parameter.zero_()
            agrees(model(X), expected)


def test_a_shallow_copy_of_a_compressed_layer_is_one():
    """``copy.copy`` takes what pickle takes."""
    prepared = w8(make(Scaled)).prepare((X,))
    twin = copy.copy(prepared[1])
    assert torch.equal(twin.weight, prepared[1].weight)
    assert twin.parametrizations.weight is prepared[1].parametrizations.weight


@in_all_kinds
def test_state_and_artifact_go_back(wrap, compress, tmp_path):
    """Into a model of the same structure."""
    prepared = compress(make(wrap)).prepare((X,))
    with torch.no_grad():
        expected = prepared(X)
        other = compress(make(wrap)).prepare((X * 2,))
        other.load_state_dict(prepared.state_dict())
        agrees(other(X), expected)
        Artifact.from_model(prepared).save(tmp_path / "artifact")
        artifact = Artifact.load(tmp_path / "artifact")
        agrees(artifact.load_into(make(wrap))(X), expected)
        agrees(artifact.packed_model(make(wrap))(X), expected)


@in_all_kinds
def test_files_compute_what_the_model_does(wrap, compress, tmp_path):
    """ONNX and torch; an OptimizedModule is exported as what it compiled."""
    pytest.importorskip("onnxruntime")
    from bitwright.export.onnx import export_onnx, run_onnx

    prepared = compress(make(wrap)).prepare((X,))
    with torch.no_grad():
        expected = prepared(X)
        export_onnx(prepared, (X,), tmp_path / "model.onnx")
        agrees(run_onnx(tmp_path / "model.onnx", (X,))[0], expected)
        export_torch(prepared, (X,), tmp_path / "model.pt2")
        agrees(torch.export.load(tmp_path / "model.pt2").module()(X), expected)


@in_all_kinds
@pytest.mark.parametrize("backend", ["coreml", "coreai", "_torch"])
def test_finalized_models_compute_what_they_did(wrap, compress, backend):
    """And the class of the wrapper, which others share, is as it was."""
    compressor = compress(make(wrap))
    prepared = compressor.prepare((X,))
    with torch.no_grad():
        expected = prepared(X)
        agrees(compressor.finalize(backend=backend)(X), expected)
    assert not {"weight", "mixing"} & vars(type(make(wrap)[0])).keys()


@in_all_kinds
def test_sizes_are_the_plans(wrap, compress):
    """A weight counts once, under its own name."""
    plan = compress(make(wrap)).plan((X,))
    prepared = compress(make(wrap)).prepare((X,))
    report = compare(make(wrap), prepared, [(X,)])
    dense = sum(parameter.nbytes for parameter in make(wrap).parameters())
    assert report.bytes_before == dense
    assert report.bytes_after == dense - plan.dense_bytes + plan.compressed_bytes
    rows = {row.tensor for row in plan.rows if row.kind == "weight"}
    assert {weight.name for layer in report.layers for weight in layer.weights} == rows


@pytest.mark.parametrize("wrap", [Scaled, Mixed, compiled])
def test_a_second_technique_finds_the_weights(wrap):
    """Pruned, then quantized."""
    model = make(wrap)
    pruned = MagnitudePruner(model).prepare((X,))
    both = w8(pruned).prepare((X,))
    assert {len(chain) for module in both.modules() for chain in own_parametrizations(module).values()} == {2}
    agrees(copy.deepcopy(both)(X), both(X))


def test_a_wrapper_around_a_prepared_model_can_be_prepared():
    """Though it has the buffer that says that the model inside is."""
    inner = MagnitudePruner(nn.Linear(16, 16)).prepare((X,))
    quantizer = w8(Scaled(inner))
    prepared = quantizer.prepare((X,))
    assert quantizer._is_model_prepared(prepared)
    assert "_bitwright_prepared" not in prepared.state_dict()
    agrees(copy.deepcopy(prepared)(X), prepared(X))


def test_channels_go_behind_a_wrapper():
    """The copy on which they are taken out first is one of the wrapper too."""
    model = make(Scaled)
    with torch.no_grad():
        model[0].inner.weight[:8] = 0
        model[0].inner.bias[:8] = 0
    prepared = MagnitudePruner(model).prepare((X,))
    expected = prepared(X)
    report = shrink(prepared, (X,))
    assert report.removed == {"0.inner": (16, 8)}
    agrees(prepared(X), expected)
