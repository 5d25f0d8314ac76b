"""What slots have in common: one simulator, single fields, or facts about the data.

The rules by which fields are decided are those of :mod:`bitwright.planning.merge_specs`: the strongest wins, an op's
formula is stronger than every configuration, and a range bound holds only where it holds for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ._qspec_types import FieldName, FieldValue, NodeSlot, ProvisionalQSpec, ProvisionalQSpecMap

__all__ = ["Constraint", "InheritFields", "ShareFields", "ShareObserverInstance"]


class Constraint(ABC):
    """Something that holds between slots."""

    @abstractmethod
    def apply(self, qspecs: ProvisionalQSpecMap) -> set[NodeSlot]:
        """Make it hold in ``qspecs``; return the slots that changed, none if it held already."""


@dataclass(frozen=True)
class ShareFields(Constraint):
    """Slots agree on some fields and keep simulators of their own."""

    _slots: frozenset[NodeSlot]
    fields: frozenset[FieldName]

    def apply(self, qspecs: ProvisionalQSpecMap) -> set[NodeSlot]:
        """Give the strongest value of each field to every slot that is there and not declined."""
        changed: set[NodeSlot] = set()
        present = [slot for slot in self._slots if slot in qspecs and not qspecs[slot].declined]
        for field in self.fields:
            decided = _reconcile_field(field, present, qspecs)
            if decided is not None:
                changed |= {slot for slot in present if _assign(qspecs[slot], field, decided)}
        return changed


@dataclass(frozen=True)
class ShareObserverInstance(Constraint):
    """Slots have one simulator, together with all slots that share theirs already."""

    _slots: frozenset[NodeSlot]

    def apply(self, qspecs: ProvisionalQSpecMap) -> set[NodeSlot]:
        """Map the slots, and whoever shares with one of them, to one object with the fields that they agree on."""
        joined = {id(qspecs[slot]) for slot in self._slots if slot in qspecs}
        group = [slot for slot, qspec in qspecs.items() if id(qspec) in joined]
        group += [slot for slot in self._slots if slot not in qspecs]
        merged = _merge([qspecs[slot] for slot in group if slot in qspecs])
        if len(joined) == 1 and all(slot in qspecs for slot in group):
            present = qspecs[group[0]]
            if (present.fields, present.declined_by) == (merged.fields, merged.declined_by):
                return set()
        qspecs.update(dict.fromkeys(group, merged))
        return set(group)


@dataclass(frozen=True)
class InheritFields(Constraint):
    """What is known about a slot's data holds for slots that see the same data in another shape.

    Nothing is decided here: the targets take the source's values as they are, and keep simulators of their own.
    """

    source: NodeSlot
    targets: frozenset[NodeSlot]
    fields: frozenset[FieldName]

    def apply(self, qspecs: ProvisionalQSpecMap) -> set[NodeSlot]:
        """Copy the fields to every target that is there and not declined."""
        source = qspecs.get(self.source)
        if source is None or source.declined:
            return set()
        known = [(field, source.fields[field]) for field in self.fields if field in source.fields]
        changed: set[NodeSlot] = set()
        for target in self.targets:
            qspec = qspecs.get(target)
            if qspec is not None and not qspec.declined:
                changed |= {target for field, value in known if _assign(qspec, field, value)}
        return changed


def _reconcile_field(field: FieldName, slots: Iterable[NodeSlot], qspecs: ProvisionalQSpecMap) -> FieldValue | None:
    """Return the value that slots agree on for one field, None if none of them has it."""
    return _decide(field, [qspecs[slot] for slot in slots if slot in qspecs])


def _decide(field: FieldName, qspecs: Sequence[ProvisionalQSpec]) -> FieldValue | None:
    values = [qspec.fields[field] for qspec in qspecs if field in qspec.fields and not qspec.declined]
    if field is FieldName.QSCHEME:
        values = [value for value in values if value.value is not None]
    if not values:
        return None
    if field is FieldName.FLOAT_RANGE:
        return _widest(values)
    return min(values, key=lambda value: (value.priority, str(value.value)))


def _widest(values: Sequence[FieldValue]) -> FieldValue:
    """Return the range that covers all: one simulator sees everybody's data, whoever is stronger."""
    low = _outer([value.value[0] for value in values], min)
    high = _outer([value.value[1] for value in values], max)
    return FieldValue([low, high], min(value.priority for value in values))


def _outer(bounds: Sequence[float | None], outermost: Callable[[Iterable[float]], float]) -> float | None:
    known = [bound for bound in bounds if bound is not None]
    return outermost(known) if len(known) == len(bounds) else None


def _merge(qspecs: Sequence[ProvisionalQSpec]) -> ProvisionalQSpec:
    """Return the spec of one simulator; it is declined only where somebody declines and nobody asks for it."""
    declined = [qspec.declined_by for qspec in qspecs if qspec.declined_by is not None]
    fields = {field: value for field in FieldName if (value := _decide(field, qspecs)) is not None}
    if declined and not fields:
        return ProvisionalQSpec(declined_by=min(declined))
    return ProvisionalQSpec(fields)


def _assign(qspec: ProvisionalQSpec, field: FieldName, value: FieldValue) -> bool:
    if qspec.fields.get(field) == value:
        return False
    qspec.fields[field] = value
    return True
