"""Values of which every digit matters: what becomes an index, a flag, a coordinate, an angle or a divisor.

Eight bits that span all positions of a sequence name the wrong row of an embedding, and an angle of a few hundred
radians that is off by one percent points anywhere. No range can be calibrated for such values, so they are left alone.
So are divisors and what is under a root or a logarithm, such as the variance that a norm written out in Python divides
by: there it is the relative error that counts, and in equal steps from the smallest number to the largest, as they
occur with a few massive activations (Sun et al., "Massive Activations in Large Language Models", 2024), the small
ones become 0. An error in an exponent becomes a factor, so exponents are left alone as well, such as the sums of decays
in recurrent attention; not the products of matrices among them, as scores before a softmax are. They are found
backwards from the ops that need every digit, through ops that read no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bitwright.program import Argument, Op, Program, Value
from bitwright.program.aten_names import canonical_name
from bitwright.program.masks import SENTINEL

from .graph_ops import only_moves, role_of
from .mutation import Aliases

__all__ = ["ExactValues", "exact_values"]

_CASTS = frozenset({"to", "_to_copy", "type", "type_as", "long", "int", "short", "char", "byte", "bool"})
_ROUNDING = frozenset(
    {"floor", "ceil", "round", "trunc", "fix", "frac", "floor_divide", "__floordiv__", "remainder", "fmod", "__mod__"}
    | {"bucketize", "searchsorted"}
)
_FLAGS = frozenset({"eq", "ne", "__eq__", "__ne__", "logical_not"})
_ANGLES = frozenset({"sin", "cos", "tan"})
# These read their argument for its relative size; the first ones return factors, which span as many magnitudes.
_INVERSES = frozenset({"rsqrt", "reciprocal"})
_LOGARITHMS = frozenset({"log", "log2", "log10"})
_EXPONENTIALS = frozenset({"exp", "exp2", "expm1"})
_POWERS = frozenset({"pow", "__pow__", "float_power"})
_REVERSED_DIVISIONS = frozenset({"__rdiv__", "__rtruediv__"})
_FACTORS = frozenset({"mul", "div", "neg"}) | _CASTS
_CONTRACTIONS = frozenset({"conv", "conv_transpose", "linear", "addmm", "matmul", "baddbmm", "grouped_mm", "einsum"})
# The argument of these that holds coordinates.
_COORDINATES = {"grid_sampler": 1, "grid_sample": 1}


@dataclass(slots=True)
class ExactValues:
    """What is left alone.

    Attributes:
        values: ids of the values.
        ops: ids of the ops that compute nothing else; their inputs are left alone there.
        exponents: ids of those of ``ops`` whose results end in an exponent.
    """

    values: set[int] = field(default_factory=set)
    ops: set[int] = field(default_factory=set)
    exponents: set[int] = field(default_factory=set)


def exact_values(program: Program) -> ExactValues:
    """Return the values of ``program`` of which every digit matters, in time linear in its size.

    A value that is rounded to an integer, or names a place, counts even if other ops read it too; so does what comes
    out of an inverse. One that becomes a flag counts if nothing else reads it, or if it is made of integers and
    constants only, as masks are; one that is a divisor or under a root if nothing else reads it; an angle too, unless
    no parameter has a part in it. Coordinates that are given to the model count where a weight turns them into angles,
    as random Fourier features do.
    """
    search = _Search(program)
    search.run()
    if search.repeats:  # what a later call of a module reads may be made behind the ops of the first one
        search.run()
    return search.found


class _Search:
    """The search backwards through a program.

    Attributes:
        found: what was found so far.
        repeats: by the id of a value that goes into a later call of a module, whose ops eager mode does not record,
            the values that the ops of the first call read in its place.
    """

    def __init__(self, program: Program) -> None:
        self.found = ExactValues()
        self.repeats = _repeats(program)
        self._program = program
        self._turning: set[int] = set()
        self._learned = _descendants(program, set())
        self._measured = _descendants(program, {id(value) for value in program.inputs if value.dtype.is_floating_point})
        self._outputs = {id(value) for value in program.outputs}
        self._inverses = _inverses(program)

    def run(self) -> None:
        """Visit every op, the last one first."""
        later = _LaterReads(self._program)
        for op in reversed(self._program.ops):
            self._visit(op, later.of(op))
            later.add(op)

    def _visit(self, op: Op, written: list[Argument] | None) -> None:
        found = self.found
        for value in op.outputs:
            uses = self._uses(value) if written is None else written
            wanted = id(value) in self._inverses or _only_needed_exactly(op, uses, found)
            if wanted and id(value) not in self._outputs:
                found.values.add(id(value))
        floats = [value for value in op.outputs if value.dtype.is_floating_point]
        if floats and all(id(value) in found.values for value in floats):
            uses = [use for value in floats for use in self._uses(value)] if written is None else written
            turns = all(_is_angle(use) or id(use.op) in self._turning for use in uses)
            if turns:
                self._turning.add(id(op))
            given = not any(id(argument.value) in self._learned for argument in op.arguments)
            if not _reads_parameter(op) or (turns and given):
                found.ops.add(id(op))
                if any(_is_exponent(use, found) for use in uses):
                    found.exponents.add(id(op))
        found.values.update(
            id(use.value)
            for use in op.arguments
            if _is_rounded(use)
            or (_is_angle(use) and id(use.value) not in self._learned)
            or (_is_flag(use) and id(use.value) not in self._measured)
        )

    def _uses(self, value: Value) -> list[Argument]:
        again = self.repeats.get(id(value), ())
        return value.uses if not again else [use for first in (value, *again) for use in first.uses]


def _repeats(program: Program) -> dict[int, list[Value]]:
    found: dict[int, list[Value]] = {}
    for call in program.calls.values() if program.mode == "eager" else ():
        first = dict(zip(call.input_names, call.inputs, strict=True))
        for repeat in call.repeats:
            for name, value in zip(repeat.input_names, repeat.inputs, strict=True):
                stand_in = first.get(name)
                if value is not None and stand_in is not None and stand_in is not value:
                    found.setdefault(id(value), []).append(stand_in)
    return found


class _LaterReads:
    """What reads the tensors that ops write to in place, learnt backwards, op by op."""

    def __init__(self, program: Program) -> None:
        aliases = Aliases()
        self._written: dict[int, set[int]] = {}
        for op in program.ops:
            aliases.add(op)
            roots = {id(aliases.root(value)) for value in aliases.written_by(op)}
            if roots:
                self._written[id(op)] = roots
        self._roots = set().union(*self._written.values())
        self._aliases = aliases
        self._outputs = {id(aliases.root(value)) for value in program.outputs}
        self._reads: dict[int, list[Argument]] = {}

    def of(self, op: Op) -> list[Argument] | None:
        """Return what reads later what ``op`` wrote, or a view of it; None for an op that writes to no tensor.

        A tensor that the model returns counts as read by nothing: how, nobody knows.
        """
        written = self._written.get(id(op))
        if written is None or written & self._outputs:
            return None if written is None else []
        return [use for root in written for use in self._reads.get(root, ())]

    def add(self, op: Op) -> None:
        """Take note of what ``op`` reads; what was read after it writes is what it wrote itself."""
        for use in op.arguments:
            root = id(self._aliases.root(use.value))
            if root in self._roots:
                self._reads.setdefault(root, []).append(use)


def _descendants(program: Program, roots: set[int]) -> set[int]:
    """Return the ids of values that a parameter, or one of ``roots``, has a part in."""
    found = set(roots)
    for op in program.ops:
        if _reads_parameter(op) or any(id(argument.value) in found for argument in op.arguments):
            found.update(id(value) for value in op.outputs)
    return found


def _inverses(program: Program) -> set[int]:
    """Return the ids of values that come out of an inverse, multiplied by numbers or moved at most."""
    found: set[int] = set()
    for op in program.ops:
        handed_on = op.arguments and all(id(argument.value) in found for argument in op.arguments)
        if _is_inverse(op) or (handed_on and (canonical_name(op.type) in _FACTORS or only_moves(op))):
            found.update(id(value) for value in op.outputs)
    return found


def _reads_parameter(op: Op) -> bool:
    return any(argument.value.state is not None and argument.value.state.is_parameter for argument in op.arguments)


def _only_needed_exactly(op: Op, uses: Sequence[Argument], found: ExactValues) -> bool:
    role = role_of(op)
    if role is not None and role.pattern in _CONTRACTIONS and any(_is_exponent(use, found) for use in uses):
        return False
    return bool(uses) and all(
        id(use.op) in found.ops
        or _is_rounded(use)
        or _is_flag(use)
        or _is_angle(use)
        or _is_relative(use)
        or _is_exponent(use, found)
        for use in uses
    )


def _is_exponent(use: Argument, found: ExactValues) -> bool:
    return canonical_name(use.op.type) in _EXPONENTIALS or id(use.op) in found.exponents


def _is_inverse(op: Op) -> bool:
    kind = canonical_name(op.type)
    if kind in _POWERS:
        return any(isinstance(n, int | float) and n < 0 for n in op.literals.values())
    return kind in _INVERSES or op.type in _REVERSED_DIVISIONS


def _is_relative(use: Argument) -> bool:
    kind = canonical_name(use.op.type)
    if _is_inverse(use.op) or kind in _LOGARITHMS:
        return True
    return kind == "div" and use.index == (0 if use.op.type in _REVERSED_DIVISIONS else 1)


def _is_rounded(use: Argument) -> bool:
    kind = canonical_name(use.op.type)
    if not use.value.dtype.is_floating_point:
        return False
    if kind in _COORDINATES:
        return use.index == _COORDINATES[kind]
    return kind in _ROUNDING or (kind in _CASTS and _result(use.op) == "integer")


def _is_flag(use: Argument) -> bool:
    kind = canonical_name(use.op.type)
    if kind == "mul" and any(isinstance(n, int | float) and abs(n) >= -SENTINEL for n in use.op.literals.values()):
        return True  # what is not quite 0 would be masked
    return kind in _FLAGS or (kind in _CASTS and _result(use.op) == "flag")


def _is_angle(use: Argument) -> bool:
    return canonical_name(use.op.type) in _ANGLES


def _result(op: Op) -> str:
    dtype = op.outputs[0].dtype if op.outputs else None
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return "number"
    return "flag" if str(dtype) == "torch.bool" else "integer"
