"""Lowering repeats less of ExecuTorch's work, to the same files."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import fx, nn
from torch.fx import traceback
from torch.nn import functional as F

pytest.importorskip("executorch.exir")

from executorch import exir
from executorch.backends.xnnpack.partition.graphs import sdpa
from executorch.exir.verification import verifier

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
    before = sdpa.get_graphs, fx.GraphModule.recompile, verifier.EdgeOpArgValidator
    with less_repetition():
        assert sdpa.get_graphs is not before[0]
        assert traceback.copy is not copy
    with pytest.raises(RuntimeError, match="stop"), less_repetition():
        raise RuntimeError("stop")
    assert (sdpa.get_graphs, fx.GraphModule.recompile, verifier.EdgeOpArgValidator) == before
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


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "afterwards"])
@pytest.mark.parametrize("use", [lambda module: module(torch.ones(2)), lambda module: module.code, str, copy.deepcopy])
def test_code_is_there_when_it_is_wanted(use, inside):
    """Of the graph as it is then, also after it was run, read or copied before."""
    module = fx.symbolic_trace(lambda x: torch.relu(x) - 3)
    with less_repetition():
        for operation in (torch.neg, torch.sigmoid):
            (node,) = (node for node in module.graph.nodes if node.op == "call_function" and len(node.args) == 1)
            node.target = operation
            assert module.recompile() is None
            if inside:
                use(module)
    used = use(module)
    module = used if isinstance(used, fx.GraphModule) else module
    assert torch.equal(module(torch.ones(2)), torch.sigmoid(torch.ones(2)) - 3)
    assert "sigmoid" in module.code
    assert "neg" not in module.code


def test_inputs_and_outputs_in_containers_are_known_before_the_code_is():
    class Containers(nn.Module):
        def forward(self, pair, other):
            return {"sum": pair[0] + pair[1], "other": other}

    x, y, z = torch.randn(3, 4)
    module = torch.export.export(Containers(), ((x, y), z)).module()
    with less_repetition():
        module.recompile()
        assert torch.equal(module((x, y), z)["sum"], x + y)


def test_types_that_an_operator_cannot_take_are_found():
    class Sum(nn.Module):
        def forward(self, x):
            return (x + x) * x

    def refused(dtype):
        program = torch.export.export(Sum(), (torch.ones(2, 3, dtype=dtype),))
        edge = exir.to_edge(program, compile_config=exir.EdgeCompileConfig(_check_ir_validity=False))
        look = verifier.EdgeOpArgValidator(edge.exported_program().graph_module)
        look.run(torch.ones(2, 3, dtype=dtype))
        return {op.name(): types for op, (types, _) in look.violating_ops.items()}

    expected = refused(torch.complex64)
    assert set(expected) == {"aten::add.Tensor", "aten::mul.Tensor"}
    with less_repetition():
        assert refused(torch.complex64) == expected
        assert refused(torch.float32) == {}
