"""Tensors that are written to in place: a simulator in front of the write would divert it to a copy."""

from __future__ import annotations

import torch

from bitwright.program import Argument, Op, Program, Value

__all__ = ["Aliases", "mutated_roots"]


def mutated_roots(program: Program) -> set[int]:
    """Return the ids of inputs and states that an op writes to, of all values written to through a view, and of views.

    A value that the program itself computes may be overwritten directly: everybody reads the simulator's output, and
    so does the op that writes.
    """
    aliases = Aliases()
    mutated: set[int] = set()
    for op in program.ops:
        for argument in op.arguments:
            root = aliases.root(argument.value)
            through_view = argument.value is not root
            if (root.producer is None or through_view) and _writes(op, argument):
                mutated.add(id(root))
        aliases.add(op)
    return mutated | {id(view) for root in mutated for view in aliases.views.get(root, ())}


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
        roots = [self.root(argument.value) for argument in op.arguments if _writes(op, argument)]
        return [value for root in roots for value in (root, *self.views.get(id(root), ()))]


def _writes(op: Op, argument: Argument) -> bool:
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
