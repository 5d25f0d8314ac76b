"""The float pass: carry out a plan on the graphs, then on the stored tensors."""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ._arguments import bound_arguments
from ._cleanup import CAST_OPS, cleanup_casts
from ._comparisons import is_comparison, narrow_constant
from ._float_plan import IGNORED, FloatPlan, touches_float32
from ._numbers import narrow_bound, narrow_scalar
from ._operators import attribute_of, bounds_results, called_graphs, is_creation, op_name
from ._program import finish, replace_state, static_inputs
from ._retype import DtypeInference, Retyper, dtypes_of, set_dtypes

_logger = logging.getLogger("bitwright.casting")

_FLOAT32 = torch.float32


def apply_float_plan(program: ExportedProgram, plan: FloatPlan) -> None:
    """Rewrite ``program`` in place as ``plan`` says."""
    inference = DtypeInference()
    rewriter = _GraphRewriter(program.graph_module, plan, inference)
    narrowed: dict[int, torch.Tensor] = {}
    for node, _, tensor in static_inputs(program):
        if tensor.dtype == _FLOAT32 and not plan.native_float32(node) and id(tensor) not in narrowed:
            narrowed[id(tensor)] = narrow_constant(node, tensor, plan.dtype)
    rewriter.run(_output_dtypes(program, plan))
    replace_state(program, narrowed)
    finish(program)
    _report(program, plan)


class _GraphRewriter:
    """Rewrite one graph, and the graphs that it calls."""

    def __init__(self, module: GraphModule, plan: FloatPlan, inference: DtypeInference) -> None:
        self._module = module
        self._plan = plan
        self._inference = inference
        self._inserted: set[Node] = set()
        self._retyper = Retyper(module.graph, self._inserted, plan.saturated)
        self._done: set[int] = set()

    def run(self, output_dtypes: list[torch.dtype | None]) -> None:
        """Rewrite the graph; its results get the dtypes given (None: as they are)."""
        for node in list(self._module.graph.nodes):
            if node.op == "placeholder":
                self._rewrite_placeholder(node)
            elif node.op == "get_attr":
                self._rewrite_attribute(node)
            elif node.op == "call_function":
                self._rewrite_call(node)
        self._rewrite_output(output_dtypes)
        cleanup_casts(self._module.graph, self._inserted)

    def _rewrite_placeholder(self, node: Node) -> None:
        if self._retyper.original(node) == _FLOAT32 and not self._plan.native_float32(node):
            set_dtypes(node, [self._plan.dtype])

    def _rewrite_attribute(self, node: Node) -> None:
        value = attribute_of(self._module, str(node.target))
        if not isinstance(value, torch.Tensor) or value.dtype not in (_FLOAT32, self._plan.dtype):
            return
        if self._retyper.original(node) != _FLOAT32 or self._plan.native_float32(node):
            return
        if value.dtype == _FLOAT32:
            path, _, name = str(node.target).rpartition(".")
            setattr(self._module.get_submodule(path), name, narrow_constant(node, value, self._plan.dtype))
        set_dtypes(node, [self._plan.dtype])

    def _rewrite_call(self, node: Node) -> None:
        if node.target is operator.getitem:
            container, index = node.args
            if isinstance(container, Node) and isinstance(index, int):
                set_dtypes(node, dtypes_of(container.meta["val"][index]))
        elif node.target is torch.ops.aten._assert_tensor_metadata.default:
            sync_metadata_assertion(node)
        elif not touches_float32_originally(node, self._retyper):
            return
        elif node in self._plan.kept:
            self._settle_threshold(node)
            self._retyper.feed_original(node)
        elif isinstance(node.target, HigherOrderOperator):
            self._narrow_graph_call(node)
        else:
            self._narrow(node)

    def _wanted(self, source: Node) -> torch.dtype | None:
        return self._plan.dtype if self._retyper.original(source) == _FLOAT32 else None

    def _settle_threshold(self, node: Node) -> None:
        """Let a comparison of what is, or has been, 16-bit answer as it did before."""
        comparison = self._plan.comparisons.get(node)
        if comparison is None or (node in self._plan.kept and self._plan.compares_exactly(comparison)):
            return
        settled = self._plan.thresholds[node]
        if comparison.held is not None or settled != comparison.threshold:
            comparison.settle(settled)

    def _narrow(self, node: Node) -> None:
        self._settle_threshold(node)
        args, kwargs = node.args, node.kwargs
        node.args, node.kwargs = _narrow_constants(node, self._plan.dtype)
        self._retyper.feed(node, self._wanted)
        before = dtypes_of(node.meta["val"])
        after = self._inference(node, node.args, node.kwargs)
        if after is None or any(old != _FLOAT32 and old != new for old, new in zip(before, after, strict=True)):
            node.args, node.kwargs = args, kwargs
            self._retyper.feed_original(node)
            self._plan.kept[node] = f"the operator does not compute in {self._plan.dtype}"
            return
        set_dtypes(node, after)
        if node.target in CAST_OPS and before == [_FLOAT32]:
            self._inserted.add(node)
            self._keep_copy(node)

    def _keep_copy(self, node: Node) -> None:
        """Let a cast that is none any more copy its argument where one of both is written to in place."""
        source = node.all_input_nodes[0]
        was_cast = self._retyper.original(source) != _FLOAT32
        can_copy = node.target in (torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout)  # other casts always do
        if can_copy and was_cast and self._retyper.is_written(node):
            arguments = {argument.name: value for argument, value in bound_arguments(node)}
            node.args, node.kwargs = (arguments.pop("self"),), {**arguments, "copy": True}

    def _narrow_graph_call(self, node: Node) -> None:
        self._retyper.feed(node, self._wanted)
        narrow = self._plan.dtype
        set_dtypes(node, [narrow if dtype == _FLOAT32 else dtype for dtype in dtypes_of(node.meta["val"])])
        for module in called_graphs(node):
            if id(module) in self._done:
                continue
            self._done.add(id(module))
            results = pytree.tree_leaves(module.graph.output_node().args)
            dtypes = [dtypes_of(leaf.meta.get("val"))[0] if isinstance(leaf, Node) else None for leaf in results]
            rewriter = _GraphRewriter(module, self._plan, self._inference)
            rewriter.run([narrow if dtype == _FLOAT32 else None for dtype in dtypes])

    def _rewrite_output(self, dtypes: list[torch.dtype | None]) -> None:
        output = self._module.graph.output_node()
        results, spec = pytree.tree_flatten(output.args)
        cast = [
            self._retyper.value(result, dtype, output) if isinstance(result, Node) and dtype is not None else result
            for result, dtype in zip(results, dtypes, strict=True)
        ]
        output.args = pytree.tree_unflatten(cast, spec)


def touches_float32_originally(node: Node, retyper: Retyper) -> bool:
    """Tell whether ``node`` computes, or before any change read, a float32 tensor."""
    return touches_float32(node) or any(retyper.original(source) == _FLOAT32 for source in node.all_input_nodes)


def sync_metadata_assertion(node: Node) -> None:
    """Let an assertion about a tensor expect the dtype that the tensor has now, and say so once."""
    source = node.args[0]
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return
    arguments = {argument.name: value for argument, value in bound_arguments(node)}
    if arguments.get("dtype") is None:
        return
    # Deserialised programs can carry the dtype both by position and by name, which no call accepts.
    del arguments["a"], arguments["dtype"]
    node.args, node.kwargs = (source,), {**arguments, "dtype": source.meta["val"].dtype}


def _narrow_constants(node: Node, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``node`` with numbers and dtypes as the 16-bit operator takes them.

    An epsilon that the operator has as a default is written down when the 16-bit format does not hold it.
    """
    if not isinstance(node.target, OpOverload):
        return node.args, dict(node.kwargs)
    arguments = node.target._schema.arguments
    kinds = {argument.name: str(argument.type) for argument in arguments}
    names = [argument.name for argument in arguments]
    given = {argument.name for argument, _ in bound_arguments(node)}

    def narrow(name: str, value: Any) -> Any:
        if value is _FLOAT32:
            return dtype
        is_number = isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool))
        if not is_number or "int" in kinds.get(name, "int") or op_name(node) == "arange":
            return value
        # Numbers of the schema type float steer a kernel (scales of a resize, momentum); an epsilon must not vanish.
        if "float" in kinds[name] and name != "eps":
            return value
        narrowed = _narrow_number(node, name, float(value), dtype)
        return value if narrowed == value else narrowed

    args = tuple(narrow(name, value) for name, value in zip(names, node.args, strict=False))
    kwargs = {name: narrow(name, value) for name, value in node.kwargs.items()}
    for argument in arguments:
        if argument.name == "eps" and argument.name not in given and isinstance(argument.default_value, float):
            narrowed = narrow("eps", argument.default_value)
            if narrowed != argument.default_value:
                kwargs["eps"] = narrowed
    if is_creation(node) and "dtype" in names and "dtype" not in given and not op_name(node).endswith("_like"):
        # Left to itself the operator would take the default dtype of the process.
        kwargs["dtype"] = dtype
    return args, kwargs


def _narrow_number(node: Node, name: str, value: float, dtype: torch.dtype) -> float:
    """Return what ``dtype`` holds for ``value``, the argument ``name`` of ``node``, by what it is to the operator."""
    if is_comparison(node):
        return value
    if name != "alpha" and bounds_results(node):
        return narrow_bound(value, dtype)
    return narrow_scalar(value, dtype)


def _output_dtypes(program: ExportedProgram, plan: FloatPlan) -> list[torch.dtype | None]:
    """Return the dtypes that the results of the program have to arrive in."""
    results = program.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    stored = {str(spec.target): node for node, spec, _ in static_inputs(program)}
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    dtypes: list[torch.dtype | None] = []
    for result, spec in zip(results if isinstance(results, tuple | list) else (), specs, strict=True):
        owner = _written_input(spec, stored, placeholders)
        is_float32 = isinstance(result, Node) and dtypes_of(result.meta.get("val")) == [_FLOAT32]
        if not is_float32 or spec.kind == OutputKind.TOKEN:
            dtypes.append(None)
        elif owner is not None:
            dtypes.append(_FLOAT32 if plan.native_float32(owner) else plan.dtype)
        else:
            dtypes.append(_FLOAT32 if result in plan.wide else plan.dtype)
    return dtypes


def _written_input(spec: OutputSpec, stored: dict[str, Node], placeholders: dict[str, Node]) -> Node | None:
    """Return the placeholder that an output is written back to; None for a result of the user."""
    if spec.kind == OutputKind.USER_INPUT_MUTATION:
        return placeholders.get(str(spec.target))
    if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
        return stored.get(str(spec.target))
    return None


def _report(program: ExportedProgram, plan: FloatPlan) -> None:
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    alive = {node for graph in graphs for node in graph.nodes}
    for node, reason in {**plan.kept, **plan.wide}.items():
        if node not in alive:
            continue
        _logger.log(logging.DEBUG if reason == IGNORED else logging.INFO, "%s stays in float32: %s", node.name, reason)
    overflowing = [node.name for node, reason in plan.wide.items() if "example inputs" in reason and node in alive]
    if overflowing:
        _logger.warning(
            "%d values overflow %s with the example inputs and stay in float32: %s.",
            len(overflowing),
            plan.dtype,
            ", ".join(overflowing),
        )
