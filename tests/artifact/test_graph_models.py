"""Artifacts of graph models: weights with the batch norms folded in, loaded into the float model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from bitwright.artifact import Artifact, ArtifactError
from bitwright.export.conversion import ConversionError
from bitwright.export.lowering import lower
from bitwright.inspection import bits_per_weight, compare
from bitwright.quantization import Quantizer, QuantizerConfig


class Net(nn.Module):
    """Convolutions with and without bias before batch norms, and a batch norm that cannot be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.bn1(self.stem(x))))
        return self.head(x.mean((2, 3)))


def _trained() -> Net:
    torch.manual_seed(0)
    model = Net()
    for _ in range(3):
        model(2 * torch.randn(8, 3, 9, 9) + 1)
    return model.eval()


def test_weights_of_a_graph_are_packed_and_load_into_the_float_model(tmp_path: Path) -> None:
    """Weights only: the loaded model computes what the finalized graph does, up to the order of additions."""
    model, x = _trained(), torch.randn(4, 3, 9, 9)
    quantizer = Quantizer(model, QuantizerConfig.presets.w8())
    artifact = Artifact.from_model(quantizer.prepare((x,)))
    assert set(artifact.compressed) == {"stem.weight", "blocks.0.weight", "head.weight"}
    artifact.save(tmp_path / "packed")
    expected = quantizer.finalize(backend="_torch")(x)
    for load in ("packed_model", "load_into"):
        loaded = getattr(Artifact.load(tmp_path / "packed"), load)(copy.deepcopy(model)).eval()
        assert isinstance(loaded.bn1, nn.Identity)
        assert isinstance(loaded.blocks[3], nn.BatchNorm2d)
        torch.testing.assert_close(loaded(x), expected, atol=1e-5, rtol=1e-5)


class Tied(nn.Module):
    """A language model's head that shares the embedding's weight, and a parameter that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids)))


def test_tied_weights_are_stored_and_counted_once(tmp_path: Path) -> None:
    """In graph mode as in eager mode: one packed tensor with two names, in file, sizes and report."""
    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.randint(0, 24, (2, 5))
    graph = Quantizer(model, QuantizerConfig.presets.w8()).prepare((ids,))
    eager = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8(execution_mode="eager")).prepare((ids,))
    artifacts = Artifact.from_model(graph), Artifact.from_model(eager)
    assert artifacts[0].nbytes == artifacts[1].nbytes == 24 * 16 + 24 * 4 + 2 * 16 * 4 + 3 * 4
    assert {*artifacts[0].aliases, *artifacts[0].aliases.values()} == {"embed.weight", "head.weight"}
    assert bits_per_weight(graph).total_bits == bits_per_weight(eager).total_bits == 8 * artifacts[0].nbytes
    artifacts[0].save(tmp_path / "packed")
    loaded = Artifact.load(tmp_path / "packed").packed_model(copy.deepcopy(model))
    assert torch.equal(loaded(ids), eager(ids))
    report = compare(model, graph, [ids])
    assert {layer.bytes_after for layer in report.layers if "norm" not in layer.name} == {24 * 16 + 24 * 4}


def test_prepared_graphs_inside_a_model_are_named() -> None:
    """Their simulators are the graph's own: neither the artifact nor an exporter may take the float weights."""
    model, x = _trained(), torch.randn(4, 3, 9, 9)
    graph = Quantizer(model, QuantizerConfig.presets.w8()).prepare((x,))
    whole = nn.Sequential(graph, nn.Flatten())
    with pytest.raises(ArtifactError, match=r"'0' is a prepared graph inside this model.*graph itself"):
        Artifact.from_model(whole)
    with pytest.raises(ConversionError, match=r"'0' is a prepared graph inside this model.*graph itself"):
        lower(whole, lambda _, tensor: nn.Identity(), lambda _, simulator: None)


class Branching(nn.Module):
    """A layer before a control-flow op, whose bodies are graphs inside the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def test_graphs_with_control_flow_are_packed() -> None:
    prepared = Quantizer(Branching().eval(), QuantizerConfig.presets.w8()).prepare((torch.randn(2, 4),))
    assert sum(isinstance(module, fx.GraphModule) for module in prepared.modules()) == 3
    assert Artifact.from_model(prepared).compressed == ("layer.weight",)
    assert lower(prepared, lambda _, tensor: nn.Identity(), lambda _, simulator: None).weights.keys() == {
        "layer.weight"
    }


class Normed(nn.Module):
    """Modules with running statistics of which some are folded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.again = self.norm
        self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "unused":
            return self.b(self.a(x))
        if self.kind == "instance norm":
            return self.instance(self.norm(self.a(x)).unflatten(1, (4, 4)))
        if self.kind == "two places":
            return self.again(self.b(self.norm(self.a(x))))
        return self.norm(self.b(self.norm(self.a(x))).relu())


def _normed(kind: str) -> Normed:
    torch.manual_seed(0)
    model = Normed(kind)
    for _ in range(3):
        model(2 * torch.randn(8, 16) + 1)
    return model.eval()


@pytest.mark.parametrize("kind", ["unused", "instance norm", "two places"])
def test_what_is_not_folded_is_in_the_artifact(kind: str, tmp_path: Path) -> None:
    """Buffers beside running statistics too, which no operation reads; what is folded is taken out everywhere."""
    model, x = _normed(kind), torch.randn(4, 16)
    prepared = Quantizer(model, QuantizerConfig.presets.w8()).prepare((x,)).eval()
    Artifact.from_model(prepared).save(tmp_path / "a")
    artifact = Artifact.load(tmp_path / "a")
    assert artifact.folded_norms == (() if kind == "unused" else ("norm", "again"))
    assert "instance.num_batches_tracked" in artifact
    assert ("norm.num_batches_tracked" in artifact) == (kind == "unused")
    for load in (artifact.load_into, artifact.packed_model):
        loaded = load(copy.deepcopy(model))
        torch.testing.assert_close(loaded(x), prepared(x), atol=1e-4, rtol=1e-4)


def test_a_norm_that_is_folded_and_used_elsewhere_is_refused() -> None:
    model, x = _normed("elsewhere too"), torch.randn(4, 16)
    artifact = Artifact.from_model(Quantizer(model, QuantizerConfig.presets.w8()).prepare((x,)))
    with pytest.raises(ArtifactError, match=r"'again'.*apply them twice"):
        artifact.load_into(copy.deepcopy(model))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_batch_norms_that_the_artifact_never_had_stay(mode: str) -> None:
    """A model with more batch norms is another model, unless the artifact does not tell which were folded."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), torch.randn(4, 16)
    artifact = Artifact.from_model(Quantizer(model, QuantizerConfig.presets.w8(execution_mode=mode)).prepare((x,)))
    other = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.BatchNorm1d(16)).eval()
    for load in (artifact.load_into, artifact.packed_model):
        with pytest.raises(ArtifactError, match=r"another model.*2\.running_mean"):
            load(other)
    assert isinstance(other[2], nn.BatchNorm1d)
    artifact.folded_norms = None
    assert isinstance(artifact.load_into(other)[2], nn.Identity)


def test_another_model_is_refused_unchanged() -> None:
    """Batch norms are taken out only where everything else fits."""
    model = _trained()
    artifact = Artifact.from_model(Quantizer(model, QuantizerConfig.presets.w8()).prepare((torch.randn(4, 3, 9, 9),)))
    other = _trained()
    other.head = nn.Linear(8, 5, bias=False)
    with pytest.raises(ArtifactError, match=r"head\.weight"):
        artifact.packed_model(other)
    assert isinstance(other.bn1, nn.BatchNorm2d)
    assert other.stem.bias is None
