"""What is known about an activation before any data is seen: ranges that an op's formula gives, and mask sentinels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from bitwright.program import Op, Program, Value
from bitwright.program.aten_names import canonical_name
from bitwright.program.masks import SENTINEL
from bitwright.quantization.spec import QuantizationScheme

from .graph_ops import passthrough_of
from .mutation import Aliases

__all__ = ["Bounds", "KnownRange", "behind_dropout", "known_range", "known_ranges", "sentinel_values"]

Bounds = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class KnownRange:
    """The range of an op's output by its formula, and the scheme that fits it."""

    scheme: QuantizationScheme
    bounds: Bounds


_ASYMMETRIC, _SYMMETRIC = QuantizationScheme.ASYMMETRIC, QuantizationScheme.SYMMETRIC
_UNIT = KnownRange(_ASYMMETRIC, (0.0, 1.0))


def _hardtanh(op: Op) -> KnownRange:
    low = float(op.literals.get("min_val", -1.0))
    high = float(op.literals.get("max_val", 1.0))
    scheme = _SYMMETRIC if low == -high else _ASYMMETRIC
    return KnownRange(scheme, (min(low, 0.0), max(high, 0.0)))


_RANGES: Mapping[str, Callable[[Op], KnownRange]] = MappingProxyType(
    {
        "tanh": lambda _: KnownRange(_SYMMETRIC, (-1.0, 1.0)),
        "sigmoid": lambda _: _UNIT,
        "hardsigmoid": lambda _: _UNIT,
        "softmax": lambda _: _UNIT,
        "relu": lambda _: KnownRange(_ASYMMETRIC, (0.0, None)),
        "relu6": lambda _: KnownRange(_ASYMMETRIC, (0.0, 6.0)),
        "hardtanh": _hardtanh,
    }
)


def known_range(op: Op) -> KnownRange | None:
    """Return the range of the first output of ``op`` where its formula gives one."""
    rule = _RANGES.get(canonical_name(op.type))
    return None if rule is None else rule(op)


def known_ranges(program: Program) -> dict[int, KnownRange]:
    """Return what is known about each value by ``id``; ops that only move values hand on what holds for their input."""
    found: dict[int, KnownRange] = {}
    for op in program.ops:
        fact = known_range(op)
        if fact is None and passthrough_of(op) is not None and op.arguments:
            fact = _handed_on(found.get(id(op.arguments[0].value)), op)
        if fact is not None and op.outputs:
            found[id(op.outputs[0])] = fact
    return found


def _handed_on(fact: KnownRange | None, op: Op) -> KnownRange | None:
    if fact is None or "dropout" not in op.type:
        return fact
    bounds = behind_dropout(fact.bounds)
    return KnownRange(fact.scheme, bounds) if bounds[0] is not None else None


def behind_dropout(bounds: Bounds) -> Bounds:
    """Return what is left of ``bounds`` behind a dropout, which scales up what it keeps in training: 0 as the low."""
    return (0.0 if bounds[0] == 0.0 else None), None


# A number at least this large stands for infinity.
_HUGE = 1e30
# In front of a softmax a number like this hides what it is added to, as the -100 of shifted windows does:
# exp(-50) is 2e-22.
_HIDING = -50.0
# Two numbers in a byte, which torch cannot take apart.
_PACKED_PAIRS = frozenset({torch.float4_e2m1fn_x2})
_NORMALISERS = frozenset({"softmax", "scaled_dot_product_attention"})
_SOURCES = frozenset(
    {"full", "full_like", "new_full", "fill", "masked_fill", "where", "scalar_tensor", "mul"} | {"tensor"}
)
_CARRIERS = frozenset(
    {"add", "sub", "rsub", "neg", "mul", "where", "masked_fill", "cat", "stack", "to", "_to_copy", "triu", "tril"}
    | {"repeat", "expand"}
    | {"index_put", "copy", "slice_scatter", "select_scatter", "masked_scatter", "type_as", "detach", "alias"}
    | {"lift_fresh_copy", "fill"}
)


def sentinel_values(program: Program) -> set[int]:
    """Return the ids of values that hold mask sentinels (``-inf``, ``finfo.min``, ``-1e4``) among their numbers.

    One scale for such a tensor would round everything else to zero, so these values are not simulated. The same goes
    for positive sentinels (``scores - 1e30 * mask``), for infinity in front of a minimum, and in front of a softmax for
    numbers that would be harmless elsewhere (``-100``).
    """
    states = {id(value.state): value for op in program.ops for value in _state_arguments(op)}
    found = {id(value) for value in states.values() if _is_sentinel_state(value)}
    subtracted: set[int] = set()
    aliases = Aliases()
    for op in program.ops:
        aliases.add(op)
        found.update(id(argument.value) for argument in op.arguments if argument.value.is_masked)
        carries = _carries(op)
        reads = {id(argument.value) for argument in op.arguments}
        taken = _taken_away(op, subtracted)
        if _is_source(op) or (carries and reads & found) or taken:
            found.update(taken)
            found.update(id(value) for value in op.outputs)
            found.update(id(value) for value in aliases.written_by(op))
        elif _multiplies_by_sentinel(op) or (carries and reads & subtracted):
            subtracted.update(id(value) for value in op.outputs)
        found.update(id(value) for value in op.outputs if value.is_masked)
    return found | _hidden_from_softmax(program)


def _hidden_from_softmax(program: Program) -> set[int]:
    """Return the ids of values on the way from a number that hides others to the softmax in front of which it does."""
    hiding = {id(value) for op in program.ops for value in _state_arguments(op) if _hides_by_state(value)}
    wanted: set[int] = set()
    for op in program.ops:
        reads = {id(argument.value) for argument in op.arguments} & hiding
        if canonical_name(op.type) in _NORMALISERS:
            wanted |= reads
        elif (reads and _carries(op)) or _is_source(op, _HIDING):
            hiding.update(id(value) for value in op.outputs)
    for op in reversed(program.ops) if wanted else ():
        if any(id(value) in wanted for value in op.outputs):
            wanted.update(id(argument.value) for argument in op.arguments if id(argument.value) in hiding)
    return wanted


def _taken_away(op: Op, candidates: set[int]) -> set[int]:
    """Return those of ``candidates`` whose negative ``op`` adds or returns."""
    kind = canonical_name(op.type)
    if kind not in ("sub", "rsub", "neg", "__neg__"):
        return set()
    index = 1 if kind == "sub" and len(op.arguments) > 1 else 0
    return {id(argument.value) for argument in op.arguments if argument.index == index} & candidates


def _state_arguments(op: Op) -> list[Value]:
    return [argument.value for argument in op.arguments if argument.value.state is not None]


def _is_source(op: Op, sentinel: float = SENTINEL) -> bool:
    kind = canonical_name(op.type)
    if kind not in _SOURCES:
        return False
    return any(number <= sentinel or (kind != "mul" and number >= _HUGE) for number in _numbers(op))


def _multiplies_by_sentinel(op: Op) -> bool:
    return canonical_name(op.type) == "mul" and any(number >= -SENTINEL for number in _numbers(op))


def _numbers(op: Op) -> list[float]:
    return [n for n in op.literals.values() if isinstance(n, int | float) and not isinstance(n, bool)]


def _carries(op: Op) -> bool:
    return canonical_name(op.type) in _CARRIERS or passthrough_of(op) is not None


def _is_sentinel_state(value: Value) -> bool:
    buffer = _readable_buffer(value)
    if value.state is None or buffer is None or "running" in value.state.name:
        return False
    return bool(torch.amin(buffer) <= SENTINEL)


def _hides_by_state(value: Value) -> bool:
    buffer = _readable_buffer(value)
    if buffer is None or not bool(torch.amin(buffer) <= _HIDING):
        return False
    return bool(((buffer == 0) | (buffer <= _HIDING)).all())


def _readable_buffer(value: Value) -> torch.Tensor | None:
    """Return the numbers of a dense buffer of real numbers, None where there are none."""
    state = value.state
    if state is None or state.is_parameter or not state.tensor.is_floating_point():
        return None
    tensor = state.tensor.detach()
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout is not torch.strided or tensor.dtype in _PACKED_PAIRS:
        return None
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor  # there is no minimum of float8
