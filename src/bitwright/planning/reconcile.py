"""One spec per tensor: producers, consumers and ops that move values agree on who shares what, in one pass.

Slots are joined by union-find, so that the time is nearly linear in the size of the program. First ops that move
values join what they read and write, whatever the configuration says. Then both ends of an edge are joined, unless one
of them is switched off. A configured op (pooling, mean, concatenation) of whose inputs the configuration says nothing
waits until an edge brings a simulation to one of them; if none does, its output has a simulator of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwright.program import Op, Program, Value

from .chains import Chain
from .graph_ops import Passthrough, passthrough_of
from .merge_specs import merge_specs, with_fields
from .shared_axes import channel_axis, concat_dimension
from .sharing import DisjointSets
from .slots import Demand, Slot, SlotTable

__all__ = ["Group", "reconcile"]


_Join = tuple[Op, list[int]]
"""An op that moves values, and the indices of slots that it makes one."""


@dataclass(eq=False, slots=True)
class Group:
    """Slots that have one simulator.

    Attributes:
        slots: in order of execution.
        spec: what the simulator does; None for no simulator.
        demand: the demand that decided.
        note: whom it overruled.
        movers: ops that hand values on within the group.
    """

    slots: list[Slot]
    spec: Any = None
    demand: Demand | None = None
    note: str = ""
    movers: list[Op] = field(default_factory=list)


def reconcile(program: Program, chains: Sequence[Chain], table: SlotTable) -> list[Group]:
    """Return the groups of slots that are simulated, each with the spec that its members agree on.

    In a group the strongest chain's spec wins. Ranges known from formulas set the scheme, and a bound only where all
    members have it. Take a tensor that one consumer wants quantized and another wants left alone: it is quantized for
    the first one if its producer was told to leave it alone, for both if not.
    """
    sets = DisjointSets(len(table.slots))
    joined, waiting, loose = _moved(program, chains, table)
    for _, members in joined:
        sets.union_all(members)
    joined += _join_edges(table, sets, waiting)
    groups = [Group([table.slots[i] for i in indices]) for indices in sets.groups()]
    by_root = {sets.find(group.slots[0].index): group for group in groups}
    for op, members in joined:
        by_root[sets.find(members[0])].movers.append(op)
    for group in groups:
        group.spec, group.demand, group.note = merge_specs(group.slots)
    for slots in loose:
        _agree_on_dtype([by_root[sets.find(i)] for i in slots])
    return [group for group in groups if group.spec is not None]


def _moved(
    program: Program, chains: Sequence[Chain], table: SlotTable
) -> tuple[list[_Join], list[_Join], list[list[int]]]:
    """Return what ops that move values join, at once and where a simulation arrives, and slots that share a dtype."""
    at_once: list[_Join] = []
    waiting: list[_Join] = []
    loose: list[list[int]] = []
    sharing = {id(chain.primary): chain.role for chain in chains if chain.role.shares}
    for op in program.ops:
        if id(op) not in sharing and passthrough_of(op) is not Passthrough.SAME_RANK:
            continue
        found = [table.input(op, argument.value) for argument in op.arguments]
        found += [table.output(value) for value in op.outputs]
        slots = list(dict.fromkeys(slot.index for slot in found if slot is not None))
        if not slots:
            continue
        own = sharing[id(op)].sharing if id(op) in sharing else None
        if own is not None:
            parts = own(op, [table.slots[i] for i in slots])
        else:
            parts = [(slots, not _keeps_channels_apart(op, [table.slots[i] for i in slots]))]
        for members, one_simulator in parts:
            if not one_simulator:
                loose.append(members)
            elif id(op) in sharing and _says_nothing_of_inputs([table.slots[i] for i in members]):
                waiting.append((op, members))
            else:
                at_once.append((op, members))
    return at_once, waiting, loose


def _says_nothing_of_inputs(slots: Sequence[Slot]) -> bool:
    """Whether neither the configuration nor an op in front that only moves values speaks of what an op reads."""
    inputs = [slot for slot in slots if slot.op is not None]
    return bool(inputs) and not any(slot.demand is not None or _is_moved(slot.value) for slot in inputs)


def _is_moved(value: Value) -> bool:
    return value.producer is not None and passthrough_of(value.producer) is Passthrough.SAME_RANK


def _keeps_channels_apart(op: Op, slots: Sequence[Slot]) -> bool:
    """True for a concatenation or split along the very dimension that has a scale for each index."""
    dimension = concat_dimension(op)
    if dimension is None:
        return False
    demands = [slot.demand for slot in reversed(slots) if slot.demand is not None and slot.demand.spec is not None]
    rank = len(slots[0].value.shape)
    return bool(demands) and channel_axis(demands[0].spec, rank) == dimension % rank


def _join_edges(table: SlotTable, sets: DisjointSets, waiting: Sequence[_Join]) -> list[_Join]:
    """Join both ends of edges, from what is wanted on; an op that moves values hands it on to a side that is off.

    Returns those of ``waiting`` to which a simulation came.
    """
    units = sets.groups()
    unit_of = {index: number for number, unit in enumerate(units) for index in unit}
    wanted = {unit_of[slot.index] for slot in table.slots if slot.demand is not None and slot.demand.spec is not None}
    ends = _edges(table)
    join_of = {index: join for join in waiting for index in join[1] if table.slots[index].op is not None}
    joined: dict[int, _Join] = {}
    queue = list(wanted)
    while queue:
        for index in units[queue.pop()]:
            join = join_of.get(index)
            if join is not None and id(join) not in joined:
                joined[id(join)] = join
                sets.union_all(join[1])
                reached = dict.fromkeys(unit_of[member] for member in join[1])
                queue += [unit for unit in reached if unit not in wanted]
                wanted.update(reached)
            for other in ends.get(index, ()):
                if unit_of[other] not in wanted:
                    if _is_off(table.slots[other]):
                        continue
                    wanted.add(unit_of[other])
                    queue.append(unit_of[other])
                sets.union(index, other)
    return list(joined.values())


def _edges(table: SlotTable) -> dict[int, list[int]]:
    """Return for each slot the slots at the other ends of its edges."""
    ends: dict[int, list[int]] = {}
    for slot in table.slots:
        produced = None if slot.op is None else table.output(slot.value)
        if produced is not None:
            ends.setdefault(slot.index, []).append(produced.index)
            ends.setdefault(produced.index, []).append(slot.index)
    return ends


def _is_off(slot: Slot) -> bool:
    return slot.demand is not None and slot.demand.spec is None


def _agree_on_dtype(groups: Sequence[Group]) -> None:
    decided = [group for group in groups if group.demand is not None]
    if not decided:
        return
    strongest = min(decided, key=lambda group: group.demand.rank if group.demand is not None else 0)
    for group in decided:
        if group.spec.dtype != strongest.spec.dtype:
            group.spec = with_fields(group.spec, dtype=strongest.spec.dtype)
