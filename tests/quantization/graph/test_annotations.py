"""Prepared graphs say at each op, as PT2E does, which simulators stand around it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import fx, nn

from bitwright import _torchao
from bitwright.quantization import Quantizer, QuantizerConfig
from bitwright.quantization._graph.annotations import ANNOTATION
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

api = pytest.importorskip("torchao.quantization.pt2e.quantizer")


class Join(nn.Module):
    """Two layers, one of them behind a sigmoid, side by side; then a third one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.left(x), torch.sigmoid(self.right(x))], 1).unsqueeze(0))


def prepared(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    """A prepared graph that was made without torchao."""

    def refuse() -> None:
        raise AssertionError("torchao was asked for while preparing")

    with monkeypatch.context() as patched:
        patched.setattr(_torchao, "pt2e_quantizer", refuse)
        model = Quantizer(Join(), QuantizerConfig()).prepare((torch.randn(3, 4),))
    assert isinstance(model, fx.GraphModule)
    return model


def test_one_place_of_a_simulator_has_the_spec_and_the_others_refer_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(monkeypatch)
    nodes = {node.name: node for node in model.graph.nodes}
    notes = {name: node.meta[ANNOTATION] for name, node in nodes.items() if ANNOTATION in node.meta}
    assert set(notes) == {"linear", "linear_1", "linear_2", "sigmoid", "cat"}
    left = notes["linear"].output_qspec
    assert isinstance(left, api.QuantizationSpec)
    assert left.dtype == torch.int8
    assert isinstance(left.observer_or_fake_quant_ctr(), FakeQuantizeImplBase)
    assert notes["linear_1"].output_qspec is None
    for name in ("sigmoid", "cat"):
        shared = notes[name].output_qspec
        assert isinstance(shared, api.SharedQuantizationSpec)
        assert shared.edge_or_node is nodes["linear"]
    joined = notes["cat"].input_qspec_map
    assert [node.name for node in joined] == ["linear", "sigmoid"]
    assert all(spec.edge_or_node is nodes["linear"] for spec in joined.values())
    assert {node.name for node in notes["linear"].input_qspec_map} == {"x", "left_weight"}
    shared = notes["linear_1"].input_qspec_map[nodes["x"]]
    assert shared.edge_or_node == (nodes["x"], nodes["linear"])


def test_annotated_graphs_can_be_copied_and_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared(monkeypatch), torch.randn(3, 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
