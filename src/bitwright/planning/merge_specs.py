"""The spec that slots with different demands agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from bitwright.quantization.spec import QuantizationScheme, QuantizationSpec
from bitwright.quantization.spec.qparams_calculator import (
    MovingAverageQParamsCalculator,
    StatelessQParamsCalculatorBase,
    _DefaultQParamsCalculator,
)

from .known_ranges import Bounds, behind_dropout
from .slots import Demand, Slot

__all__ = ["effective", "is_stateless", "merge_specs", "with_fields"]


def merge_specs(slots: Sequence[Slot]) -> tuple[QuantizationSpec | None, Demand | None, str]:
    """Return the spec of a group, the demand that decided, and a note on whom it overruled.

    The strongest demand wins. What is known about the values beats the scheme that it asks for; a bound holds only if
    it holds for every slot that somebody asked to quantize, because one simulator sees them all.
    """
    demands = [slot.demand for slot in slots if slot.demand is not None and slot.demand.spec is not None]
    if not demands:
        return None, None, ""
    winner = min(demands, key=lambda demand: demand.rank)
    equals = [demand.spec for demand in demands if demand.rank == winner.rank]
    spec = equals[0] if len(equals) == 1 else _middle(equals)
    changes: dict[str, Any] = {}
    scheme = _known_scheme(slots)
    if scheme is not None and not spec.dtype.is_floating_point and scheme != spec.qscheme:
        changes["qscheme"] = scheme
    bounds = _common_bounds(slots)
    if is_stateless(spec):
        bounds = (None, None)
    if bounds != tuple(spec.float_range):
        changes["float_range"] = list(bounds)
    note = _overruled(winner, demands)
    return (with_fields(spec, **changes) if changes else spec), winner, note


def with_fields(spec: QuantizationSpec, **changes: Any) -> QuantizationSpec:
    """Return a spec of the same class with some fields changed, checked anew.

    A float format cannot be asymmetric; its scheme becomes symmetric.
    """
    fields = {name: getattr(spec, name) for name in type(spec).model_fields}
    fields.update(changes)
    if fields["dtype"].is_floating_point:
        fields["qscheme"] = QuantizationScheme.SYMMETRIC
    elif fields.get("scale_dtype") is not None:
        fields["scale_dtype"] = None
    return type(spec)(**fields)


def is_stateless(spec: QuantizationSpec) -> bool:
    """Whether the simulator computes its parameters for each tensor anew, so that no range can be fixed."""
    return issubclass(spec.qparam_calculator_cls, StatelessQParamsCalculatorBase)


def _middle(specs: Sequence[QuantizationSpec]) -> QuantizationSpec:
    """Return what equally strong specs of one op agree on; where they do not, the alphabet decides for each field."""
    first = specs[0]
    if all(spec is first or spec == first for spec in specs):
        return first
    alike = [spec for spec in specs if type(spec) is type(first)]
    changes = {
        name: min((getattr(spec, name) for spec in alike), key=str)
        for name in type(first).model_fields
        if any(getattr(spec, name) != getattr(first, name) for spec in alike)
    }
    try:
        return with_fields(first, **changes)
    except ValidationError:  # the fields of one do not go with those of another
        return first


def effective(spec: QuantizationSpec) -> QuantizationSpec:
    """Return an activation's spec with the calculator that "default" stands for, so that equal ones compare equal."""
    if spec.qparam_calculator_cls is not _DefaultQParamsCalculator:
        return spec
    return spec.model_copy(update={"qparam_calculator_cls": MovingAverageQParamsCalculator})


def _known_scheme(slots: Sequence[Slot]) -> QuantizationScheme | None:
    schemes = {slot.fact.scheme for slot in slots if slot.fact is not None}
    if not schemes:
        return None
    return QuantizationScheme.ASYMMETRIC if QuantizationScheme.ASYMMETRIC in schemes else QuantizationScheme.SYMMETRIC


def _common_bounds(slots: Sequence[Slot]) -> Bounds:
    scaled = any(map(_leaves_dropout, slots))
    lows: list[float | None] = []
    highs: list[float | None] = []
    for slot in slots:
        if slot.demand is None or slot.demand.spec is None:
            continue
        low, high = slot.demand.spec.float_range
        known = slot.fact.bounds if slot.fact is not None else (None, None)
        known = behind_dropout(known) if scaled else known
        lows.append(known[0] if low is None else low)
        highs.append(known[1] if high is None else high)
    low = None if None in lows else min(bound for bound in lows if bound is not None)
    high = None if None in highs else max(bound for bound in highs if bound is not None)
    return low, high


def _leaves_dropout(slot: Slot) -> bool:
    producer = slot.value.producer
    return slot.op is None and producer is not None and "dropout" in producer.type


def _overruled(winner: Demand, demands: Sequence[Demand]) -> str:
    others = dict.fromkeys(d.rule for d in demands if d.spec != winner.spec and d.rule != winner.rule)
    return f"shared; decides over {', '.join(others)}" if others else ""
