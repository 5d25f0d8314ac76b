"""Simulators that change nothing: the numbers that they would see lie on the same grid already.

Ops that only move numbers (views, transpositions, splits) leave them on the grid that they were rounded to. Fake
quantization is idempotent, so a second simulator with an equal spec, one scale for the whole tensor, is either the
identity or rounds to a slightly different grid a second time. It is kept where an op has integer kernels that want a
scale right at their inputs (linear, convolution, matrix product), and left out in front of ops that compute in floats.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.program import Op, Program, Value
from bitwright.quantization.spec import PerTensorGranularity

from .chains import Chain
from .graph_ops import computes_in_floats, only_moves
from .merge_specs import effective
from .reconcile import Group
from .slots import Slot, SlotTable

__all__ = ["without_redundant"]


def without_redundant(
    program: Program, chains: Sequence[Chain], table: SlotTable, groups: Sequence[Group]
) -> list[Group]:
    """Return the groups that are still needed, each with the slots at which its simulator has to stand.

    Takes time linear in the number of slots.
    """
    return _Pruning(program, chains, table, groups).remaining()


class _Pruning:
    def __init__(self, program: Program, chains: Sequence[Chain], table: SlotTable, groups: Sequence[Group]) -> None:
        self.table = table
        self.groups = list(groups)
        self.outputs = {id(value) for value in program.outputs}
        self.group_of = {slot.index: group for group in groups for slot in group.slots}
        self.in_floats = {id(op) for chain in chains if computes_in_floats(chain.role) for op in chain.ops}
        self.primaries = {id(chain.primary) for chain in chains}
        self.sources: dict[int, Value] = {}
        self.pieces: set[int] = set()
        for op in program.ops:
            if only_moves(op) and op.arguments:
                self._follow(op, op.arguments[0].value)
        self.dropped: set[int] = set()
        self.relied_on: set[int] = set()

    def remaining(self) -> list[Group]:
        for group in self.groups:
            if _has_one_scale(group):
                self._drop_behind_an_equal_one(group)
        for group in self.groups:
            if _has_one_scale(group) and id(group) not in self.dropped | self.relied_on:
                self._drop_in_front_of_equal_ones(group)
        kept = [group for group in self.groups if id(group) not in self.dropped]
        for group in kept:
            group.slots = [slot for slot in group.slots if not self._is_idle_piece(slot.value, group)]
        return kept

    def _follow(self, op: Op, moved: Value) -> None:
        source = self.sources.get(id(moved), moved)
        is_piece = len(op.outputs) > 1 or id(moved) in self.pieces
        for value in op.outputs:
            self.sources[id(value)] = source
            if is_piece:
                self.pieces.add(id(value))

    def _drop_behind_an_equal_one(self, group: Group) -> None:
        """Leave out what only ops that compute in floats ask for, behind a simulator of the same kind."""
        if not all(slot.op is not None and id(slot.op) in self.in_floats for slot in _demanding(group)):
            return
        before = [self._simulated_source(slot.value) for slot in group.slots]
        if all(other is not None and other is not group and _alike(group, other) for other in before):
            self.dropped.add(id(group))
            for other in before:
                assert other is not None
                self.relied_on.add(id(other))
                _note(other, group)

    def _simulated_source(self, value: Value) -> Group | None:
        source = self.sources.get(id(value))
        slot = None if source is None else self.table.output(source)
        group = None if slot is None else self.group_of.get(slot.index)
        return None if group is None or id(group) in self.dropped else group

    def _drop_in_front_of_equal_ones(self, group: Group) -> None:
        """Leave out the result of an op that computes in floats where every reader simulates it, once it was moved."""
        demanding = _demanding(group)
        if not all(slot.op is None and self._made_in_floats(slot.value) for slot in demanding):
            return
        readers: list[Group] = []
        for slot in demanding:
            if not self._collect_readers(slot.value, group, readers):
                return
        if readers:
            self.dropped.add(id(group))
            for other in readers:
                self.relied_on.add(id(other))
                _note(other, group)

    def _made_in_floats(self, value: Value) -> bool:
        return value.producer is not None and id(value.producer) in self.in_floats and not only_moves(value.producer)

    def _collect_readers(self, value: Value, group: Group, readers: list[Group]) -> bool:
        """Add the groups that simulate ``value`` for its readers; False if one reads it without, or returns it."""
        if id(value) in self.outputs:
            return False
        for use in value.uses:
            if only_moves(use.op) and id(use.op) not in self.primaries:
                if not all(self._collect_readers(output, group, readers) for output in use.op.outputs):
                    return False
                continue
            slot = self.table.input(use.op, value)
            other = None if slot is None else self.group_of.get(slot.index)
            if other is None or other is group or id(other) in self.dropped or not _alike(group, other):
                return False
            readers.append(other)
        return bool(value.uses)

    def _is_idle_piece(self, value: Value, group: Group) -> bool:
        """True for a piece of a tensor that ``group`` simulates whole, unless an op with integer kernels reads it."""
        if id(value) not in self.pieces or id(value) in self.outputs or self._simulated_source(value) is not group:
            return False
        return all(id(use.op) not in self.primaries or id(use.op) in self.in_floats for use in value.uses)


def _demanding(group: Group) -> list[Slot]:
    return [slot for slot in group.slots if slot.demand is not None and slot.demand.spec is not None]


def _has_one_scale(group: Group) -> bool:
    return isinstance(group.spec.granularity, PerTensorGranularity) and bool(_demanding(group))


def _alike(group: Group, other: Group) -> bool:
    return bool(effective(group.spec) == effective(other.spec))


def _note(other: Group, group: Group) -> None:
    sites = group.slots[0].sites()
    if sites and "also for" not in other.note:
        other.note = "; ".join(filter(None, (other.note, f"also for {sites[0].label}")))
