"""The plan: every decision about a model before the model is touched."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bitwright.config.spec import CompressionSpec, CompressionTargetTensor
from bitwright.program import Argument, Op, StateTensor, Value

__all__ = ["Placement", "Plan", "PlanRow", "Problem", "Severity", "Site"]


class Severity(enum.StrEnum):
    """How bad a problem is: an ERROR stops ``prepare``; a WARNING does so only with ``strict=True``."""

    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the configuration that cannot be applied as written.

    Attributes:
        code: short name of the kind of problem (``"unmatched-key"``, ``"axis-unresolved"``, ``"block-size"``).
        where: config key or tensor that it concerns.
        message: what is wrong and what to do.
        severity: see :class:`Severity`.
    """

    code: str
    where: str
    message: str
    severity: Severity = Severity.WARNING

    def __str__(self) -> str:
        return f"[{self.code}] {self.where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Site:
    """One place where an activation is simulated: an argument of an op, or one of its outputs.

    Attributes:
        op: the op.
        argument: the argument that is replaced, None for an output.
        output_index: position of the output, None for an argument.
    """

    op: Op
    argument: Argument | None = None
    output_index: int | None = None

    @property
    def value(self) -> Value:
        """The tensor that stands here."""
        if self.argument is not None:
            return self.argument.value
        # An exported graph holds only those results of an op that somebody reads.
        return next(value for value in self.op.outputs if value.output_index == self.output_index)

    @property
    def label(self) -> str:
        """``"conv.conv2d[input]"`` or ``"conv.conv2d[output 0]"``."""
        role = self.argument.label if self.argument is not None else f"output {self.output_index}"
        return f"{self.op.name}[{role}]"


@dataclass(eq=False, slots=True)
class Placement:
    """One simulator and every place where it stands.

    Attributes:
        spec: what it does, with axis and block size resolved.
        target: WEIGHT or ACTIVATION.
        state: the weight, for a weight.
        sites: the places, for an activation; several share one simulator.
        rule: the part of the configuration that asked for it, for people.
        module_path: the module whose configuration decided (its schedule applies).
    """

    spec: CompressionSpec
    target: CompressionTargetTensor
    rule: str
    module_path: str
    state: StateTensor | None = None
    sites: list[Site] = field(default_factory=list)
    note: str = ""

    @property
    def name(self) -> str:
        """Name of the tensor, as the plan prints it."""
        return self.state.name if self.state is not None else self.sites[0].label


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One tensor of the plan.

    Attributes:
        tensor: dotted name of a weight, or the label of an activation's site.
        kind: ``"weight"`` or ``"activation"``.
        shape: sizes of the tensor.
        dtype: name of the tensor's dtype.
        spec: the resolved spec, None where the tensor is left as it is.
        rule: the part of the configuration that decided.
        group: rows with the same number share one simulator; -1 where there is none.
        block_size: shape of one unit that has a scale of its own, empty where not applicable.
        dense_bytes: bytes now (weights only; 0 for activations).
        compressed_bytes: bytes of the packed artifact, scales and offsets included (weights only).
        note: why, where that is not obvious.
        masked: whether a pruning mask stands on the weight already.
        linear: whether it is the weight of linear layers alone.
    """

    tensor: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    spec: CompressionSpec | None
    rule: str
    group: int = -1
    block_size: tuple[int, ...] = ()
    dense_bytes: int = 0
    compressed_bytes: int = 0
    note: str = ""
    masked: bool = False
    linear: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON-compatible data."""
        return {
            "tensor": self.tensor,
            "kind": self.kind,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "spec": None if self.spec is None else self.spec.model_dump(mode="json"),
            "rule": self.rule,
            "group": self.group,
            "block_size": list(self.block_size),
            "dense_bytes": self.dense_bytes,
            "compressed_bytes": self.compressed_bytes,
            "note": self.note,
        }


@dataclass(eq=False, slots=True)
class Plan:
    """All decisions for one model and one configuration. Prints as a table.

    Attributes:
        mode: ``"eager"`` or ``"graph"``.
        rows: one per weight of a recognised op and one per activation that is simulated, in order of execution.
        problems: everything that could not be applied as written.
        placements: the simulators to insert.
        unfit: simulators that the configuration asks for and that are left out, since the sizes of their tensors are no
            multiples of the blocks.
    """

    mode: str
    rows: list[PlanRow]
    problems: list[Problem]
    placements: list[Placement]
    unfit: list[Placement] = field(default_factory=list)

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all planned weights now."""
        return sum(row.dense_bytes for row in self.rows)

    @property
    def compressed_bytes(self) -> int:
        """Bytes of all planned weights in the packed artifact."""
        return sum(row.compressed_bytes for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible data."""
        return {
            "mode": self.mode,
            "rows": [row.to_dict() for row in self.rows],
            "problems": [
                {"code": p.code, "where": p.where, "message": p.message, "severity": p.severity.value}
                for p in self.problems
            ],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return the plan as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        from .table import format_plan

        return format_plan(self)
