"""Programs that the casting tests share, and what they measure on them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from bitwright.export.decomposing import decomposed


def export(model: nn.Module, *inputs: Any, decompose: bool = True, **kwargs: Any) -> ExportedProgram:
    """Export ``model`` in evaluation mode."""
    program = torch.export.export(model.eval(), inputs, strict=False, **kwargs)
    return decomposed(program) if decompose else program


def run(program: ExportedProgram, *inputs: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Run ``program`` and return its tensors in order."""
    with torch.no_grad():
        return [
            leaf for leaf in pytree.tree_leaves(program.module()(*inputs, **kwargs)) if isinstance(leaf, torch.Tensor)
        ]


def sqnr(reference: torch.Tensor, result: torch.Tensor) -> float:
    """Return the signal to noise ratio in dB; entries that are not finite have to agree."""
    exact, noisy = reference.double(), result.double()
    finite = exact.isfinite()
    assert torch.equal(finite, noisy.isfinite())
    assert torch.equal(exact[~finite], noisy[~finite])
    noise = (exact - noisy)[finite].norm()
    return float("inf") if noise == 0 else float(20 * torch.log10(exact[finite].norm() / noise))


def node_dtypes(program: ExportedProgram) -> Counter[torch.dtype]:
    """Count the dtypes that operators yield, sub-graphs included."""
    return Counter(
        leaf.dtype
        for module in program.graph_module.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(leaf, torch.Tensor)
    )


def find(program: ExportedProgram, target: Any) -> Node:
    """Return the only node of an operator."""
    nodes = [node for node in program.graph.nodes if node.target == target]
    assert len(nodes) == 1, nodes
    return nodes[0]


def dtype(node: Node) -> torch.dtype:
    """Return the dtype that the metadata of ``node`` claims."""
    return node.meta["val"].dtype


def check_metadata(program: ExportedProgram, *inputs: Any) -> None:
    """Run the program node by node and check that every node yields what its metadata says."""

    class Check(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            claimed = [leaf for leaf in pytree.tree_leaves(n.meta.get("val")) if isinstance(leaf, torch.Tensor)]
            actual = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if n.op == "call_function":
                assert [leaf.dtype for leaf in claimed] == [leaf.dtype for leaf in actual], n.format_node()
            return result

    with torch.no_grad():
        Check(program.graph_module).run(*program._graph_module_flat_inputs(inputs, {}))


class ConvNet(nn.Module):
    """Convolution, batch norm, residual addition, pooling, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return self.fc(torch.nn.functional.max_pool2d(y + y.roll(1, -1), 2).flatten(1))


class Overflowing(nn.Module):
    """exp(12) does not fit float16; its logarithm does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.exp(x) * 2.0) + 1.0
