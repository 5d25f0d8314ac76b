"""Tensors that are written to in place: a simulator in front of the write would divert it to a copy."""

from __future__ import annotations

import torch

from bitwright.program import Argument, Op, Program, Value

__all__ = ["mutated_roots"]


def mutated_roots(program: Program) -> set[int]:
    """Return the ids of inputs and states that an op writes to, of all values written to through a view, and of views.

    A value that the program itself computes may be overwritten directly: everybody reads the simulator's output, and
    so does the op that writes.
    """
    base: dict[int, Value] = {}
    views: dict[int, list[Value]] = {}
    mutated: set[int] = set()
    for op in program.ops:
        for argument in op.arguments:
            root = base.get(id(argument.value), argument.value)
            through_view = argument.value is not root
            if (root.producer is None or through_view) and _writes(op, argument):
                mutated.add(id(root))
        viewed = _viewed(op)
        if viewed is not None:
            root = base.get(id(viewed), viewed)
            for output in op.outputs:
                base[id(output)] = root
                views.setdefault(id(root), []).append(output)
    return mutated | {id(view) for root in mutated for view in views.get(root, ())}


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
