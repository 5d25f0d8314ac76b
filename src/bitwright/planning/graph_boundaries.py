"""Specs for the inputs and outputs of whole modules, in graph mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bitwright.config.matching import ModuleRule, ModuleRules, SpecMatch, lookup_spec
from bitwright.program import ModuleCall, Program, Value

from .empty_activations import is_empty
from .graph_ops import is_float
from .merge_specs import effective
from .plan import Problem
from .reconcile import Group
from .slots import Demand, Slot, SlotTable

__all__ = ["apply_boundaries", "override"]

_STRONGEST = -1


def apply_boundaries(program: Program, rules: ModuleRules, table: SlotTable, groups: list[Group]) -> list[Problem]:
    """Give tensors at module boundaries the specs of ``module_input_spec`` and ``module_output_spec``.

    Inputs are numbered in the order of forward's arguments (or named), outputs in the order of its results. Entries by
    module name are stronger than those by type; of nested modules the innermost wins. ``groups`` is changed in place.
    """
    problems: list[Problem] = []
    for path, rule in _by_strength(rules):
        call = program.calls.get(path)
        if call is None or not (call.inputs or call.outputs):
            message = "The module is not called with the example inputs, so its boundary is unknown. Remove the specs."
            problems.append(Problem("unknown-boundary", f"{rule.describe()} ({path or 'root'})", message))
            continue
        for boundary in (call, *call.repeats):
            _apply_inputs(path, rule, boundary, table, groups)
            _apply_outputs(path, rule, boundary, table, groups)
    return problems


def _by_strength(rules: ModuleRules) -> Iterator[tuple[str, ModuleRule]]:
    chosen = [(path, rule) for path, rule in rules.items() if rule.module_input_spec or rule.module_output_spec]
    yield from sorted(chosen, key=lambda entry: (-entry[1].level, entry[0].count(".") if entry[0] else -1))


def _apply_inputs(path: str, rule: ModuleRule, call: ModuleCall, table: SlotTable, groups: list[Group]) -> None:
    for index, value in enumerate(call.inputs):
        match = lookup_spec(rule.module_input_spec, (index, call.input_names[index]))
        if value is None or not match.found or not is_float(value) or is_empty(value):
            continue
        readers = {id(use.op): use.op for use in value.uses if path in use.op.module_stack}
        slots = [table.add_input(op, value) for op in readers.values()]
        _join_or_override(slots, _demand(path, rule, match, "module_input_spec"), groups)


def _apply_outputs(path: str, rule: ModuleRule, call: ModuleCall, table: SlotTable, groups: list[Group]) -> None:
    for index, value in enumerate(call.outputs):
        match = lookup_spec(rule.module_output_spec, (index,))
        if value is None or not match.found or not is_float(value) or not _made_inside(value, path):
            continue
        if is_empty(value):
            table.empty += [value.producer.name] if match.spec is not None and value.producer is not None else []
            continue
        _join_or_override([table.add_output(value)], _demand(path, rule, match, "module_output_spec"), groups)


def _made_inside(value: Value, path: str) -> bool:
    return value.producer is not None and path in value.producer.module_stack


def _demand(path: str, rule: ModuleRule, match: SpecMatch, section: str) -> Demand:
    return Demand(match.spec, _STRONGEST, f"{rule.describe()}.{section}[{match.key!r}]", path)


def _join_or_override(slots: list[Slot], demand: Demand, groups: list[Group]) -> None:
    """Give ``slots``, which are one tensor's, the simulator that the tensor has if it does the same, or their own."""
    for group in groups if slots and demand.spec is not None else ():
        if _is_for(slots[0].value, group) and effective(group.spec) == effective(demand.spec):
            others = [other for other in groups if other is not group]
            override(slots, replace(demand, spec=None), others)
            present = {slot.index for slot in group.slots}
            added = [slot for slot in slots if slot.index not in present]
            group.slots = sorted([*group.slots, *added], key=lambda slot: slot.index)
            group.demand = demand
            groups[:] = [other for other in groups if other is group or other in others]
            return
    override(slots, demand, groups)


def _is_for(value: Value, group: Group) -> bool:
    return group.spec is not None and all(slot.value is value for slot in group.slots)


def override(slots: list[Slot], demand: Demand, groups: list[Group]) -> None:
    """Take ``slots`` out of their groups and put them into one of their own, or into none where the spec is None."""
    taken = {slot.index for slot in slots}
    for group in groups:
        if any(slot.index in taken for slot in group.slots):
            group.slots = [slot for slot in group.slots if slot.index not in taken]
    groups[:] = [group for group in groups if group.slots]
    if slots and demand.spec is not None:
        groups.append(Group(sorted(slots, key=lambda slot: slot.index), demand.spec, demand))
