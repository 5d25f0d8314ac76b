"""From a program to the inspector's tree of modules and ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from bitwright._utils.python_utils import fqn
from bitwright.planning.graph_ops import is_float
from bitwright.program import Argument, ModuleCall, Op, Program, Value, ValueKind

from ._frames import frames_of_node
from .types import BoundaryEdge, InputEdge, ModuleContext, ModuleInfo, OpInfo, SourceFrame

__all__ = ["build_tree"]


def build_tree(
    program: Program, op_types: Mapping[int, str] | None, frames: Mapping[int, tuple[SourceFrame, ...]]
) -> ModuleInfo:
    """Return the root of the tree.

    Args:
        program: the program.
        op_types: type to print for each op, by ``id``; ops that are missing do not appear in the tree, only as sources
            and readers of others. None: all ops appear.
        frames: source lines by ``id`` of the op; read from the graph where missing.
    """
    return _TreeBuilder(program, op_types, frames).root()


def argument_key(argument: Argument) -> int:
    """The key of an argument in ``op_input_spec``."""
    return argument.index if argument.item is None else argument.item


class _TreeBuilder:
    def __init__(
        self,
        program: Program,
        op_types: Mapping[int, str] | None,
        frames: Mapping[int, tuple[SourceFrame, ...]],
    ) -> None:
        self.program = program
        self.op_types = op_types
        self.frames = frames
        self.first, self.again = _repeated_values(program)
        self.sources: dict[int, OpInfo] = {}
        self.stacks = {id(op): _stack(op, program) for op in program.ops}
        self.infos = {id(op): self._op_info(op, order) for order, op in enumerate(program.ops)}
        self.untracked = 0
        self._connect()

    def root(self) -> ModuleInfo:
        modules: dict[tuple[str, ...], ModuleInfo] = {(): self._module(ModuleContext("", self._root_type()))}
        for op in self.program.ops:
            info = self.infos[id(op)]
            path: tuple[str, ...] = ()
            parent = modules[()]
            for context in info.module_stack[1:]:
                path = (*path, context.module_name)
                if path not in modules:
                    modules[path] = parent.child_modules[context.module_name] = self._module(context)
                parent = modules[path]
            if self.op_types is None or id(op) in self.op_types:
                parent.ops.append(info)
        return modules[()]

    def _root_type(self) -> str:
        for stack in self.stacks.values():
            return stack[0].module_type
        return fqn(self.program.modules[""])

    def _op_info(self, op: Op, order: int) -> OpInfo:
        kind = op.type if self.op_types is None else self.op_types.get(id(op), op.type)
        frames = self.frames.get(id(op), ())
        if isinstance(op.handle, fx.Node):
            frames = frames_of_node(op.handle)
        return OpInfo(op.name, kind, self.stacks[id(op)], frames, (), {}, False, order)

    def _connect(self) -> None:
        readers: dict[int, dict[int, dict[str, OpInfo]]] = {}
        for op in self.program.ops:
            info = self.infos[id(op)]
            edges = []
            for argument in op.arguments:
                edge = self._edge(argument.value, argument_key(argument))
                edges.append(edge)
                readers.setdefault(id(edge.op), {}).setdefault(edge.output_idx or 0, {})[info.op_name] = info
            info.inputs = tuple(edges)
        for number, value in enumerate(self.program.outputs):
            edge = self._edge(value, 0)
            name = "output" if self.program.mode == "graph" else f"output_{number}"
            sink = OpInfo(name, None, (), (), (InputEdge(edge.op, edge.output_idx, 0),), {}, False)
            readers.setdefault(id(edge.op), {}).setdefault(edge.output_idx or 0, {}).setdefault(name, sink)
        for info in (*self.infos.values(), *self.sources.values()):
            slots = readers.get(id(info), {})
            info.outputs = {slot: tuple(found.values()) for slot, found in sorted(slots.items())}

    def _edge(self, value: Value, index: int) -> InputEdge:
        value = self.first.get(id(value), value)
        if value.producer is not None and id(value.producer) in self.infos:
            return InputEdge(self.infos[id(value.producer)], value.output_index, index)
        return InputEdge(self._source(value), 0 if self.program.mode == "graph" else None, index)

    def _source(self, value: Value) -> OpInfo:
        if id(value) not in self.sources:
            is_state = value.kind == ValueKind.STATE
            self.sources[id(value)] = OpInfo(self._source_name(value), None, (), (), (), {}, is_state)
        return self.sources[id(value)]

    def _source_name(self, value: Value) -> str:
        if value.state is not None:
            return value.state.name
        if self.program.mode == "graph":
            return value.name
        for number, known in enumerate(self.program.inputs):
            if known is value:
                return f"input_{number}"
        self.untracked += 1
        return f"untracked_{self.untracked - 1}"

    def _module(self, context: ModuleContext) -> ModuleInfo:
        path = context.module_name
        call = self.program.calls.get(path)
        if call is None or not (call.inputs or call.outputs):
            calls = [self._boundary_of_ops(path)]
        else:
            calls = [call, *(call.repeats if self.program.mode == "graph" else ())]
        module = ModuleInfo(path, context.module_type, {}, [], {}, {})
        for boundary in calls:
            self._add_boundary(module, boundary)
        return module

    def _add_boundary(self, module: ModuleInfo, call: ModuleCall) -> None:
        for number, value in enumerate(call.inputs):
            if value is None or not is_float(value) or value.state is not None:
                continue
            value = self.first.get(id(value), value)
            uses = [use for known in self._same(value) for use in known.uses]
            inside = sorted(
                (use for use in uses if self._is_inside(use.op, module.module_name)),
                key=lambda use: self.infos[id(use.op)].order,
            )
            edges = [BoundaryEdge(self.infos[id(use.op)], argument_key(use)) for use in inside]
            known_edges = module.input_ops.get(number, [])
            edges = known_edges + [edge for edge in edges if edge not in known_edges]
            if edges:
                module.input_ops[number] = edges
        for number, value in enumerate(call.outputs):
            if value is None or not is_float(value):
                continue
            value = self.first.get(id(value), value)
            if value.producer is not None and self._is_inside(value.producer, module.module_name):
                edge = BoundaryEdge(self.infos[id(value.producer)], value.output_index)
                module.output_ops.setdefault(number, edge)

    def _same(self, value: Value) -> list[Value]:
        return [value, *self.again.get(id(value), ())]

    def _is_inside(self, op: Op, path: str) -> bool:
        return any(context.module_name == path for context in self.stacks[id(op)])

    def _boundary_of_ops(self, path: str) -> ModuleCall:
        """The boundary as the flow of data shows it, for modules whose calls are not known."""
        inside = [op for op in self.program.ops if self._is_inside(op, path)]
        members = {id(op) for op in inside}
        results = {id(value) for value in self.program.outputs}
        entering: dict[int, Value] = {}
        leaving: dict[int, Value] = {}
        for op in inside:
            for argument in op.arguments:
                value = argument.value
                if value.state is None and (value.producer is None or id(value.producer) not in members):
                    entering.setdefault(id(value), value)
            for value in op.outputs:
                if id(value) in results or any(id(use.op) not in members for use in value.uses):
                    leaving.setdefault(id(value), value)
        return ModuleCall(path, inputs=list(entering.values()), outputs=list(leaving.values()))


def _repeated_values(program: Program) -> tuple[dict[int, Value], dict[int, list[Value]]]:
    """Outputs of repeated calls, whose ops eager mode does not record, to those of the first call, and back."""
    first_of: dict[int, Value] = {}
    again: dict[int, list[Value]] = {}
    for call in program.calls.values() if program.mode == "eager" else ():
        for repeat in call.repeats:
            for own, first in zip(repeat.outputs, call.outputs, strict=False):
                if own is not None and first is not None and own.producer is None and own.state is None:
                    first_of[id(own)] = first
                    again.setdefault(id(first), []).append(own)
    return first_of, again


def _stack(op: Op, program: Program) -> tuple[ModuleContext, ...]:
    if isinstance(op.handle, fx.Node) and op.handle.meta.get("nn_module_stack"):
        return _graph_contexts(op.handle.meta["nn_module_stack"].values(), program)
    paths: Iterable[str] = op.module_stack
    return tuple(ModuleContext(path, fqn(program.modules[path])) for path in paths)


def _graph_contexts(entries: Iterable[Any], program: Program) -> tuple[ModuleContext, ...]:
    """The stack that ``torch.export`` kept: it also knows modules without parameters of exported models."""
    contexts: dict[str, ModuleContext] = {}
    for name, kind in entries:
        path = str(name).partition("@")[0]
        contexts.setdefault(path, ModuleContext(path, kind if isinstance(kind, str) else fqn(kind)))
    root = contexts.pop("", None) or ModuleContext("", fqn(program.modules[""]))
    return (root, *contexts.values())
