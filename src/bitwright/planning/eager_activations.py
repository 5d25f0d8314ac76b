"""Which activations of an eager program are simulated: each op's inputs and outputs on their own, no sharing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bitwright.config.matching import ModuleRules, OpRule, SpecMatch, lookup_spec
from bitwright.program import Argument, Op, Program, Value
from bitwright.program.aten_names import is_in_place

from .empty_activations import is_empty
from .exact_values import exact_values
from .known_ranges import sentinel_values
from .plan import Site
from .simulated_states import is_unpacked
from .state_updates import state_updates
from .weight_views import state_read_by

__all__ = ["ActivationRequest", "empty_activations", "request_activations"]

ActivationRequest = tuple[Site, Any, str, str]
"""A site, its spec, the rule that asked for it, and the module whose config decided."""


def request_activations(
    program: Program, rules: ModuleRules, op_rule_of: Callable[[Op], OpRule | None]
) -> Iterator[ActivationRequest]:
    """Yield every activation that the configuration asks to simulate, in order of execution.

    A tensor that crosses the boundary of a module with ``module_input_spec`` or ``module_output_spec`` takes that spec
    instead, the innermost such module first. Values that hold mask sentinels are left alone, and so are those of which
    every digit matters. Weights that were finalized before stay weights. What a model writes to its parameters and
    buffers is no activation, for a simulator would round them themselves; only what is written takes a boundary's spec.
    Nor is what goes on from call to call by itself.
    """
    exact = exact_values(program)
    excluded = sentinel_values(program) | exact.values | state_updates(program)
    for op in program.ops:
        writes = _writes_to_state(op)
        op_rule = None if writes else op_rule_of(op)
        for argument in op.arguments if id(op) not in exact.ops else ():
            value = argument.value
            left_alone = id(value) in excluded or _is_weight(argument) or _is_target(argument)
            if value.is_quantizable and not left_alone:
                yield from _request(_input(program, rules, op, op_rule, argument), Site(op, argument=argument))
        for value in op.outputs if not writes else ():
            if value.is_quantizable and id(value) not in excluded:
                site = Site(op, output_index=value.output_index)
                yield from _request(_output(program, rules, op, op_rule, value), site)


def empty_activations(program: Program, rules: ModuleRules, op_rule_of: Callable[[Op], OpRule | None]) -> list[str]:
    """Return the names of ops with outputs that the configuration asks to simulate and that have no elements."""
    return [
        op.name
        for op in program.ops
        for value in op.outputs
        if is_empty(value) and value.dtype.is_floating_point
        for _ in _request(_output(program, rules, op, op_rule_of(op), value), Site(op, output_index=value.output_index))
    ]


def _is_weight(argument: Argument) -> bool:
    """Whether the op reads a state, or what an earlier ``finalize`` left of one."""
    return state_read_by(argument) is not None or is_unpacked(argument.value)


def _writes_to_state(op: Op) -> bool:
    """Whether an op changes a parameter or buffer in place, or what the simulators on a parameter return."""
    written = state_read_by(op.arguments[0]) if is_in_place(op.type) and op.arguments else None
    return bool(op.overwrites) or (written is not None and written.is_parameter)


def _is_target(argument: Argument) -> bool:
    """Whether an argument only says where to write to: a simulator would have the op write to a copy."""
    op = argument.op
    return argument.name == "out" or (argument.index == 0 and is_in_place(op.type) and bool(op.overwrites))


_Found = tuple[SpecMatch, str, str]


def _request(found: _Found | None, site: Site) -> Iterator[ActivationRequest]:
    if found is not None and found[0].spec is not None:
        yield site, found[0].spec, found[1], found[2]


def _input(program: Program, rules: ModuleRules, op: Op, op_rule: OpRule | None, argument: Argument) -> _Found | None:
    for path in reversed(op.module_stack):
        specs = rules[path].module_input_spec
        if specs and path in program.calls:
            call = program.calls[path]
            positions = [index for index, value in enumerate(call.inputs) if value is argument.value]
            match = lookup_spec(specs, [key for index in positions for key in (index, call.input_names[index])])
            if positions and match.found:
                return match, f"{rules[path].describe()}.module_input_spec[{match.key!r}]", path
    if op_rule is None:
        return None
    index = argument.index if argument.item is None else argument.item
    match = lookup_spec(op_rule.op_input_spec, (index,))
    return match, f"{op_rule.describe()}.op_input_spec[{match.key!r}]", op.module_path


def _output(program: Program, rules: ModuleRules, op: Op, op_rule: OpRule | None, value: Value) -> _Found | None:
    for path in reversed(op.module_stack):
        specs = rules[path].module_output_spec
        if specs and path in program.calls:
            for position, crossing in enumerate(program.calls[path].outputs):
                if crossing is value:
                    match = lookup_spec(specs, (position,))
                    if match.found:
                        return match, f"{rules[path].describe()}.module_output_spec[{match.key!r}]", path
    if op_rule is None:
        return None
    match = lookup_spec(op_rule.op_output_spec, (value.output_index,))
    return match, f"{op_rule.describe()}.op_output_spec[{match.key!r}]", op.module_path
