"""The program of an exported graph: ops, values, states and the boundaries of modules."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import is_batchedtensor
from torch.utils._pytree import TreeSpec, tree_leaves

from .aten_names import aten_name, op_spellings, schema_names
from .inlined_scopes import graph_called
from .model import Argument, ModuleCall, Op, Program, StateTensor, Value, ValueKind, collect_states

__all__ = ["build_program"]

# aten orders the arguments of these unlike the functions that people call.
_FUNCTION_ORDER = {"aten::embedding": ((1, "weight"), (0, "input"))}


def build_program(module: fx.GraphModule, model: nn.Module, module_calls: Sequence[Any] = ()) -> Program:
    """Return the program of ``module``, whose states are those of ``model``.

    Args:
        module: the graph; nodes carry ``meta["val"]`` as ``torch.export`` leaves them.
        model: the model that the graph was captured from.
        module_calls: ``ExportedProgram.module_call_graph``; entries with a signature become module calls.
    """
    builder = _Builder(module, model)
    for node in module.graph.nodes:
        builder.add(node)
    builder.add_calls(module_calls)
    return builder.program()


class _Builder:
    def __init__(self, module: fx.GraphModule, model: nn.Module) -> None:
        self.module = module
        self.model = model
        self.states = collect_states(model)
        self.state_of = {name: state for state in self.states.values() for name in state.names}
        self.canonical = _canonical_paths(model)
        self.values: dict[fx.Node, Value] = {}
        self.state_values: dict[int, Value] = {}
        self.ops: list[Op] = []
        self.op_of: dict[fx.Node, Op] = {}
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.calls: dict[str, ModuleCall] = {"": ModuleCall("")}
        self.enclosed: list[tuple[str, Op]] = []

    def add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._add_input(node)
        elif node.op == "get_attr":
            self._add_state(node)
        elif node.op == "output":
            self.outputs = [self.values[n] for n in node.all_input_nodes if n in self.values]
        elif node.target is operator.getitem and node.args[0] not in self.values:
            self._add_item(node)
        else:
            self._add_op(node)

    def _add_input(self, node: fx.Node) -> None:
        if isinstance(node.meta.get("val"), torch.Tensor):
            value = _value(node, ValueKind.INPUT)
            self.values[node] = value
            self.inputs.append(value)

    def _add_state(self, node: fx.Node) -> None:
        name = str(node.target)
        state = self.state_of.get(name)
        if state is None:
            tensor = _attribute(self.module, name)
            if not isinstance(tensor, torch.Tensor):  # the body of a control-flow op
                return
            path, _, attribute = name.rpartition(".")
            state = StateTensor((name,), ((path, attribute),), tensor, False)
            self.states[name] = self.state_of[name] = state
        value = self.state_values.get(id(state))
        if value is None:
            value = Value(node.name, ValueKind.STATE, tuple(state.tensor.shape), state.tensor.dtype, state=state)
            self.state_values[id(state)] = value
        self.values[node] = value

    def _add_item(self, node: fx.Node) -> None:
        """Add what is taken from an op's tuple of results as a further output of that op."""
        producer = self.op_of.get(node.args[0])  # type: ignore[arg-type]
        if producer is None or not isinstance(node.meta.get("val"), torch.Tensor):
            return
        value = _value(node, ValueKind.INTERMEDIATE)
        value.producer, value.output_index = producer, int(node.args[1])  # type: ignore[arg-type]
        producer.outputs.append(value)
        self.values[node] = value

    def _add_op(self, node: fx.Node) -> None:
        result = node.meta.get("val")
        if _is_inside_vmap(result):
            self._add_enclosed(node, "torch.vmap", self.values)
        if not _has_tensor(result) or _is_inside_vmap(result):
            return
        self._add_called(node, self.values)
        op = self._op(node)
        for index, name, entry in _arguments(node):
            self._add_argument(op, index, name, entry)
        if isinstance(result, torch.Tensor):
            value = _value(node, ValueKind.INTERMEDIATE)
            value.producer = op
            op.outputs.append(value)
            self.values[node] = value
        self.ops.append(op)
        self.op_of[node] = op
        self.calls.setdefault(op.module_path, ModuleCall(op.module_path)).ops.append(op)

    def _op(self, node: fx.Node) -> Op:
        kind, *aliases = op_spellings(node)
        return Op(node.name, kind, node.target, self._stack(node), node.name, aliases=tuple(aliases), handle=node)  # type: ignore[arg-type]

    def _add_called(self, call: fx.Node, values: Mapping[fx.Node, Value]) -> None:
        """Note which states the ops of a sub-graph read that an op calls, ``values`` being those around it."""
        if not isinstance(call.target, torch._ops.HigherOrderOperator):
            return
        given = tree_leaves(call.args)
        for body in filter(None, (graph_called(argument, self.module) for argument in given)):
            inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
            pairs = zip(reversed(inputs), reversed(given), strict=False)
            inside = {node: values[leaf] for node, leaf in pairs if isinstance(leaf, fx.Node) and leaf in values}
            for node in body.graph.nodes:
                self._add_enclosed(node, aten_name(call.target), inside)

    def _add_enclosed(self, node: fx.Node, place: str, values: Mapping[fx.Node, Value]) -> None:
        """Note the states that an op reads which is inside something that no simulator reaches."""
        if node.op != "call_function":
            return
        self._add_called(node, values)
        op = self._op(node)
        for index, name, entry in _arguments(node):
            value = values.get(entry) if isinstance(entry, fx.Node) else None
            if value is not None and value.state is not None:
                op.arguments.append(Argument(op, index, name, value))
        if op.arguments:
            owner = self.canonical.get(op.arguments[0].value.state.owners[0][0], "")  # type: ignore[union-attr]
            if op.module_path == "" and owner:  # nodes of torch.cond do not know their modules
                op.module_stack = ("", owner)
            self.enclosed.append((place, op))

    def _add_argument(self, op: Op, index: int, name: str, entry: Any) -> None:
        if isinstance(entry, fx.Node):
            self._link(op, index, name, entry, None)
        elif isinstance(entry, (list, tuple)):
            for item, element in enumerate(entry):
                if isinstance(element, fx.Node):
                    self._link(op, index, name, element, item)
        elif isinstance(entry, bool | int | float | str):
            op.literals[name] = entry
        if isinstance(entry, (list, tuple)) and all(isinstance(element, int) for element in entry):
            op.literals[name] = tuple(entry)

    def _link(self, op: Op, index: int, name: str, node: fx.Node, item: int | None) -> None:
        value = self.values.get(node)
        if value is None:
            return
        argument = Argument(op, index, name, value, item)
        op.arguments.append(argument)
        value.uses.append(argument)
        if value.state is not None:
            value.state.uses.append(argument)

    def _stack(self, node: fx.Node) -> tuple[str, ...]:
        """Return the paths of the modules that a node ran in, as far as the model has modules of these names."""
        entries: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        paths = [self.canonical.get(entry[0].partition("@")[0]) for entry in entries.values()]
        known = dict.fromkeys(path for path in paths if path)
        return ("", *known)

    def add_calls(self, module_calls: Iterable[Any]) -> None:
        by_name = {node.meta.get("exported_name", node.name): value for node, value in self.values.items()}
        for entry in module_calls:
            if entry.signature is None:
                continue
            path, _, repeat = entry.fqn.partition("@")
            canonical = self.canonical.get(path)
            if canonical is None or not canonical:
                continue
            call = ModuleCall(canonical)
            call.input_names, order = _input_names(type(self.model.get_submodule(path)), entry.signature.in_spec)
            given = [by_name.get(argument.name) for argument in entry.signature.inputs]
            if len(given) < len(order):  # called in a sub-graph, where torch.export does not see boundaries
                continue
            call.inputs = [given[i] for i in order]
            call.outputs = [by_name.get(argument.name) for argument in entry.signature.outputs]
            if repeat:
                self.calls[canonical].repeats.append(call)
            else:
                call.ops = self.calls[canonical].ops if canonical in self.calls else []
                self.calls[canonical] = call

    def program(self) -> Program:
        root = self.calls[""]
        root.inputs = list(self.inputs)
        root.input_names = [value.name for value in self.inputs]
        root.outputs = list(self.outputs)
        return Program(
            mode="graph",
            ops=self.ops,
            states=self.states,
            calls=self.calls,
            inputs=self.inputs,
            outputs=self.outputs,
            modules={path: type(module) for path, module in self.model.named_modules()},
            enclosed=tuple(self.enclosed),
        )


def _value(node: fx.Node, kind: ValueKind) -> Value:
    tensor = node.meta["val"]
    return Value(node.name, kind, tuple(_hint(size) for size in tensor.shape), tensor.dtype)


def _hint(size: Any) -> int:
    """Return a size as it was while tracing; 2 for one that only the data decides."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return 2 if hint is None else int(hint)


def _has_tensor(result: Any) -> bool:
    if isinstance(result, (list, tuple)):
        return any(map(_has_tensor, result))
    return isinstance(result, torch.Tensor)


def _is_inside_vmap(result: Any) -> bool:
    """Whether a result stands for one of a batch, which no simulator can look at by itself."""
    return any(isinstance(leaf, torch.Tensor) and is_batchedtensor(leaf) for leaf in tree_leaves(result))


def _attribute(module: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    try:
        return getattr(module.get_submodule(path), attribute, None)
    except AttributeError:
        return None


def _arguments(node: fx.Node) -> list[tuple[int, str, Any]]:
    """Return ``(position, name, entry)`` of every argument, numbered as the function that people call does."""
    names = schema_names(node.target)
    order: Sequence[tuple[int, str]] = ()
    if isinstance(node.target, torch._ops.OpOverload):
        order = _FUNCTION_ORDER.get(node.target._schema.name, ())
    found = []
    for position, entry in enumerate(node.args):
        if position < len(order):
            found.append((*order[position], entry))
        else:
            found.append((position, names[position] if position < len(names) else str(position), entry))
    for offset, (name, entry) in enumerate(node.kwargs.items()):
        found.append((names.index(name) if name in names else len(node.args) + offset, name, entry))
    return found


def _canonical_paths(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {path: first.setdefault(id(m), path) for path, m in model.named_modules(remove_duplicate=False)}


def _input_names(cls: type[nn.Module], in_spec: TreeSpec) -> tuple[list[str], list[int]]:
    """Return the name of each flattened input in the order of forward's signature, and where each was before."""
    positional, keywords = in_spec.children()
    try:
        parameters = [p.name for p in list(inspect.signature(cls.forward).parameters.values())[1:]]
    except (TypeError, ValueError):
        parameters = []
    labels = [(i, parameters[i] if i < len(parameters) else f"arg_{i}") for i in range(positional.num_children)]
    keys = list(keywords.context or ())
    labels += [(parameters.index(key) if key in parameters else len(parameters) + n, key) for n, key in enumerate(keys)]
    entries: list[tuple[int, str, int]] = []
    position = 0
    for (rank, name), child in zip(labels, (*positional.children(), *keywords.children()), strict=True):
        for leaf in range(child.num_leaves):
            entries.append((rank, name if child.num_leaves == 1 else f"{name}_{leaf}", position))
            position += 1
    entries.sort(key=lambda entry: entry[0])
    return [name for _, name, _ in entries], [old for _, _, old in entries]
