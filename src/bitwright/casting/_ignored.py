"""The ``ignored_ops`` argument: checked once, then asked for every node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

Op: TypeAlias = OpOverload[..., Any] | OpOverloadPacket[..., Any] | HigherOrderOperator
IgnoredOps: TypeAlias = Op | Iterable[Op] | Callable[[torch.fx.Node], bool] | None

_ACCEPTED = (
    "ignored_ops accepts an operator such as torch.ops.aten.exp.default, an operator packet such as "
    "torch.ops.aten.exp (all its overloads), a collection of these, or a function that takes a torch.fx.Node and "
    "returns a bool"
)


def ignore_rule(ignored_ops: IgnoredOps) -> Callable[[torch.fx.Node], bool]:
    """Return a function that tells for a node whether it stays in float32 by the user's wish.

    Raises:
        TypeError: ``ignored_ops`` is none of the accepted forms, or holds something that is no operator, for
            example a string.
    """
    if ignored_ops is None:
        return lambda node: False
    if _is_op(ignored_ops):
        return lambda node: _matches(node, ignored_ops)
    if isinstance(ignored_ops, str):
        raise TypeError(f"{_ACCEPTED}; got the string {ignored_ops!r}. {_hint(ignored_ops)}")
    if callable(ignored_ops):
        if inspect.isbuiltin(ignored_ops) or isinstance(ignored_ops, type):
            raise TypeError(f"{_ACCEPTED}; got {ignored_ops!r}, which is no function of a node. {_hint(ignored_ops)}")
        predicate = ignored_ops
        return lambda node: bool(predicate(node))
    if not isinstance(ignored_ops, Iterable):
        raise TypeError(f"{_ACCEPTED}; got {type(ignored_ops).__name__}: {ignored_ops!r}.")
    ops = tuple(ignored_ops)
    wrong = [entry for entry in ops if not _is_op(entry)]
    if wrong:
        listed = ", ".join(repr(entry) for entry in wrong)
        raise TypeError(f"{_ACCEPTED}; the collection holds {listed}. {_hint(wrong[0])}")
    return lambda node: any(_matches(node, op) for op in ops)


def _is_op(entry: object) -> bool:
    return isinstance(entry, OpOverload | OpOverloadPacket | HigherOrderOperator)


def _matches(node: torch.fx.Node, op: object) -> bool:
    if isinstance(op, OpOverloadPacket):
        return isinstance(node.target, OpOverload) and node.target.overloadpacket == op
    return bool(node.target == op)


def _hint(entry: object) -> str:
    name = entry if isinstance(entry, str) else str(getattr(entry, "__name__", ""))
    base = name.replace("::", ".").removeprefix("torch.ops.").removeprefix("aten.").split(".")[0]
    if base and hasattr(torch.ops.aten, base):
        return f"Did you mean torch.ops.aten.{base}?"
    return 'To choose by name, pass a function: lambda node: node.name == "...".'
