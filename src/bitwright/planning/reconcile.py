"""One spec per tensor: producers, consumers and ops that move values agree on who shares what, in one pass.

Slots are joined by union-find, so that the time is nearly linear in the size of the program. First ops that move
values join what they read and write, whatever the configuration says, unless it says nothing anywhere. Then both ends
of an edge are joined, unless one of them is switched off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwright.program import Op, Program

from .chains import Chain
from .graph_ops import Passthrough, passthrough_of
from .merge_specs import merge_specs, with_fields
from .shared_axes import channel_axis, concat_dimension
from .sharing import DisjointSets
from .slots import Demand, Slot, SlotTable

__all__ = ["Group", "reconcile"]


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
    movers, loose = _join_moved(program, chains, table, sets)
    _join_edges(table, sets)
    groups = [Group([table.slots[i] for i in indices]) for indices in sets.groups()]
    by_root = {sets.find(group.slots[0].index): group for group in groups}
    for op, slot in movers:
        by_root[sets.find(slot)].movers.append(op)
    for group in groups:
        group.spec, group.demand, group.note = merge_specs(group.slots)
    for slots in loose:
        _agree_on_dtype([by_root[sets.find(i)] for i in slots])
    return [group for group in groups if group.spec is not None]


def _join_moved(
    program: Program, chains: Sequence[Chain], table: SlotTable, sets: DisjointSets
) -> tuple[list[tuple[Op, int]], list[list[int]]]:
    """Join what ops that move values read and write; return those ops, and slots that only share a dtype."""
    movers: list[tuple[Op, int]] = []
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
            for members, one_simulator in own(op, [table.slots[i] for i in slots]):
                if one_simulator:
                    sets.union_all(members)
                    movers.append((op, members[0]))
                else:
                    loose.append(members)
        elif _keeps_channels_apart(op, [table.slots[i] for i in slots]):
            loose.append(slots)
        else:
            sets.union_all(slots)
            movers.append((op, slots[0]))
    return movers, loose


def _keeps_channels_apart(op: Op, slots: Sequence[Slot]) -> bool:
    """True for a concatenation or split along the very dimension that has a scale for each index."""
    dimension = concat_dimension(op)
    if dimension is None:
        return False
    demands = [slot.demand for slot in reversed(slots) if slot.demand is not None and slot.demand.spec is not None]
    rank = len(slots[0].value.shape)
    return bool(demands) and channel_axis(demands[0].spec, rank) == dimension % rank


def _join_edges(table: SlotTable, sets: DisjointSets) -> None:
    """Join both ends of edges, from what is wanted on; an op that moves values hands it on to a side that is off."""
    units = sets.groups()
    unit_of = {index: number for number, unit in enumerate(units) for index in unit}
    wanted = {unit_of[slot.index] for slot in table.slots if slot.demand is not None and slot.demand.spec is not None}
    ends: dict[int, list[int]] = {}
    for slot in table.slots:
        produced = None if slot.op is None else table.output(slot.value)
        if produced is not None:
            ends.setdefault(slot.index, []).append(produced.index)
            ends.setdefault(produced.index, []).append(slot.index)
    waiting = list(wanted)
    while waiting:
        for index in units[waiting.pop()]:
            for other in ends.get(index, ()):
                if unit_of[other] not in wanted:
                    if _is_off(table.slots[other]):
                        continue
                    wanted.add(unit_of[other])
                    waiting.append(unit_of[other])
                sets.union(index, other)


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
