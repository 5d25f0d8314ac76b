"""Tensors that are written to in place: a simulator in front of the write would divert it to a copy."""

from __future__ import annotations

import torch

from bitwright.program import Argument, Op, Program, Value

__all__ = ["Aliases", "mutated_roots", "writes_to"]


def mutated_roots(program: Program) -> dict[int, Value]:
    """Return the inputs and states that an op writes to, all values written to through a view, and views, by ``id``.

    A value that the program itself computes may be overwritten directly: everybody reads the simulator's output, and
    so does the op that writes. The same holds for a view that is the last one that anybody looks at, such as the sum of
    ``out += x`` in front of a ReLU that works in place.

    Returns:
        By the ``id`` of each value what it is a view of, itself if of none.
    """
    aliases, last_read = Aliases(), _last_reads(program)
    mutated: dict[int, Value] = {}
    for place, op in enumerate(program.ops):
        for argument in op.arguments:
            root = aliases.root(argument.value)
            if not writes_to(op, argument):
                continue
            others = {id(value) for value in aliases.of(root)} - {id(argument.value)}
            read_here = any(id(other.value) in others for other in op.arguments)
            seen_later = any(last_read.get(id(value), -1) > place for value in aliases.of(root))
            if root.producer is None or (argument.value is not root and (read_here or seen_later)):
                mutated[id(root)] = root
        aliases.add(op)
    views = {id(view): root for root in mutated.values() for view in aliases.views.get(id(root), ())}
    return mutated | views


def _last_reads(program: Program) -> dict[int, int]:
    """Return the place of the last op that reads a value, by its ``id``; the program's outputs are read behind all."""
    places = {id(a.value): place for place, op in enumerate(program.ops) for a in op.arguments}
    return places | {id(value): len(program.ops) for value in program.outputs}


class Aliases:
    """Which values share memory, learnt op by op.

    Attributes:
        views: by ``id`` of a value, the views of it.
    """

    def __init__(self) -> None:
        self.views: dict[int, list[Value]] = {}
        self._base: dict[int, Value] = {}

    def root(self, value: Value) -> Value:
        """Return the value that ``value`` is a view of, itself if of none."""
        return self._base.get(id(value), value)

    def of(self, root: Value) -> tuple[Value, ...]:
        """Return a value that is a view of none, and all views of it."""
        return (root, *self.views.get(id(root), ()))

    def add(self, op: Op) -> None:
        """Take note of the views that ``op`` makes."""
        viewed = _viewed(op)
        if viewed is None:
            return
        root = self.root(viewed)
        for output in op.outputs:
            self._base[id(output)] = root
            self.views.setdefault(id(root), []).append(output)

    def written_by(self, op: Op) -> list[Value]:
        """Return the values whose numbers ``op`` changes in place, with all views of them."""
        roots = [self.root(argument.value) for argument in op.arguments if writes_to(op, argument)]
        return [value for root in roots for value in self.of(root)]


def writes_to(op: Op, argument: Argument) -> bool:
    """Return whether ``op`` writes to the tensor that it is given as ``argument``."""
    schema = _schema_argument(op, argument.index)
    return schema is not None and schema.alias_info is not None and schema.alias_info.is_write


def _viewed(op: Op) -> Value | None:
    """Return the value that the outputs of ``op`` share memory with."""
    for argument in op.arguments:
        schema = _schema_argument(op, argument.index)
        if schema is not None and schema.alias_info is not None:
            return argument.value
    return None


def _schema_argument(op: Op, index: int) -> torch.Argument | None:
    if not isinstance(op.target, torch._ops.OpOverload):
        return None
    arguments = op.target._schema.arguments
    return arguments[index] if index < len(arguments) else None
