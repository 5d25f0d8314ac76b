"""Numbers that change from call to call without a part of the model's inputs, such as a count of its calls.

No range that was measured holds for the next call: a count that is simulated stops where its range ends, and so does
what is computed of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from bitwright.program import Op, Program, Value
from bitwright.program.aten_names import is_in_place
from bitwright.program.kept_tensors import only_gives_a_pattern

from .mutation import Aliases, writes_to

__all__ = ["state_updates"]

_Kept = tuple[tuple[str, ...], Value]
"""Names of states, and what a forward writes to them or puts in their places."""


def state_updates(program: Program) -> set[int]:
    """Return by ``id`` the values that change by themselves, and copies of states in front of a write.

    The first ones are computed of buffers and constants alone, some of which the forward changes by such values. The
    others stand in a graph for states as they were before: whoever reads them reads the state.
    """
    written, kept = _written_in_graph(program) if program.mode == "graph" else _written_in_eager(program)
    if not written:
        return set()
    driven: set[str] = set()  # by inputs: averages and caches of activations
    while True:
        constant, changing = _of_buffers_alone(program, written, driven)
        more = {name for names, value in kept if not _is_constant(value, constant, driven) for name in names}
        if more <= driven:
            break
        driven |= more
    for op in program.ops if program.mode == "graph" else ():
        if op.type == "clone" and any(_name(argument.value) in written for argument in op.arguments):
            changing.update(map(id, op.outputs))
    return changing


def _of_buffers_alone(
    program: Program, written: AbstractSet[str], driven: AbstractSet[str]
) -> tuple[set[int], set[int]]:
    """Return the values computed of buffers and constants alone, and those of them that change."""
    constant: set[int] = set()
    changing: set[int] = set()
    for op in program.ops:
        read = [argument.value for argument in op.arguments if not only_gives_a_pattern(argument)]
        if not all(_is_constant(value, constant, driven) for value in read):
            continue
        constant.update(map(id, op.outputs))
        if any(id(value) in changing or _name(value) in written for value in read):
            changing.update(map(id, op.outputs))
    return constant, changing


def _is_constant(value: Value, constant: AbstractSet[int], driven: AbstractSet[str]) -> bool:
    state = value.state
    return id(value) in constant or (state is not None and not state.is_parameter and state.name not in driven)


def _name(value: Value) -> str | None:
    return None if value.state is None else value.state.name


def _written_in_graph(program: Program) -> tuple[set[str], list[_Kept]]:
    written, kept, aliases = set[str](), list[_Kept](), Aliases()
    for op in program.ops:
        names = tuple(name for value in aliases.written_by(op) if (name := _name(value)) is not None)
        written.update(names)
        if names:
            kept += [(names, argument.value) for argument in op.arguments if not writes_to(op, argument)]
        aliases.add(op)
    return written, kept


def _written_in_eager(program: Program) -> tuple[set[str], list[_Kept]]:
    kept: list[_Kept] = [((name,), value) for name, value in program.assigned.items()]
    kept += [(op.overwrites, value) for op in program.ops if op.overwrites for value in _given(op)]
    return {*program.assigned, *(name for op in program.ops for name in op.overwrites)}, kept


def _given(op: Op) -> Iterator[Value]:
    """What an op that works in place is given besides what it writes to."""
    for argument in op.arguments:
        if argument.name != "out" and not (argument.index == 0 and is_in_place(op.type)):
            yield argument.value
