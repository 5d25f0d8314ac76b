"""Proven bounds of the integers in a graph, by interval analysis.

Bounds come from constants, sizes, ranges, comparisons, from what an operator can return at all, from indices (a
valid index lies inside the axis that it selects from) and from the user. What cannot be bounded has no entry.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from ._arguments import bound_arguments, written_in_place
from ._index_ops import index_bounds
from ._intervals import Interval, dtype_interval
from ._operators import called_graphs, op_name, reinterprets_bits
from ._program import static_inputs
from ._range_rules import RULES

_NATURALLY_SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16)


class RangeAnalysis:
    """Bound the integers of a program, sub-graphs included.

    Args:
        program: program whose nodes carry ``meta["val"]``; only read.
        declared: bounds that the user vouches for, by node.
    """

    def __init__(self, program: ExportedProgram, declared: Mapping[Node, Interval] | None = None) -> None:
        self._symbols = dict(program.range_constraints)
        self._known: dict[Node, Interval] = {}
        self._several: dict[Node, list[Interval | None]] = {}
        self._limits: dict[Node, Interval] = dict(declared or {})
        for node, _, tensor in static_inputs(program):
            bounds = _bounds_of(tensor)
            if bounds is not None:
                self._known[node] = bounds
        self._called: set[Node] = set()
        graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, GraphModule)]
        self._written = {node for graph in graphs for node in written_in_place(graph)}
        self._unbounded = set(self._written)
        for name in program.graph_signature.buffers_to_mutate:
            self._forget_written(program, name)
        self._run(program.graph)

    @property
    def intervals(self) -> dict[Node, Interval]:
        """The proven intervals, by node; a node without an entry has no bound."""
        return self._known

    def of(self, value: Any) -> Interval | None:
        """Return the bounds of an argument of an operator: a node, a Python number or a symbolic size."""
        if isinstance(value, Node):
            return self._known.get(value)
        if isinstance(value, int):
            return Interval(int(value), int(value))
        if isinstance(value, float) and value.is_integer():
            return Interval(int(value), int(value))
        return None

    def size(self, value: Any) -> Interval | None:
        """Return the bounds of a size or another (symbolic) integer of the shape."""
        if isinstance(value, Node):
            return self._known.get(value) or self.size(value.meta.get("val"))
        if isinstance(value, int):
            return Interval(value, value)
        if isinstance(value, torch.SymInt):
            return self._symbolic(value)
        return None

    def shape(self, node: Node) -> list[Interval | None]:
        """Return the bounds of the sizes of a tensor."""
        return [self.size(size) for size in node.meta["val"].shape]

    def _symbolic(self, size: torch.SymInt) -> Interval | None:
        from torch.utils._sympy.value_ranges import bound_sympy

        bounds = bound_sympy(size.node.expr, self._symbols)
        low, high = bounds.lower, bounds.upper
        return Interval(int(low), int(high)) if low.is_Integer and high.is_Integer else None

    def _forget_written(self, program: ExportedProgram, output: str) -> None:
        target = program.graph_signature.buffers_to_mutate[output]
        for node, spec, _ in static_inputs(program):
            if spec.target == target:
                self._unbounded.add(node)

    def _run(self, graph: Graph) -> None:
        for node, bound in _index_limits(graph, self):
            self._limits[node] = self._limits[node].meet(bound) if node in self._limits else bound
        for node in graph.nodes:
            # A limit holds where the value is declared or used as an index, not after a write in place.
            computed, limit = self._bounds(node), None if node in self._written else self._limits.get(node)
            bounds = computed.meet(limit) if computed is not None and limit is not None else computed or limit
            if bounds is not None:
                self._known[node] = bounds
            else:
                # An earlier call of this graph may have had narrower operands.
                self._known.pop(node, None)

    def _bounds(self, node: Node) -> Interval | None:
        value = node.meta.get("val")
        if node in self._unbounded:
            self._known.pop(node, None)
            return None
        if isinstance(value, int | torch.SymInt):
            return self.size(value)
        computed = self._known.get(node)
        if node.op == "call_function":
            computed = self._computed(node)
        elif node.op == "get_attr":
            computed = _bounds_of(getattr(node.graph.owning_module, str(node.target), None))
        dtype = getattr(value, "dtype", None)
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex:
            return None
        whole = dtype_interval(dtype)
        if computed is not None and computed.within(whole):
            return computed
        return whole if dtype in _NATURALLY_SMALL else None

    def _computed(self, node: Node) -> Interval | None:
        if node.target is operator.getitem:
            container, index = node.args
            several = self._several.get(container) if isinstance(container, Node) else None
            return several[index] if several and isinstance(index, int) and index < len(several) else None
        if isinstance(node.target, HigherOrderOperator):
            self._run_called(node)
            return None
        if reinterprets_bits(node) or op_name(node) not in RULES:
            return None
        result = RULES[op_name(node)](self, node, named_arguments(node))
        self._several.pop(node, None)
        if isinstance(result, list):
            self._several[node] = result
            return None
        return result

    def _run_called(self, node: Node) -> None:
        """Bound the graphs behind ``node``; only ``cond`` passes its operands on unchanged."""
        for module in called_graphs(node):
            operands = node.args[3] if op_name(node) == "cond" else ()
            placeholders = [inner for inner in module.graph.nodes if inner.op == "placeholder"]
            given = [self.of(operand) for operand in pytree.tree_leaves(operands)] or [None] * len(placeholders)
            for inner, bounds in zip(placeholders, given, strict=True):
                self._bound_operand(inner, bounds)
            self._run(module.graph)

    def _bound_operand(self, placeholder: Node, bounds: Interval | None) -> None:
        """Bound an operand of a called graph by what this call and all earlier ones pass."""
        before = self._known.pop(placeholder, None)
        if placeholder in self._called and bounds is not None:
            bounds = None if before is None else bounds.hull(before)
        self._called.add(placeholder)
        if bounds is not None:
            self._known[placeholder] = bounds


def named_arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of an operator by schema name, defaults included."""
    if not isinstance(node.target, OpOverload):
        return {}
    named = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    named.update({argument.name: value for argument, value in bound_arguments(node)})
    return named


def _bounds_of(tensor: Any) -> Interval | None:
    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return None
    if tensor.numel() == 0:
        return Interval(0, 0)
    return Interval(int(tensor.min()), int(tensor.max()))


_ELEMENT_PRESERVING = frozenset(
    {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "permute", "transpose", "t", "clone", "contiguous"}
    | {"alias", "detach", "flatten", "flip", "lift_fresh_copy", "unflatten"}
)


def _index_limits(graph: Graph, analysis: RangeAnalysis) -> Iterator[tuple[Node, Interval]]:
    """Yield the bounds that valid indices have, followed back through operators that keep every element."""
    for node in graph.nodes:
        for index, low, high in index_bounds(node):
            size = analysis.size(high)
            if size is None or size.high < 1:
                continue
            limit = Interval(-size.high if low is None else low, size.high - 1)
            source: Any = index
            while isinstance(source, Node):
                yield source, limit
                keeps = source.op == "call_function" and op_name(source) in _ELEMENT_PRESERVING
                source = source.args[0] if keeps else None
