"""ExecuTorch programs cut at every rounding; each piece runs by itself on the values that PyTorch has there.

What a piece rounds otherwise is its own doing, while in a whole program one moved code moves others behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from bitwright.export.executorch import run_executorch
from bitwright.export.executorch.exporter import _lowered, _partitioners, _program
from bitwright.export.executorch.graph import op_name
from bitwright.export.executorch.weights import int8_weight

__all__ = ["Rounding", "roundings"]

_QUANTIZE, _ROUND = "quantized_decomposed::quantize_per_tensor", "aten::round"
_CUT = (_QUANTIZE, _ROUND, "aten::embedding")


@dataclass(frozen=True)
class Rounding:
    """Numbers that one rounding of a program gives.

    Attributes:
        name: of the node.
        numbers: how many there are.
        differing: those that are not PyTorch's.
        error: how far past the bound between two numbers a value lies that ExecuTorch rounded across it, in steps.
    """

    name: str
    numbers: int
    differing: int
    error: float


def roundings(model, inputs, path):
    """Compare every rounding to integers of a prepared model in ExecuTorch with PyTorch's, each for itself."""
    program, by_codes, _ = _program(model, int8_weight, inputs)
    whole = _Recorder(program.module())
    with torch.no_grad():
        whole.run(*inputs)
    found = []
    for node in [node for node in whole.module.graph.nodes if op_name(node) in (_QUANTIZE, _ROUND)]:
        piece, fed = _piece(whole.module, node)
        values = tuple(whole.decoded(before).contiguous() for before in fed)
        exported = torch.export.export(piece, values, strict=False)
        path.write_bytes(_lowered(exported, _partitioners(by_codes)))
        (result,) = run_executorch(path, values)
        found.append(_compared(node, whole, result))
    return found


class _Recorder(fx.Interpreter):
    """Keeps the value of every node."""

    def __init__(self, module):
        super().__init__(module, garbage_collect_values=False)

    def decoded(self, node):
        value = self.env[node]
        return (value.float() - node.args[2]) * node.args[1] if op_name(node) == _QUANTIZE else value


def _piece(module, target):
    """What computes ``target`` from the roundings in front of it, and the nodes whose values are its inputs."""
    fed, inner = [], {target}
    for node in reversed(list(module.graph.nodes)):
        if node not in inner or node.op == "get_attr":
            continue
        if node.op == "placeholder" or (node is not target and op_name(node) in _CUT):
            fed.append(node)
        else:
            inner.update(node.all_input_nodes)
    graph, copies = fx.Graph(), {}
    for node in fed:
        copies[node] = graph.placeholder(f"of_{node.name}")
    for node in module.graph.nodes:
        if node in fed and op_name(node) == _QUANTIZE:
            copies[node] = graph.call_function(node.target, (copies[node], *node.args[1:]))
        elif node in inner and node not in fed:
            copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    result = copies[target]
    if op_name(target) == _QUANTIZE:
        dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        result = graph.call_function(dequantize, (result, *target.args[1:]))
    graph.output((result,))
    return fx.GraphModule(module, graph), fed


def _compared(node, whole, result):
    place, expected = whole.env[node.args[0]].double(), whole.env[node].double()
    result = result.double()
    if op_name(node) == _QUANTIZE:
        scale, zero_point, low, high = node.args[1:5]
        place, result = (place / scale + zero_point).clamp(low, high), (result / scale + zero_point).round()
    past = (place - result).abs() - 0.5
    return Rounding(node.name, result.numel(), int((result != expected).sum()), float(past.max().clamp(min=0)))
