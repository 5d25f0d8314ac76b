"""Where activations of a graph program may be simulated, and what the configuration says about each place."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from bitwright.config.matching import SpecMatch, lookup_spec
from bitwright.program import Argument, Op, Program, Value

from .chains import Chain
from .empty_activations import is_empty
from .exact_values import exact_values
from .graph_ops import Passthrough, is_float, passthrough_of
from .known_ranges import KnownRange, known_range, known_ranges, sentinel_values
from .mutation import mutated_roots, writes_to
from .plan import Site
from .state_updates import state_updates
from .weight_views import state_read_by

__all__ = ["Demand", "Slot", "SlotTable", "build_slots"]


@dataclass(frozen=True, slots=True)
class Demand:
    """What the configuration says about a slot.

    Attributes:
        spec: the spec; None to leave the tensor alone.
        rank: the chain's place, smaller is stronger.
        rule: the part of the configuration, for people.
        module_path: the module whose configuration it is.
    """

    spec: Any
    rank: int
    rule: str
    module_path: str


@dataclass(eq=False, slots=True)
class Slot:
    """One side of an edge: a value where it is produced, or where one op reads it.

    Attributes:
        index: place in the table.
        value: the tensor.
        op: the op that reads it; None where the value is produced.
        arguments: the arguments of ``op`` that read it.
        demand: what the configuration says, None for nothing.
        fact: what is known about the values here.
    """

    index: int
    value: Value
    op: Op | None = None
    arguments: tuple[Argument, ...] = ()
    demand: Demand | None = None
    fact: KnownRange | None = None

    def sites(self) -> list[Site]:
        """Return the places of a plan that this slot stands for."""
        if self.op is not None:
            return [Site(self.op, argument=argument) for argument in self.arguments]
        assert self.value.producer is not None
        return [Site(self.value.producer, output_index=self.value.output_index)]


@dataclass(eq=False, slots=True)
class SlotTable:
    """All slots of a program.

    Attributes:
        slots: in order of execution, for each op first what it reads, then what it produces.
        outputs: index of the slot of a value where it is produced, by ``id``; only for values that chains and ops which
            move values produce.
        inputs: index of the slot of a value where an op reads it, by ``id`` of op and value.
        empty: names of ops with results that the configuration asks to simulate, and that have no elements.
    """

    slots: list[Slot] = field(default_factory=list)
    outputs: dict[int, int] = field(default_factory=dict)
    inputs: dict[tuple[int, int], int] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)

    def output(self, value: Value) -> Slot | None:
        """Return the slot of ``value`` where it is produced."""
        index = self.outputs.get(id(value))
        return None if index is None else self.slots[index]

    def input(self, op: Op, value: Value) -> Slot | None:
        """Return the slot of ``value`` where ``op`` reads it."""
        index = self.inputs.get((id(op), id(value)))
        return None if index is None else self.slots[index]

    def add_input(self, op: Op, value: Value) -> Slot:
        """Return the slot of ``value`` where ``op`` reads it, made if there is none."""
        known = self.input(op, value)
        if known is not None:
            return known
        slot = Slot(len(self.slots), value, op, tuple(a for a in op.arguments if a.value is value))
        self.slots.append(slot)
        self.inputs[id(op), id(value)] = slot.index
        return slot

    def add_output(self, value: Value) -> Slot:
        """Return the slot of ``value`` where it is produced, made if there is none."""
        known = self.output(value)
        if known is not None:
            return known
        slot = Slot(len(self.slots), value)
        self.slots.append(slot)
        self.outputs[id(value)] = slot.index
        return slot


def build_slots(program: Program, chains: Sequence[Chain], simulated: AbstractSet[int] = frozenset()) -> SlotTable:
    """Return the slots of a program with the demands of its chains.

    Tensors that are no real numbers or have no elements, states whose specs are the business of ``op_state_spec``, and
    values that hold mask sentinels, of which every digit matters or that go on from call to call by themselves have no
    slots. Neither have values whose ``id`` is in ``simulated``: their numbers are on a grid already. Tensors that an op
    writes to in place while others still look at them have none where they are produced, since the write would go to a
    copy, and those that are states none at all.
    """
    builder = _Builder(program, chains, simulated)
    for op in program.ops:
        builder.add(op)
    return builder.table


class _Builder:
    def __init__(self, program: Program, chains: Sequence[Chain], simulated: AbstractSet[int]) -> None:
        self.table = SlotTable()
        self.by_primary = {id(chain.primary): chain for chain in chains}
        self.by_last = {id(chain.last): chain for chain in chains}
        self.inner = {id(op) for chain in chains for op in chain.ops}
        self.facts = known_ranges(program)
        exact = exact_values(program)
        self.mutated = mutated_roots(program)
        self.excluded = sentinel_values(program) | exact.values | state_updates(program) | simulated
        self.exact_ops = exact.ops

    def add(self, op: Op) -> None:
        chain = self.by_primary.get(id(op))
        if chain is not None and id(op) not in self.exact_ops:
            self._add_inputs(chain)
        elif chain is None and id(op) not in self.inner and passthrough_of(op) is Passthrough.SAME_RANK:
            self._add_passthrough(op)
        chain = self.by_last.get(id(op))
        if chain is not None:
            self._add_outputs(chain)

    def _add_inputs(self, chain: Chain) -> None:
        op, role = chain.primary, chain.role
        for argument in op.arguments:
            value = argument.value
            if is_empty(value) or not self._may_stand_before(op, argument):
                continue
            if state_read_by(argument) is not None and not role.shares:
                continue
            slot = self.table.add_input(op, value)
            producer = value.producer
            if producer is not None and passthrough_of(producer) is Passthrough.OTHER_RANK and not self._changes(value):
                slot.fact = self.facts.get(id(value))
            if slot.demand is None and value.state is None:
                position = argument.index if argument.item is None else argument.item
                keys = (position,)
                match = lookup_spec(chain.rule.op_input_spec, keys)
                if match.key == "*" and role.inputs is not None and argument.index not in role.inputs:
                    continue
                slot.demand = _demand(chain, match, "op_input_spec")

    def _add_outputs(self, chain: Chain) -> None:
        for value in chain.last.outputs:
            if not self._may_stand(value):
                continue
            position = value.output_index
            match = lookup_spec(chain.rule.op_output_spec, (position,))
            is_of_others = match.key == "*" and chain.role.outputs is not None and position >= chain.role.outputs
            demand = None if is_of_others else _demand(chain, match, "op_output_spec")
            if is_empty(value):
                self.table.empty += [chain.last.name] if demand is not None and demand.spec is not None else []
                continue
            slot = self.table.add_output(value)
            slot.demand = demand
            if position == 0 and not is_of_others:
                slot.fact = known_range(chain.last)

    def _add_passthrough(self, op: Op) -> None:
        if not op.arguments or not op.outputs:
            return
        before, after = op.arguments[0].value, op.outputs[0]
        if is_empty(before) or is_empty(after):
            return
        if before.state is None and before.view is None and self._may_stand(before) and self._may_stand(after):
            self.table.add_input(op, before)
            self.table.add_output(after)

    def _may_stand(self, value: Value) -> bool:
        return is_float(value) and id(value) not in self.excluded and not self._changes(value)

    def _may_stand_before(self, op: Op, argument: Argument) -> bool:
        """Whether a simulator may stand right in front of an op: it sees what has been written until then."""
        value = argument.value
        if not self._changes(value):
            return self._may_stand(value)
        is_state = self.mutated[id(value)].state is not None
        return is_float(value) and id(value) not in self.excluded and not is_state and not writes_to(op, argument)

    def _changes(self, value: Value) -> bool:
        return id(value) in self.mutated


def _demand(chain: Chain, match: SpecMatch, section: str) -> Demand | None:
    if not match.found:
        return None
    rule = f"{chain.rule.describe()}.{section}[{match.key!r}]"
    return Demand(match.spec, chain.rank, rule, chain.primary.module_path)
