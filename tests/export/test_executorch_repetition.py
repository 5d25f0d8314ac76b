"""Lowering repeats less of ExecuTorch's work, to the same files."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.fx import traceback
from torch.nn import functional as F

pytest.importorskip("executorch.exir")

from executorch.backends.xnnpack.partition.graphs import sdpa

from bitwright.export.executorch import export_executorch, exporter
from bitwright.export.executorch.repetition import less_repetition
from bitwright.quantization import Quantizer, QuantizerConfig


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.relu(F.scaled_dot_product_attention(q, k, v)))


@pytest.mark.parametrize("preset", ["w8", "w8a8"])
def test_files_are_the_same(preset, tmp_path, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    config = getattr(QuantizerConfig.presets, preset)(execution_mode="eager")
    quantizer = Quantizer(Attention().eval(), config)
    ready = quantizer.prepare((x,)).eval()
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    quick = export_executorch(ready, (x,), tmp_path / "quick.pte").read_bytes()
    monkeypatch.setattr(exporter, "less_repetition", contextlib.nullcontext)
    assert export_executorch(ready, (x,), tmp_path / "slow.pte").read_bytes() == quick


def test_others_modules_are_left_as_they_were():
    before = sdpa.get_graphs
    with less_repetition():
        assert sdpa.get_graphs is not before
        assert traceback.copy is not copy
    with pytest.raises(RuntimeError, match="stop"), less_repetition():
        raise RuntimeError("stop")
    assert sdpa.get_graphs is before
    assert traceback.copy is copy


def test_histories_keep_all_their_entries():
    def kept(graph):
        (node,) = graph.find_nodes(op="call_function", target=torch.relu)
        for name in ("first", "second", "third"):
            node.meta["from_node"] = [traceback.NodeSource(node, name)]
        return node.meta["from_node"][0].to_dict()

    def histories():
        graph = torch.fx.Graph()
        graph.output(graph.call_function(torch.relu, (graph.placeholder("x"),)))
        return graph

    graph = histories()
    expected = kept(graph)
    del graph.find_nodes(op="call_function", target=torch.relu)[0].meta["from_node"]
    with less_repetition():
        assert kept(graph) == expected
    assert expected["from_node"][0]["from_node"][0]["pass_name"] == "first"
