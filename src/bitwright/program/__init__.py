"""A model seen as ops, values, states and module paths; the same for eager and graph mode."""

from __future__ import annotations

from .eager import trace_eager
from .model import Argument, ModuleCall, Op, Program, StateTensor, StateView, Value, ValueKind
from .protect import preserved_state

__all__ = [
    "Argument",
    "ModuleCall",
    "Op",
    "Program",
    "StateTensor",
    "StateView",
    "Value",
    "ValueKind",
    "preserved_state",
    "trace_eager",
]
