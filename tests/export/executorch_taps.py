"""ExecuTorch programs that also return what each of their roundings gives, beside PyTorch fed with those numbers.

In a whole program one moved code moves others behind it. Where PyTorch goes on with the program's own codes, a number
that differs is the doing of what stands between it and the codes in front of it.

XNNPACK's layers from int8 to int8 hold their bias as int32, in whole products of the input's and the weight's scale.
That is part of the file, not of how it is computed; what it makes of the prepared model's bias is measured apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_structure

from bitwright.export.executorch import export_executorch, run_executorch
from bitwright.export.executorch.exporter import _lowered, _partitioners, _program
from bitwright.export.executorch.graph import DEQUANTIZE, DEQUANTIZE_CHANNELS, op_name
from bitwright.export.executorch.weights import int8_weight
from tests.measures import sqnr

__all__ = ["Rounding", "roundings"]

_QUANTIZE, _ROUND = "quantized_decomposed::quantize_per_tensor", "aten::round"
_SAME = tuple(f"aten::{name}" for name in ("dropout", "clone", "contiguous", "alias", "detach"))
_MOVES = (*_SAME, *(f"aten::{name}" for name in ("view", "reshape", "transpose", "permute", "slice", "expand")))


@dataclass(frozen=True)
class Rounding:
    """Numbers that one rounding of a program gives.

    Attributes:
        name: of the node.
        numbers: how many there are.
        differing: those that are not what the prepared model's simulator makes of PyTorch's value.
        error: how far that value lies past the bound between both numbers, in steps, where they differ. Behind a layer
            from int8 to int8 it is computed with the bias that XNNPACK holds.
        bias: how far that bias is from the model's, in steps.
    """

    name: str
    numbers: int
    differing: int
    error: float
    bias: float


def roundings(model, inputs, path):
    """Compare every rounding to integers of a prepared model, and what is computed behind the last ones.

    Returns:
        The roundings, and the SQNR in dB of the outputs given the program's codes.
    """
    whole = run_executorch(export_executorch(model, inputs, path), inputs)
    program, by_codes, _ = _program(model, int8_weight, inputs)
    module, tapped = _tapped(program.module())
    path.write_bytes(_lowered(torch.export.export(module, inputs, strict=False), _partitioners(by_codes)))
    found = run_executorch(path, inputs)
    outputs, codes = found[: len(whole)], found[len(whole) :]
    assert all(torch.equal(one, other) for one, other in zip(whole, outputs, strict=True)), "another program"
    given = {
        name: ~code if code.dtype == torch.int8 else code.double().sinh().round().float()
        for name, code in zip(tapped, codes, strict=True)
    }
    replay = _Replay(module, given)
    with torch.no_grad():
        expected = replay.run(*inputs)[: len(whole)]
    return replay.rows, min(sqnr(one, other) for one, other in zip(expected, outputs, strict=True))


def _tapped(module):
    """Let a program return its roundings through operators that XNNPACK lacks, so that it computes as before."""
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    rounds = [node for node in graph.nodes if op_name(node) in (_QUANTIZE, _ROUND) and not _is_again(node)]
    results = list(tree_leaves(output.args[0]))
    for node in rounds:
        with graph.inserting_before(output):
            integers = op_name(node) == _QUANTIZE
            tap = torch.ops.aten.bitwise_not.default if integers else torch.ops.aten.asinh.default
            results.append(graph.call_function(tap, (_last(node) if integers else node,)))
    output.args = (tuple(results),)
    code = graph._codegen
    code.pytree_info = code.pytree_info._replace(out_spec=tree_structure(tuple(range(len(results)))))
    module.recompile()
    return module, [node.name for node in rounds]


def _is_again(node):
    """Whether codes are decoded, moved, and coded by the same parameters."""
    before = node.args[0]
    while op_name(before).startswith(_MOVES):
        before = before.args[0]
    return op_name(node) == _QUANTIZE and _are_alike(before, node)


def _are_alike(dequantize, quantize):
    return op_name(dequantize) == DEQUANTIZE and dequantize.args[1:3] == quantize.args[1:3]


def _last(node):
    """The last node that has the codes of this one; those in front of it may vanish within XNNPACK."""
    for dequantize in [user for user in node.users if op_name(user) == DEQUANTIZE]:
        value = dequantize
        while len(value.users) == 1 and op_name(next(iter(value.users))).startswith(_SAME):
            value = next(iter(value.users))
        for user in value.users:
            if op_name(user) == _QUANTIZE and _are_alike(dequantize, user):
                return _last(user)
    return node


class _Replay(fx.Interpreter):
    """Computes in PyTorch, goes on with given codes, and compares."""

    def __init__(self, module, given):
        super().__init__(module, garbage_collect_values=False)
        self.given, self.rows, self.biases = given, [], {}

    def run_node(self, node):
        result = super().run_node(node)
        if _is_integer_layer(node):
            result = self._with_held_bias(node)
        if node.name not in self.given:
            return result
        value, found = self.env[node.args[0]], self.given[node.name]
        expected, place, bias = result.double(), value.double(), 0.0
        if op_name(node) == _QUANTIZE:
            scale, zero_point, low, high = node.args[1:5]
            bias = self.biases.get(node.args[0], 0.0) / scale
            expected = ((value / scale).round() + zero_point).clamp(low, high).double()
            place = (place / scale + zero_point).clamp(low, high)
        differs = found.double() != expected
        past = ((place - found.double()).abs() - 0.5)[differs]
        error = max([0.0, *past.flatten().tolist()])
        self.rows.append(Rounding(node.name, found.numel(), int(differs.sum()), error, bias))
        return found

    def _with_held_bias(self, node):
        x, weight, bias = node.args[:3]
        step = x.args[1] * self.env[weight.args[1]]
        held = (self.env[bias] / step).round() * step
        self.biases[node] = float((held - self.env[bias]).abs().max())
        args = [self.env[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
        return node.target(*args[:2], held, *args[3:])


def _is_integer_layer(node):
    """Whether XNNPACK computes a layer with a bias in integers; those that it computes in floats read other ops."""
    if op_name(node) not in ("aten::linear", "aten::conv1d", "aten::conv2d") or len(node.args) < 3:
        return False
    x, weight, bias = node.args[:3]
    return bias is not None and op_name(x) == DEQUANTIZE and op_name(weight) == DEQUANTIZE_CHANNELS
