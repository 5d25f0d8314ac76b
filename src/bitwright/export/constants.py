"""What a program computes of its own states alone, such as position embeddings that it resizes: computed beforehand."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils._python_dispatch import TorchDispatchMode

from .signatures import written_tensors

__all__ = [
    "add_constant",
    "compute_beforehand",
    "fixed_states",
    "primitives",
    "remove_constant",
    "remove_unread_sparse_states",
    "repeats",
]

_COMPUTING = ("aten", "prims", "coreai", "quantized_decomposed")
"""Namespaces of operators that return in PyTorch what they return in a file; those of stand-ins do not."""
_VARYING = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Of operators that return something else each time, or what no graph of fixed shapes holds."""


def compute_beforehand(
    program: ExportedProgram,
    lacks: Callable[[fx.Node], bool],
    meaning: Callable[[fx.Node], Callable[..., Any] | None] = lambda _: None,
) -> bool:
    """Replace calls that read none of a program's inputs by what they return, in place; tell whether there are any.

    Args:
        program: in which what is written to counts as an input.
        lacks: whether the converter lacks the operator of a call; others stay as they are, since what they return may
            be larger than what they read.
        meaning: returns what computes, from its arguments, what a stand-in's call stands for; None for other calls.
    """
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        node.target = torch.ops.aten.detach.default  # as of torch.tensor(0.5); it writes no numbers
    fixed = _fixed(program, meaning)
    calls = [node for node in fixed if node.op == "call_function" and lacks(node)]
    pieces = [piece for node in calls for piece in ([node] if _is_tensor(node) else node.users)]
    values: dict[fx.Node, Any] = {}
    place = next(iter(program.graph.nodes))
    for piece in reversed(pieces):
        if piece.users:  # else it was read by others of them
            constant = add_constant(program, place, piece.name, _value(piece, fixed, values, meaning))
            piece.replace_all_uses_with(constant)
            program.graph.eliminate_dead_code()
    if values:
        program.graph_module.recompile()
    return bool(values)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def fixed_states(program: ExportedProgram) -> dict[fx.Node, torch.Tensor]:
    """Return the states of a program that nothing writes to, with their tensors."""
    signature, states = program.graph_signature, {**program.state_dict, **program.constants}
    mutable = {*signature.user_inputs, *(node.name for node in written_tensors(program.graph))}
    names = {spec.arg.name: spec.target for spec in signature.input_specs if spec.kind != InputKind.USER_INPUT}
    fixed: dict[fx.Node, torch.Tensor] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        name = names.get(node.name)
        if node.name not in mutable and name in states and name not in signature.buffers_to_mutate.values():
            fixed[node] = states[name]
    return fixed


def _fixed(program: ExportedProgram, meaning: Callable[[fx.Node], Any]) -> dict[fx.Node, torch.Tensor | None]:
    """Nodes that give the same tensors whenever the program is called, with the tensors of those that are states."""
    mutable = {node.name for node in written_tensors(program.graph)}
    fixed: dict[fx.Node, torch.Tensor | None] = {**fixed_states(program)}
    for node in program.graph.nodes:
        if (
            node.op == "call_function"
            and node.name not in mutable
            and all(source in fixed for source in node.all_input_nodes)
            and (repeats(node) or meaning(node) is not None)
        ):
            fixed[node] = None
    return fixed


def repeats(node: fx.Node) -> bool:
    """Return whether a call returns what it did before, and changes nothing."""
    if node.target is operator.getitem:
        return True
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in _COMPUTING:
        return False
    changing = op._schema.is_mutable or not op._schema.returns
    return not changing and not _VARYING & {*op.tags}


class _Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


def primitives(node: fx.Node) -> set[Any]:
    """Return the operators that PyTorch makes a call of one of its own of; the empty set for other calls."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return set()
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    with _Recorded() as recorded:
        target(*args, **kwargs)
    return {op for op in recorded.ops if op.namespace == "aten"}  # not questions about a tensor's device


def _value(
    node: fx.Node,
    fixed: dict[fx.Node, torch.Tensor | None],
    values: dict[fx.Node, Any],
    meaning: Callable[[fx.Node], Callable[..., Any] | None],
) -> Any:
    """What a fixed node gives."""
    if (state := fixed[node]) is not None:
        return state
    waiting = [node]
    while waiting:
        last = waiting[-1]
        sources = [source for source in last.all_input_nodes if fixed[source] is None and source not in values]
        if sources:
            waiting += sources
            continue
        waiting.pop()
        args, kwargs = fx.map_arg((last.args, last.kwargs), lambda source: values.get(source, fixed[source]))
        target: Any = meaning(last) or last.target
        with torch.no_grad():
            values[last] = target(*args, **kwargs)
    return values[node]


def add_constant(program: ExportedProgram, place: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    """Insert a buffer of a program in front of another node, with a name that begins with ``name``.

    Args:
        program: changed.
        place: a state of the program or its first node, so that the buffer comes before the inputs.
        name: what the buffer is named after.
        value: its numbers, which are not copied.
    """
    graph, specs = program.graph, program.graph_signature.input_specs
    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes]) or FakeTensorMode()
    taken = {*(node.name for node in graph.nodes), *program.state_dict, *program.constants}
    free = next(one for number in count(1) if (one := f"{name}_{number}") not in taken)
    with graph.inserting_before(place):
        node: fx.Node = graph.placeholder(free)
    node.target = node.name
    node.meta["val"] = mode.from_tensor(value, static_shapes=True)
    number = [one.name for one in graph.find_nodes(op="placeholder")].index(node.name)
    specs.insert(number, InputSpec(InputKind.BUFFER, TensorArgument(node.name), node.name, persistent=True))
    program.state_dict[node.name] = value
    return node


def remove_constant(program: ExportedProgram, node: fx.Node) -> None:
    """Remove a state of a program that nothing reads, in place."""
    specs = program.graph_signature.input_specs
    spec = next(one for one in specs if one.arg.name == node.name)
    specs.remove(spec)
    program.graph.erase_node(node)
    if spec.target is not None and all(one.target != spec.target for one in specs):
        program.state_dict.pop(spec.target, None)
        program.constants.pop(spec.target, None)


def remove_unread_sparse_states(program: ExportedProgram) -> None:
    """Remove sparse states that a program does not read, such as the alignment heads of Whisper, in place.

    Converters copy all states, and have no form for these.
    """
    given = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        is_sparse = isinstance(value, torch.Tensor) and value.layout is not torch.strided
        if is_sparse and not node.users and node.name not in given:
            remove_constant(program, node)
    program.graph_module.recompile()
