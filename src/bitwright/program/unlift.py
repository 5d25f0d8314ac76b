"""From an ``ExportedProgram``, whose states are inputs, to a graph module that owns them.

``ExportedProgram.module()`` does this too. It compares every state with every module name, which for 800 layers takes
as long as a tenth of the export, and its result can neither switch modes nor be pickled.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from bitwright.errors import TraceError

from .assigned_buffers import read_before_writing
from .float_graph import FloatGraph, Recapture
from .graph_module import RESERVED_NAMES, TracedGraphModule, as_traced
from .inlined_scopes import inline_scopes
from .input_check import Dimension, InputCheck, InputShape, Origin
from .keyword_names import keywords_read
from .size_conditions import ASSUMED, conditions_on_sizes

__all__ = ["reserved_state", "unlift"]

_STATES = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
# Ops that only assert, while a model is traced, that a tensor has the dtype that it has.
_UNLIMITED = 2**62
_TRACE_ASSERTS = ("aten::_assert_tensor_metadata",)
_TRANSFORMS = "torch._functorch.predispatch"


def unlift(exported: ExportedProgram, model: nn.Module, recapture: Recapture | None = None) -> TracedGraphModule:
    """Return a graph module with the ops of ``exported`` and the parameters and buffers of ``model`` themselves.

    States keep all names that they have in ``model``, used or not, so that its state_dict fits.

    Args:
        exported: the program.
        model: that was exported.
        recapture: how it was, for batches of other sizes than those of the program; None if nobody can do it again.

    Raises:
        TraceError: the graph reads a state that has the name of something that graph modules need themselves.
    """
    plainly = _is_plain(exported)
    lost = reserved_state(exported, RESERVED_NAMES) if plainly else reserved_state(exported)
    if lost is not None:
        raise TraceError(
            f"The model's attribute {lost.partition('.')[0]!r} (it holds {lost!r}) cannot stay in a graph: torch.fx's "
            "graph modules have something of their own under that name. Rename the attribute, or set "
            'execution_mode="eager" in the QuantizerConfig, which needs no graph.'
        )
    if not plainly:
        with keywords_read():
            plain = exported.module(check_guards=False)
        graph, root = plain.graph, _Root(plain.training)
        root.take(plain)
    else:
        root = _Root(model.training)
        graph = _unlifted_graph(exported)
        for name, constant in exported.constants.items():
            if isinstance(constant, torch.Tensor):
                root.add_tensor(name, constant, persistent=False)
        _take_subgraphs(exported, root)
        graph.set_codegen(_codegen(exported))
    for name, tensor, persistent in _states(model):
        root.add_tensor(name, tensor, persistent)
    inline_scopes(graph, root.module)
    _drop_trace_asserts(graph)
    _drop_dead_code(graph)
    read_before_writing(graph)
    origin = Origin(model, FloatGraph(root.module, graph, model, recapture))
    return TracedGraphModule(root.module, graph, _input_check(exported, graph, origin))


def _is_plain(exported: ExportedProgram) -> bool:
    signature = exported.graph_signature
    inputs = all(spec.kind in (*_STATES, InputKind.USER_INPUT) for spec in signature.input_specs)
    return inputs and all(spec.kind is OutputKind.USER_OUTPUT for spec in signature.output_specs)


def reserved_state(exported: ExportedProgram, reserved: Collection[str] = (*RESERVED_NAMES, "code")) -> str | None:
    """Return a state that lies under an attribute whose name graph modules need themselves, or None.

    Args:
        exported: the program.
        reserved: those names; the default are torch's own graph modules'.
    """
    states = (str(spec.target) for spec in exported.graph_signature.input_specs if spec.kind in _STATES)
    return next((state for state in states if state.partition(".")[0] in reserved), None)


class _Root:
    """Module tree under construction; remembers its containers, so that adding a tensor takes constant time."""

    def __init__(self, training: bool) -> None:
        self.module = nn.Module()
        self.module.training = training
        self._containers: dict[str, nn.Module] = {"": self.module}

    def add_tensor(self, name: str, tensor: torch.Tensor, persistent: bool) -> None:
        path, _, attribute = name.rpartition(".")
        container = self._container(path)
        if isinstance(tensor, nn.Parameter):
            container._parameters[attribute] = tensor
        elif attribute not in container._parameters:
            container.register_buffer(attribute, tensor, persistent=persistent)

    def take(self, module: nn.Module) -> None:
        """Take over the children and tensors of a module."""
        for name, child in module.named_children():
            self.module.add_module(name, as_traced(child) if isinstance(child, fx.GraphModule) else child)
        self._containers.update({path: child for path, child in self.module.named_modules() if path})

    def _container(self, path: str) -> nn.Module:
        if path not in self._containers:
            parent, _, name = path.rpartition(".")
            container = nn.Module()
            container.training = self.module.training
            self._container(parent)._modules[name] = container
            self._containers[path] = container
        return self._containers[path]


def _states(model: nn.Module) -> list[tuple[str, torch.Tensor, bool]]:
    found: list[tuple[str, torch.Tensor, bool]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.append((prefix + name, parameter, True))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found.append((prefix + name, buffer, name not in module._non_persistent_buffers_set))
    return found


def _unlifted_graph(exported: ExportedProgram) -> fx.Graph:
    state_of = {spec.arg.name: spec.target for spec in exported.graph_signature.input_specs if spec.kind in _STATES}
    graph = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    for node in exported.graph.nodes:
        state = state_of.get(node.name) if node.op == "placeholder" else None
        if state is None:
            twins[node] = twin = graph.node_copy(node, twins.__getitem__)
            if twin.name != node.name:  # names of Python's builtins are not used again
                twin.meta["exported_name"] = node.name
        elif node.users:
            twins[node] = graph.get_attr(state)
            twins[node].meta = dict(node.meta)
    return graph


def _take_subgraphs(exported: ExportedProgram, root: _Root) -> None:
    for name, child in exported.graph_module.named_children():
        root.module.add_module(name, as_traced(child) if isinstance(child, fx.GraphModule) else child)


def _codegen(exported: ExportedProgram) -> _PyTreeCodeGen:
    in_spec, out_spec = exported.call_spec.in_spec, exported.call_spec.out_spec
    names = exported.module_call_graph[0].signature
    parameters = None if names is None else names.forward_arg_names
    if not parameters:
        positional, keywords = in_spec.children()
        parameters = [f"arg_{i}" for i in range(positional.num_children)] + list(keywords.context or ())
    return _PyTreeCodeGen(_PyTreeInfo(parameters, in_spec, out_spec))


def _drop_trace_asserts(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _TRACE_ASSERTS:
            graph.erase_node(node)


def _drop_dead_code(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output") and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node does something besides its result; entering and leaving ``torch.vmap`` and its like do, too."""
    return node.is_impure() or getattr(node.target, "__module__", None) == _TRANSFORMS


def _input_check(exported: ExportedProgram, graph: fx.Graph, origin: Origin) -> InputCheck | None:
    codegen = graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen):
        return None
    ranges = {str(symbol): limits for symbol, limits in exported.range_constraints.items()}
    constants = {
        spec.arg.name: (spec.arg.value,)
        for spec in exported.graph_signature.input_specs
        if isinstance(spec.arg, ConstantArgument)
    }
    names = {node: node.meta.get("exported_name", node.name) for node in graph.nodes if node.op == "placeholder"}
    shapes = tuple(
        InputShape(name, _dimensions(node.meta.get("val"), ranges), constants.get(name)) for node, name in names.items()
    )
    conditions = conditions_on_sizes(exported)
    return InputCheck(tuple(codegen.pytree_info.orig_args), shapes, origin, conditions)


def _dimensions(value: Any, ranges: dict[str, Any]) -> tuple[Dimension, ...] | None:
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(_dimension(size, ranges) for size in value.shape)


def _dimension(size: Any, ranges: dict[str, Any]) -> Dimension:
    if isinstance(size, int):
        return Dimension(size)
    symbol = str(size)
    if symbol.isdigit():  # declared dynamic, but the model fixes it
        return Dimension(int(symbol))
    if not symbol.isidentifier():  # an expression of other symbols; the graph computes with the size that comes
        return Dimension(None)
    limits = ranges.get(symbol)
    if limits is None:
        return Dimension(None, symbol)
    # torch.export never assumes sizes 0 and 1 for a dynamic dimension, but nearly all graphs hold for them too.
    lower = int(limits.lower) if limits.lower > ASSUMED else 0
    return Dimension(None, symbol, lower, int(limits.upper) if limits.upper < _UNLIMITED else None)
