"""Which float32 values of a program become 16-bit ones, which stay, and why; decided before anything changes.

Two notions carry the plan. A *kept* node computes in float32. A *wide* value is one that the 16-bit dtype cannot
hold; nobody may narrow it, so its consumers are kept too. Results of kept nodes that are not wide are narrowed
again where a 16-bit consumer reads them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping

import torch
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from ._arguments import restrided_views, sharing_memory, written_arguments
from ._cleanup import CAST_OPS, dtype_of
from ._comparisons import (
    Comparison,
    comparisons_of,
    computed_threshold,
    constant_threshold,
    constants_of,
    is_only_compared,
    narrow_constant,
)
from ._intervals import Interval
from ._numbers import fits_tensor, holds_mask_numbers, is_beyond, largest, loses_precision
from ._operators import (
    attribute_of,
    called_graphs,
    exceeds,
    is_creation,
    is_graph_call,
    keeps_magnitude,
    lacks_16_bit_kernel,
    loop_end_sources,
    op_name,
    places_numbers,
    promoted_integers,
    reinterprets_bits,
    unsuitable_scalar,
)
from ._positions import position_chains
from ._program import static_inputs, tokens, user_inputs

IGNORED = "ignored_ops names it"


@dataclasses.dataclass
class FloatPlan:
    """Decisions of the float pass, by node; sub-graphs included.

    Attributes:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        kept: nodes that compute in float32, and why.
        wide: nodes whose float32 value ``dtype`` cannot hold, and why.
        stay: placeholders whose tensors stay float32 although ``dtype`` could hold them.
        comparisons: orderings by a number.
        thresholds: numbers with which they answer for values of ``dtype`` as they did in float32.
        given: nodes that are made of numbers, or stored with the program and not trained.
        saturated: kept nodes that a number beyond ``dtype`` may take there. It is one that masks or bounds, most often,
            so that 16-bit consumers get the largest finite number in place of an infinity.
    """

    dtype: torch.dtype
    kept: dict[Node, str] = dataclasses.field(default_factory=dict)
    wide: dict[Node, str] = dataclasses.field(default_factory=dict)
    stay: set[Node] = dataclasses.field(default_factory=set)
    comparisons: dict[Node, Comparison] = dataclasses.field(default_factory=dict)
    thresholds: dict[Node, float] = dataclasses.field(default_factory=dict)
    given: set[Node] = dataclasses.field(default_factory=set)
    saturated: set[Node] = dataclasses.field(default_factory=set)

    def native_float32(self, node: Node) -> bool:
        """Tell whether the value of ``node`` is computed or stored in float32."""
        return node in self.kept or node in self.wide or node in self.stay

    def compares_exactly(self, comparison: Comparison) -> bool:
        """Tell whether what is compared has never been 16-bit, or is bounded so that it makes no difference.

        A number that was put beside values of 16 bits does not make these exact; numbers computed in float32 do.
        """
        if not (self.native_float32(comparison.compared) and self.native_float32(comparison.source)):
            return False
        if comparison.is_settled:
            return True
        origins = comparison.origins(lambda node: not self.native_float32(node))
        exact = {node for node in origins if self.native_float32(node)}
        return exact == origins or not exact <= self.given


class FloatPlanner:
    """Build a :class:`FloatPlan`.

    Args:
        dtype: the 16-bit dtype.
        ignored: tells for a node whether the user wants it in float32.
        peaks: largest magnitudes seen, by node of a float32 or integer value; empty when no example inputs were given.
        ranges: proven intervals of integer values, by node.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        ignored: Callable[[Node], bool],
        peaks: Mapping[Node, float],
        ranges: Mapping[Node, Interval],
    ) -> None:
        self._plan = FloatPlan(dtype)
        self._ignored = ignored
        self._peaks = peaks
        self._ranges = ranges
        self._inherits_width: set[Node] = set()
        self._root: GraphModule | None = None

    def plan(self, program: ExportedProgram) -> FloatPlan:
        """Return the plan for ``program``.

        Raises:
            ValueError: an operator writes in place to a tensor that would have to be cast for it.
        """
        self._root = program.graph_module
        self._plan_statics(program)
        for node in user_inputs(program):
            self._check_peak(node)
        parameters = {node for node, spec, _ in static_inputs(program) if spec.kind == InputKind.PARAMETER}
        buffers = {node for node, _, tensor in static_inputs(program) if not holds_mask_numbers(tensor)} - parameters
        self._plan_graph(program.graph, parameters, buffers)
        # The user's inputs change by contract; of the rest, what positions are computed from stays as exact as it is.
        self._plan.stay -= set(user_inputs(program))
        self._plan.stay |= set(tokens(program))
        # A buffer under two names has two placeholders, of which one may have no users, and is one tensor.
        exact = {id(tensor) for node, _, tensor in static_inputs(program) if node in self._plan.stay}
        self._plan.stay |= {node for node, _, tensor in static_inputs(program) if id(tensor) in exact}
        self._settle_restrided_views(program.graph_module)
        self._settle_shared_graphs(program.graph_module)
        _check_in_place(program.graph_module, self._plan)
        return self._plan

    def _plan_statics(self, program: ExportedProgram) -> None:
        dtype = self._plan.dtype
        nodes = {node.name: node for node in program.graph.nodes}
        written = {
            spec.target: nodes[spec.arg.name]
            for spec in program.graph_signature.output_specs
            if spec.kind == OutputKind.BUFFER_MUTATION
        }
        verdicts: dict[int, str] = {}
        for _, spec, tensor in static_inputs(program):
            if tensor.dtype != torch.float32:
                continue
            if not fits_tensor(tensor, dtype):
                verdicts[id(tensor)] = f"it holds values beyond {dtype}"
            elif loses_precision(tensor, dtype):
                verdicts[id(tensor)] = f"most of it lies below the normal numbers of {dtype}"
            elif spec.target in written and self._overflow(written[spec.target]):
                verdicts[id(tensor)] = f"values beyond {dtype} are written to it"
        verdicts |= self._plan_thresholds(program)
        for node, _, tensor in static_inputs(program):
            if id(tensor) in verdicts:
                self._plan.wide[node] = verdicts[id(tensor)]

    def _plan_thresholds(self, program: ExportedProgram) -> dict[int, str]:
        """Find the thresholds of comparisons; return constants, by identity, that are only compared and lack one."""
        constants = constants_of(program)
        self._plan.comparisons = comparisons_of(program, constants)
        parameters = {node for node, spec, _ in static_inputs(program) if spec.kind == InputKind.PARAMETER}
        self._plan.given = {*constants} - parameters
        for module in program.graph_module.modules():
            if isinstance(module, GraphModule):
                self._plan.given |= {node for node in module.graph.nodes if is_creation(node)}
        verdicts: dict[int, str] = {}
        for node, comparison in self._plan.comparisons.items():
            if dtype_of(comparison.compared) != torch.float32:
                continue
            values = constants.get(comparison.source)
            threshold: float | None = None
            if values is not None and values.dtype == torch.float32:
                narrowed = narrow_constant(comparison.source, values, self._plan.dtype)
                threshold = constant_threshold(comparison, values, narrowed)
                if threshold is None and is_only_compared(comparison.source, self._plan.comparisons):
                    verdicts[id(values)] = f"{node.name} tells values apart that are one in {self._plan.dtype}"
            if threshold is None:
                threshold = computed_threshold(comparison, self._plan.dtype, constants)
            self._plan.thresholds[node] = threshold
        return verdicts

    def _plan_graph(self, graph: Graph, parameters: set[Node], buffers: set[Node]) -> None:
        chains = position_chains(graph, parameters, buffers)
        if graph.owning_module is self._root:
            self._plan.stay |= chains.placeholders
        for node in graph.nodes:
            if node.op == "get_attr":
                self._plan_attribute(node)
            elif node.op == "call_function":
                self._plan_call(node, chains.nodes)

    def _plan_attribute(self, node: Node) -> None:
        owner = node.graph.owning_module
        value = attribute_of(owner, str(node.target)) if owner is not None else None
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return
        if not fits_tensor(value, self._plan.dtype):
            self._plan.wide[node] = f"it holds values beyond {self._plan.dtype}"

    def _plan_call(self, node: Node, positions: set[Node]) -> None:
        if not touches_float32(node):
            return
        if node.target is operator.getitem:
            self._plan_item(node)
            return
        if isinstance(node.target, HigherOrderOperator):
            reason = self._graph_call_reason(node)
        else:
            reason = "it computes with integer positions" if node in positions else self._reason(node)
        if self._reads_bfloat16(node) or any(source in self._inherits_width for source in node.all_input_nodes):
            # bfloat16 reaches far beyond float16, and so may everything that is computed from it.
            self._inherits_width.add(node)
            reason = reason or "it computes with bfloat16 values, whose range float16 does not have"
            self._plan.wide[node] = reason
        integers = self._integer_overflow(node)
        overflow = self._overflow(node) or (integers if node.target in CAST_OPS else None) or self._moved_width(node)
        if overflow is None and places_numbers(node):
            overflow = unsuitable_scalar(node, self._plan.dtype)
        if overflow is not None:
            self._plan.wide[node] = overflow
        reason = reason or overflow or integers
        if reason is not None:
            self._plan.kept[node] = reason
            if overflow is None and exceeds(node, self._plan.dtype):
                self._plan.saturated.add(node)

    def _plan_item(self, node: Node) -> None:
        container = node.all_input_nodes[0]
        if container in self._plan.kept:
            self._plan.kept[node] = self._plan.kept[container]
        if container in self._inherits_width:
            self._inherits_width.add(node)
        overflow = self._overflow(node)
        if overflow is not None:
            self._plan.wide[node] = overflow
        elif container in self._inherits_width or (container in self._plan.wide and node not in self._peaks):
            self._plan.wide[node] = self._plan.wide[container]

    def _reason(self, node: Node) -> str | None:
        """Say why ``node`` computes in float32; None when it need not."""
        if self._ignored(node):
            return IGNORED
        comparison = self._plan.comparisons.get(node)
        read = node.all_input_nodes if comparison is None else [comparison.compared]
        wide = next((source for source in read if source in self._plan.wide), None)
        if wide is not None:
            return f"it reads {wide.name}, which stays float32: {self._plan.wide[wide]}"
        if reinterprets_bits(node):
            return "it reads the bits of float32 numbers"
        if _touches_complex(node):
            return "it computes with complex numbers"
        if lacks_16_bit_kernel(node):
            return f"PyTorch has no {self._plan.dtype} kernel for it"
        if comparison is None or not is_beyond(comparison.threshold, self._plan.dtype):
            return unsuitable_scalar(node, self._plan.dtype)
        if self._plan.compares_exactly(comparison):
            return f"it compares float32 numbers with {comparison.threshold!r}, beyond {self._plan.dtype}"
        return None

    def _graph_call_reason(self, node: Node) -> str | None:
        reason = self._reason(node)
        if reason is None and not is_graph_call(node):
            reason = f"graphs called by {node.target} are not rewritten"
        if reason is None and op_name(node) == "while_loop":
            counters = [source.name for source in loop_end_sources(node) if dtype_of(source) == torch.float32]
            if counters:
                reason = f"its end is computed from {', '.join(counters)}, whose steps 16-bit numbers would round"
        for module in called_graphs(node):
            self._plan_graph(module.graph, parameters=set(), buffers=set())
            placeholders = [inner for inner in module.graph.nodes if inner.op == "placeholder"]
            for inner in placeholders:
                self._check_peak(inner)
            results = [leaf for leaf in pytree.tree_leaves(module.graph.output_node().args) if isinstance(leaf, Node)]
            wide = next((inner for inner in (*placeholders, *results) if inner in self._plan.wide), None)
            if wide is not None:
                self._plan.wide[node] = self._plan.wide[wide]
                reason = reason or f"{wide.name} in its graph stays float32: {self._plan.wide[wide]}"
        return reason

    def _reads_bfloat16(self, node: Node) -> bool:
        if self._plan.dtype != torch.float16 or not _yields_float32(node):
            return False
        return any(dtype_of(source) == torch.bfloat16 for source in node.all_input_nodes)

    def _check_peak(self, node: Node) -> None:
        overflow = self._overflow(node)
        if dtype_of(node) == torch.float32 and overflow is not None:
            self._plan.wide[node] = overflow

    def _overflow(self, node: Node) -> str | None:
        peak = self._peaks.get(node, 0.0)
        if _yields_float32(node) and peak > largest(self._plan.dtype):
            return f"the example inputs drive it to {peak:.4g}, beyond {self._plan.dtype}"
        return None

    def _moved_width(self, node: Node) -> str | None:
        """Say why the result is wide when it only passes on wide values and no run has shown how large it is."""
        if node in self._peaks or not keeps_magnitude(node):
            return None
        return next((self._plan.wide[source] for source in node.all_input_nodes if source in self._plan.wide), None)

    def _integer_overflow(self, node: Node) -> str | None:
        """Say which integers that ``node`` turns into floats are beyond the 16-bit dtype."""
        for source in promoted_integers(node):
            interval, peak = self._ranges.get(source), self._peaks.get(source, 0.0)
            if interval is not None and interval.magnitude > largest(self._plan.dtype):
                bounds = f"from {interval.low} to {interval.high}"
                return f"{source.name} holds integers {bounds}, beyond {self._plan.dtype}"
            if peak > largest(self._plan.dtype):
                return (
                    f"the example inputs drive the integers of {source.name} to {peak:.4g}, beyond {self._plan.dtype}"
                )
        return None

    def _settle_restrided_views(self, module: GraphModule) -> None:
        """Keep all views whose memory ``as_strided`` reads in float32 when one is: no cast may lie between them."""
        for graph_module in module.modules():
            views = restrided_views(graph_module.graph) if isinstance(graph_module, GraphModule) else []
            readers = [user for view in views for user in view.users if op_name(user) == "as_strided"]
            if any(self._plan.native_float32(view) for view in (*views, *readers)):
                for view in (*views, *readers):
                    if touches_float32(view):
                        self._plan.kept.setdefault(view, "it shares its memory with a view that stays float32")

    def _settle_shared_graphs(self, module: GraphModule) -> None:
        """Keep all callers of a graph in float32 when one of them is: the graph exists once."""
        callers: dict[int, list[Node]] = {}
        for graph_module in module.modules():
            if isinstance(graph_module, GraphModule):
                for node in graph_module.graph.nodes:
                    if isinstance(node.target, HigherOrderOperator):
                        for called in called_graphs(node):
                            callers.setdefault(id(called), []).append(node)
        for nodes in callers.values():
            if any(node in self._plan.kept for node in nodes):
                for node in nodes:
                    self._plan.kept.setdefault(node, "it shares its graph with a call that stays float32")


def touches_float32(node: Node) -> bool:
    """Tell whether ``node`` reads or computes a float32 tensor."""
    return _yields_float32(node) or any(_yields_float32(source) for source in node.all_input_nodes)


def _yields_float32(node: Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 for leaf in leaves)


def _touches_complex(node: Node) -> bool:
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    return any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in pytree.tree_leaves(values))


def _check_in_place(module: GraphModule, plan: FloatPlan) -> None:
    for graph_module in module.modules():
        for node in graph_module.graph.nodes if isinstance(graph_module, GraphModule) else ():
            if node.op != "call_function" or node.target == torch.ops.aten.detach_.default:
                continue
            for written in written_arguments(node):
                if dtype_of(written) == torch.float32:
                    _check_write(node, written, plan)


def _check_write(writer: Node, written: Node, plan: FloatPlan) -> None:
    stays, memory = plan.native_float32(written), sharing_memory([written])
    others = [
        node
        for node in writer.graph.nodes
        if node in memory
        and dtype_of(node) == torch.float32
        and plan.native_float32(node) != stays
        and (node.op == "placeholder" or any(writer < user for user in node.users))
    ]
    if (writer in plan.kept) == stays and not others:
        return
    what = f"{writer.name} ({writer.target}) writes in place to {written.name}"
    if others:
        what += f", which has the memory of {others[0].name}"
    raise ValueError(
        f"{what}, of which one stays float32 and the other becomes {plan.dtype}. Make the program functional before "
        "casting it: program = program.run_decompositions()."
    )
