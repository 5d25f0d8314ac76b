"""Tensors that are written to in place: a simulator in front of the write would divert it to a copy."""

from __future__ import annotations

import torch

from bitwright.program import Argument, Op, Program, Value

__all__ = ["Aliases", "mutated_roots", "writes_to"]


def mutated_roots(program: Program) -> dict[int, Value]:
    """Return the inputs and states that an op writes to, all values written to through a view, and views, by ``id``.

    A value that the program itself computes may be overwritten directly: everybody reads the simulator's output, and
    so does the op that writes.

    Returns:
        By the ``id`` of each value what it is a view of, itself if of none.
    """
    aliases = Aliases()
    mutated: dict[int, Value] = {}
    for op in program.ops:
        for argument in op.arguments:
            root = aliases.root(argument.value)
            through_view = argument.value is not root
            if (root.producer is None or through_view) and writes_to(op, argument):
                mutated[id(root)] = root
        aliases.add(op)
    views = {id(view): root for root in mutated.values() for view in aliases.views.get(id(root), ())}
    return mutated | views


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
        roots = [self.root(argument.value) for argument in op.arguments if writes_to(op, argument)]
        return [value for root in roots for value in (root, *self.views.get(id(root), ()))]


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
