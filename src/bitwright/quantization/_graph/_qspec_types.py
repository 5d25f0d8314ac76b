"""What a registered pattern sees of the activations around an op: slots, and the specs that they have so far."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

__all__ = [
    "OP_INTRINSIC_PRIORITY",
    "FieldName",
    "FieldValue",
    "NodeSlot",
    "ProvisionalQSpec",
    "ProvisionalQSpecMap",
    "ReconciliationError",
    "SlotKind",
]

OP_INTRINSIC_PRIORITY = -1
"""Priority of what an op's formula says about its values; stronger than every configuration, which start at 0."""


class ReconciliationError(RuntimeError):
    """Slots that share a simulator cannot agree on what it does."""


class SlotKind(enum.Enum):
    """Side of an edge."""

    INPUT = "input"
    OUTPUT = "output"


class FieldName(enum.Enum):
    """Fields that slots agree on one by one."""

    DTYPE = "dtype"
    QSCHEME = "qscheme"
    QFORMULATION = "qformulation"
    GRANULARITY = "granularity"
    FLOAT_RANGE = "float_range"
    FAKE_QUANTIZE_CLS = "fake_quantize_cls"
    QPARAM_CALCULATOR_CLS = "qparam_calculator_cls"
    RANGE_CALCULATOR_CLS = "range_calculator_cls"
    SCALE_DTYPE = "scale_dtype"
    QUANTIZATION_TARGET = "quantization_target"


@dataclass(frozen=True, slots=True)
class FieldValue:
    """What a slot wants of one field; a smaller priority is stronger."""

    value: Any
    priority: int


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """One input or output of a node."""

    node: fx.Node
    kind: SlotKind
    arg_index: int


class ProvisionalQSpec:
    """The fields that a slot has so far.

    Args:
        fields: what is known; None for nothing.
        declined_by: priority of the configuration that wants the slot left alone; None where none does.
    """

    def __init__(self, fields: Mapping[FieldName, FieldValue] | None = None, declined_by: int | None = None) -> None:
        self.fields: dict[FieldName, FieldValue] = dict(fields or {})
        self.declined_by = declined_by

    @property
    def declined(self) -> bool:
        """Whether a configuration wants the slot left alone, which is not the same as saying nothing."""
        return self.declined_by is not None

    def __repr__(self) -> str:
        if self.declined:
            return f"ProvisionalQSpec(declined_by={self.declined_by})"
        values = {name.value: (entry.value, entry.priority) for name, entry in self.fields.items()}
        return f"ProvisionalQSpec({values})"


ProvisionalQSpecMap: TypeAlias = dict[NodeSlot, ProvisionalQSpec]
"""The slots that somebody spoke about. Slots that share a simulator map to one and the same object."""
