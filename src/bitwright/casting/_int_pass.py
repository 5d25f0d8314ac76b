"""The integer pass: arithmetic on integers whose bounds are proven to fit is done in int16."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from typing import Final

import torch
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, GraphModule, Node

from ._arguments import written_arguments
from ._cleanup import cleanup_casts, dtype_of
from ._float_pass import sync_metadata_assertion
from ._index_ops import build_unsafe_to_cast_nodes, index_nodes
from ._intervals import Interval, dtype_interval
from ._operators import called_graphs, op_name
from ._program import finish, user_inputs
from ._ranges import RangeAnalysis
from ._reachable import reachable
from ._retype import DtypeInference, Retyper, set_dtypes

_aten = torch.ops.aten
INT16: Final = dtype_interval(torch.int16)
_WIDE_INTEGERS: Final = (torch.int32, torch.int64)
_ARITHMETIC: Final = frozenset({_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor})

#: Operators that only move or choose elements, or stay inside their operands' bounds: they run in any integer dtype.
_MOVES: Final = frozenset(
    {"_unsafe_view", "alias", "broadcast_to", "cat", "clone", "constant_pad_nd", "contiguous", "detach", "diagonal"}
    | {"expand", "flatten", "flip", "gather", "index", "index_select", "lift_fresh_copy", "maximum", "minimum"}
    | {"narrow", "permute", "repeat", "reshape", "roll", "select", "slice", "squeeze", "stack", "t", "tile"}
    | {"transpose", "unfold", "unsqueeze", "view", "where"}
)


@dataclasses.dataclass
class Unproven:
    """An arithmetic node left in its dtype because the bounds of ``values`` do not fit int16 or are unknown."""

    node: Node
    values: list[tuple[Node, Interval | None]]

    def __str__(self) -> str:
        listed = [
            f"{value.name} has no bounds" if bounds is None else f"{value.name} lies in {bounds.low}..{bounds.high}"
            for value, bounds in self.values
        ]
        return f"{self.node.name} ({', '.join(listed)})"


def apply_int16(program: ExportedProgram, analysis: RangeAnalysis) -> list[Unproven]:
    """Rewrite ``program`` in place; return the arithmetic that was left alone for want of a proof."""
    unproven: list[Unproven] = []
    inputs = user_inputs(program)
    retypable = _retypable(program, inputs, analysis.intervals)
    _rewrite(program.graph_module, inputs, retypable, analysis.intervals, unproven, set())
    finish(program)
    return unproven


def _retypable(program: ExportedProgram, inputs: list[Node], intervals: dict[Node, Interval]) -> set[Node]:
    """Return the inputs that may be fed as int16: nothing is written to them, or nothing but what fits."""
    nodes = {node.name: node for node in program.graph.nodes}
    written = {argument for node in program.graph.nodes for argument in written_arguments(node)}
    for spec in program.graph_signature.output_specs:
        if spec.kind == OutputKind.USER_INPUT_MUTATION:
            bounds = intervals.get(nodes[spec.arg.name])
            if bounds is None or not bounds.within(INT16):
                written.add(nodes[str(spec.target)])
    return set(inputs) - written


def _rewrite(
    module: GraphModule,
    inputs: list[Node],
    retypable: set[Node],
    intervals: dict[Node, Interval],
    unproven: list[Unproven],
    done: set[int],
) -> None:
    done.add(id(module))
    graph = module.graph
    castable = build_castable_int16_nodes(graph, build_user_reachable_nodes(inputs), build_unsafe_to_cast_nodes(graph))
    chosen = _proven(castable, intervals, unproven)
    inserted: set[Node] = set()
    retyper = Retyper(graph, inserted)
    inference = DtypeInference()
    for node in list(graph.nodes):
        if node.op == "placeholder" and node in chosen and node in retypable:
            set_dtypes(node, [torch.int16])
        elif node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
            retyper.feed_original(node)
            for called in called_graphs(node):
                if id(called) not in done:
                    placeholders = [inner for inner in called.graph.nodes if inner.op == "placeholder"]
                    _rewrite(called, placeholders, set(), intervals, unproven, done)
        elif node.target is _aten._assert_tensor_metadata.default:
            sync_metadata_assertion(node)
        elif node.op == "call_function" and node in chosen and _runs_in_int16(node):
            _narrow(node, retyper, inference)
        elif node.op in ("call_function", "output"):
            retyper.feed_original(node)
    cleanup_casts(graph, inserted)


def _narrow(node: Node, retyper: Retyper, inference: DtypeInference) -> None:
    indices = index_nodes(node)

    def wanted(source: Node) -> torch.dtype | None:
        dtype = retyper.original(source)
        return torch.int16 if dtype in _WIDE_INTEGERS and source not in indices else dtype

    retyper.feed(node, wanted)
    dtypes = inference(node, node.args, node.kwargs)
    if dtypes is None:
        retyper.feed_original(node)
    else:
        set_dtypes(node, dtypes)


def _runs_in_int16(node: Node) -> bool:
    return node.target in _ARITHMETIC or op_name(node) in _MOVES


def _proven(castable: set[Node], intervals: dict[Node, Interval], unproven: list[Unproven]) -> set[Node]:
    """Return the part of ``castable`` whose values, and whose operands' values, fit int16 and that feeds arithmetic."""

    def doubtful(node: Node) -> list[tuple[Node, Interval | None]]:
        values = [node, *(source for source in node.all_input_nodes if dtype_of(source) in _WIDE_INTEGERS)]
        return [(v, intervals.get(v)) for v in values if v not in intervals or not intervals[v].within(INT16)]

    proven = {node for node in castable if not doubtful(node)}
    for node in sorted(castable - proven):
        if node.target in _ARITHMETIC:
            unproven.append(Unproven(node, doubtful(node)))
    return _connected((node for node in proven if node.target in _ARITHMETIC), proven)


def build_user_reachable_nodes(inputs: Iterable[Node]) -> set[Node]:
    """Return ``inputs`` and every node that is computed from one of them."""
    return reachable(inputs, lambda node: node.users)


def build_castable_int16_nodes(graph: Graph, user_reachable: Container[Node], unsafe: Container[Node]) -> set[Node]:
    """Return the nodes that may work in int16 as far as the structure of the graph tells.

    They are additions, subtractions and products of two integer tensors, and everything of an integer dtype that
    is connected with one. What does not depend on the user's inputs stays out, because a compiler folds it into a
    constant, and so do indices and arithmetic with a Python number.

    Args:
        graph: graph whose nodes carry ``meta["val"]``.
        user_reachable: nodes that depend on the user's inputs (:func:`build_user_reachable_nodes`).
        unsafe: nodes that indices are computed from (:func:`build_unsafe_to_cast_nodes`).
    """
    allowed = {
        node
        for node in graph.nodes
        if node.op in ("placeholder", "call_function")
        and dtype_of(node) in _WIDE_INTEGERS
        and node in user_reachable
        and node not in unsafe
        and not (node.target in _ARITHMETIC and _has_scalar_operand(node))
    }
    return _connected((node for node in allowed if node.target in _ARITHMETIC), allowed)


def _has_scalar_operand(node: Node) -> bool:
    return not all(isinstance(operand, Node) for operand in node.args[:2])


def _connected(seeds: Iterable[Node], allowed: set[Node]) -> set[Node]:
    """Return ``seeds`` and what is linked to them through nodes of ``allowed``, along edges in both directions."""
    return reachable(seeds, lambda node: [other for other in (*node.all_input_nodes, *node.users) if other in allowed])
