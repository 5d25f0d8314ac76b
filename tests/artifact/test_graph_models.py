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
