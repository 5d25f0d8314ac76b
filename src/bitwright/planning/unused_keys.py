"""Keys of input and output specs that name no tensor of the modules and ops that they were looked up for."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bitwright.config.matching import ModuleRules, OpRule
from bitwright.config.spec_dicts import ALL_TENSORS
from bitwright.program import ModuleCall, Op, Program
from bitwright.program.signatures import argument_names

from .plan import Problem
from .weight_views import state_read_by

__all__ = ["unused_key_problems"]

_NAMED = 4
# Results that may be None, and then are not recorded.
_MOST_RESULTS = {"multi_head_attention_forward": 2}


@dataclass(slots=True)
class _Names:
    """What the keys of one dictionary can name, over everything that it was looked up for.

    Attributes:
        specs: the dictionary.
        kind: ``"input"`` or ``"output"``.
        positions: what is known to exist, each with its name, which may be empty.
        names: further names.
        states: positions at which a parameter or buffer is read, with its name.
        any_position: whether there may be more positions than these.
        any_name: whether there may be more names than these.
    """

    specs: Mapping[Any, Any]
    kind: str
    positions: dict[int, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    states: dict[int, str] = field(default_factory=dict)
    any_position: bool = False
    any_name: bool = False

    def fits(self, key: str | int) -> bool:
        """Whether ``key`` may name something."""
        if isinstance(key, int):
            return key in self.positions or (self.any_position and key >= 0)
        # The third tensor of a list or dictionary called "states" is "states_2".
        return self.any_name or key in self.names or re.sub(r"_\d+$", "", key) in self.names

    def problem(self, where: str, key: str | int) -> Problem:
        """Return what to tell of a ``key`` that does not fit."""
        if isinstance(key, int) and key in self.states:
            there = f"{self.states[key]!r} is read there, and op_state_spec speaks about parameters and buffers"
        else:
            there = self._present(key)
        return Problem("unmatched-key", f"{where}[{key!r}]", f"matches nothing: {there}. Correct the key or remove it.")

    def _present(self, key: str | int) -> str:
        if not self.positions:
            return f"there is no {self.kind}"
        order = sorted(self.positions)
        if isinstance(key, str):
            near = difflib.get_close_matches(key, self.positions.values(), n=_NAMED)
            order.sort(key=lambda position: self.positions[position] not in near)
        shown = [f"{p} ({name!r})" if (name := self.positions[p]) else str(p) for p in order[:_NAMED]]
        return f"the {self.kind}s are known as {', '.join(shown)}" + (", ..." if len(order) > _NAMED else "")


def unused_key_problems(
    program: Program, rules: ModuleRules, ops: Iterable[tuple[OpRule, Op, Op]], *, states_told: bool = False
) -> list[Problem]:
    """Return a problem for each key of an input or output spec that nothing can use which the dictionary is meant for.

    A key is used by an input that is None or a number this time, or that another key speaks about. Dictionaries for
    modules that were not called are left out, unless modules of the same class were.

    Args:
        program: the program, with views linked.
        rules: which part of the configuration owns which module.
        ops: each op that is quantized: its rule, the op that reads the inputs, the op that makes the outputs.
        states_told: something else tells of positions at which ops read parameters and buffers.
    """
    found: dict[str, _Names] = {}
    for rule, first, last in ops:
        inputs = found.setdefault(f"{rule.describe()}.op_input_spec", _Names(rule.op_input_spec, "input"))
        _add_op_inputs(inputs, first)
        outputs = found.setdefault(f"{rule.describe()}.op_output_spec", _Names(rule.op_output_spec, "output"))
        _add_op_outputs(outputs, last)
    found.update(_of_modules(program, rules))
    return [
        names.problem(where, key)
        for where, names in found.items()
        for key, spec in names.specs.items()
        if spec is not None and key != ALL_TENSORS and not (names.fits(key) or (states_told and key in names.states))
    ]


def _add_op_inputs(names: _Names, op: Op) -> None:
    positions, states = dict(enumerate(argument_names(op.target))), dict[int, str]()
    names.any_position |= len(positions) < 2  # the signature is not known
    given = set[int]()
    for argument in op.arguments:
        position = argument.index if argument.item is None else argument.item
        positions[position] = argument.label
        state = state_read_by(argument)
        if state is None:
            given.add(position)
        else:
            states[position] = state.name
    names.states |= states
    names.positions |= {p: name for p, name in positions.items() if p in given or p not in states}


def _add_op_outputs(names: _Names, op: Op) -> None:
    count = max((value.output_index + 1 for value in op.outputs), default=0)
    if isinstance(op.target, torch._ops.OpOverload):
        returns = op.target._schema.returns
        names.any_position |= any(isinstance(result.type, torch.ListType) for result in returns)
        count = max(count, len(returns))
    elif not callable(op.target):
        names.any_position = True
    names.positions |= dict.fromkeys(range(max(count, _MOST_RESULTS.get(op.type, 0))), "")


def _of_modules(program: Program, rules: ModuleRules) -> Iterator[tuple[str, _Names]]:
    found: dict[str, _Names] = {}
    classes: dict[str, tuple[set[type], set[type]]] = {}  # of the modules that were called, and of the others
    for path, rule in rules.items():
        cls, call = program.modules[path], program.calls.get(path)
        known = call is not None and bool(call.inputs or call.outputs)
        for kind, specs, add in _SIDES:
            where = f"{rule.describe()}.module_{kind}_spec"
            if not (chosen := specs(rule)):
                continue
            names = found.setdefault(where, _Names(chosen, kind))
            classes.setdefault(where, (set(), set()))[not known].add(cls)
            if call is not None and known:
                add(names, cls, call)
    for where, names in found.items():
        called, others = classes[where]
        if others <= called:
            yield where, names


def _add_module_inputs(names: _Names, cls: type[nn.Module], call: ModuleCall) -> None:
    for once in (call, *call.repeats):
        names.positions |= dict(enumerate(once.input_names))
        names.names.update(once.input_names)
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        names.any_name = names.any_position = True
        return
    plain = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names.any_name |= any(p.kind is p.VAR_KEYWORD for p in parameters)
    # An argument that is missing or None this time may be a tuple of many tensors another time.
    given = {re.sub(r"_\d+$", "", name) for name in names.names} | names.names
    open_ended = len(plain) < len(parameters) or None in call.inputs or not given.issuperset(plain)
    names.any_position |= open_ended
    names.names.update(plain)


def _add_module_outputs(names: _Names, cls: type[nn.Module], call: ModuleCall) -> None:
    for once in (call, *call.repeats):
        names.positions |= dict.fromkeys(range(len(once.outputs)), "")
        names.any_position |= None in once.outputs


_SIDES: tuple[tuple[str, Callable[[Any], Any], Callable[[_Names, type[nn.Module], ModuleCall], None]], ...] = (
    ("input", lambda rule: rule.module_input_spec, _add_module_inputs),
    ("output", lambda rule: rule.module_output_spec, _add_module_outputs),
)
